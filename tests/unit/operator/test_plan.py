"""What is written, deleted, replaced or refused, and that nothing is when nothing changed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pd_operator.core.observed import HASH_ANNOTATION, Child, Observed, Workload, immutable_fields
from pd_operator.core.observed_kinds import CHILD_KINDS, Ref
from pd_operator.core.plan import Apply, Delete, Plan, Why, plan, ref_of, stamp
from pd_operator.core.reasons import Reason
from pd_operator.core.render_children import render_children
from pd_operator.core.render_context import RenderContext
from support.pddeployments import deployment

UID = "uid-of-qwen"
OWNER = ("PDDeployment", "qwen", UID)
RAW = {"metadata": {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}}


def manifest(kind: str = "StatefulSet", name: str = "qwen-decode", **spec: Any) -> dict[str, Any]:
    """A small rendered child."""
    return {
        "apiVersion": "apps/v1" if kind in ("StatefulSet", "Deployment") else "v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "models",
            "labels": {"app.kubernetes.io/managed-by": "pd-operator", "pdserving.dev/role": "decode"},
        },
        "spec": spec or {"replicas": 1},
    }


def owned(value: Any) -> dict[str, Any]:
    """The ownership record of a plain object without lists."""
    return {f"f:{key}": owned(item) if isinstance(item, dict) else {} for key, item in value.items()}


def live(rendered: dict[str, Any], **changes: Any) -> Child:
    """The child as it is after `rendered` was applied, with changes."""
    stamped = stamp(rendered)
    record = owned({key: value for key, value in stamped.items() if key not in ("apiVersion", "kind")})
    workload = None
    if rendered["kind"] in ("StatefulSet", "Deployment"):
        workload = Workload(current=True, immutable=json.dumps(immutable_fields(rendered["kind"], rendered)))
    fields: dict[str, Any] = {
        "ref": ref_of(stamped),
        "uid": "uid-of-child",
        "version": 7,
        "deployment": "qwen",
        "role": "decode",
        "managed": True,
        "owner": OWNER,
        "rendered_hash": stamped["metadata"]["annotations"][HASH_ANNOTATION],
        "owned_fields": json.dumps(record),
        "workload": workload,
    }
    return Child(**{**fields, **changes})


def seen(*children: Child) -> Observed:
    """What was seen: these children and nothing else."""
    return Observed(raw=RAW, children={child.ref: child for child in children})


def only(made: Plan) -> Apply | Delete:
    """The single action of a plan."""
    assert len(made.actions) == 1
    return made.actions[0]


def test_absent_children_are_applied_in_order() -> None:
    first, second = manifest("Service", "a"), manifest("StatefulSet", "b")
    made = plan([first, second], seen())
    assert [(action.ref.name, action.why, action.uid) for action in made.actions] == [
        ("a", Why.ABSENT, None),
        ("b", Why.ABSENT, None),
    ]
    assert made.refusals == ()


def test_nothing_is_written_when_nothing_changed() -> None:
    rendered = manifest()
    assert plan([rendered], seen(live(rendered))) == Plan()


def test_a_changed_manifest_is_applied_to_that_very_object() -> None:
    action = only(plan([manifest(replicas=3)], seen(live(manifest(replicas=1)))))
    assert isinstance(action, Apply)
    assert (action.why, action.uid) == (Why.CHANGED, "uid-of-child")
    assert action.manifest["spec"] == {"replicas": 3}


def test_a_field_that_somebody_took_is_applied_again() -> None:
    rendered = manifest(replicas=2)
    child = live(rendered)
    record = json.loads(child.owned_fields)
    record["f:spec"] = {".": {}}
    action = only(plan([rendered], seen(live(rendered, owned_fields=json.dumps(record)))))
    assert action.why is Why.EDITED


def test_a_field_that_the_server_never_keeps_is_not_applied_for_ever() -> None:
    rendered = manifest(replicas=2)
    record = json.loads(live(rendered).owned_fields)
    record["f:spec"] = {".": {}}
    child = live(rendered, owned_fields=json.dumps(record))
    assert plan([rendered], seen(child), {child.uid: frozenset({"spec.replicas"})}) == Plan()
    assert only(plan([rendered], seen(child), {child.uid: frozenset({"spec.other"})})).why is Why.EDITED


def test_the_hash_does_not_depend_on_key_order_and_not_on_itself() -> None:
    rendered = manifest(replicas=2)
    turned = {key: rendered[key] for key in reversed(rendered)}
    assert stamp(rendered) == stamp(turned) == stamp(stamp(rendered))
    assert HASH_ANNOTATION not in rendered["metadata"].get("annotations", {})


def test_annotations_of_the_manifest_stay() -> None:
    rendered = manifest()
    rendered["metadata"]["annotations"] = {"a": "b"}
    assert stamp(rendered)["metadata"]["annotations"]["a"] == "b"


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (("Deployment", "other", "uid-x"), Reason.FOREIGN_OBJECT),
        (("PDDeployment", "other", "uid-x"), Reason.FOREIGN_OBJECT),
        (("PDDeployment", "qwen", "uid-of-an-earlier-qwen"), Reason.WAITING_FOR_CLEANUP),
    ],
    ids=["another controller", "another PDDeployment", "an earlier one of this name"],
)
def test_an_object_of_somebody_else_is_never_touched(owner: tuple[str, str, str], reason: Reason) -> None:
    made = plan([manifest(replicas=5)], seen(live(manifest(), owner=owner)))
    assert made.actions == ()
    assert [(one.reason, one.role) for one in made.refusals] == [(reason, "decode")]
    assert "qwen-decode" in made.refusals[0].message


@pytest.mark.parametrize(
    "missing",
    [{"managed": False}, {"deployment": "other"}, {"deployment": ""}, {"owned_fields": ""}],
    ids=["managed-by", "label of another", "no label", "never applied by us"],
)
def test_an_object_of_nobody_is_foreign_unless_all_says_that_it_is_ours(missing: dict[str, Any]) -> None:
    made = plan([manifest()], seen(live(manifest(), owner=("", "", ""), **missing)))
    assert made.actions == ()
    assert [one.reason for one in made.refusals] == [Reason.FOREIGN_OBJECT]


def test_a_child_whose_owner_reference_was_removed_is_taken_back() -> None:
    rendered = manifest()
    rendered["metadata"]["ownerReferences"] = [{"kind": "PDDeployment", "uid": UID, "controller": True}]
    orphan = live(
        manifest(), owner=("", "", ""), rendered_hash=stamp(rendered)["metadata"]["annotations"][HASH_ANNOTATION]
    )
    made = plan([rendered], seen(orphan))
    assert made.refusals == ()
    action = only(made)
    assert (action.why, action.uid) == (Why.EDITED, orphan.uid)


def of_kind(kind: str) -> dict[str, Any]:
    """The rendered router object of that kind."""
    context = RenderContext(UID, "r:1", "c:1")
    made = render_children(deployment(("metadata.namespace", "models"), ("spec.engine.image", "v:v0.32.0")), context)
    return next(one for one in made if one["kind"] == kind and one["metadata"]["name"].endswith("-router"))


@pytest.mark.parametrize(
    ("foreign", "user", "kept"),
    [
        ("ServiceAccount", "RoleBinding", True),
        ("ServiceAccount", "Deployment", True),
        ("Role", "RoleBinding", True),
        ("ServiceAccount", "Service", False),
        ("Service", "Deployment", False),
    ],
)
def test_what_would_use_a_foreign_account_or_role_is_not_written(foreign: str, user: str, kept: bool) -> None:
    taken, using = of_kind(foreign), of_kind(user)
    stranger = live(taken, owner=("", "", ""), managed=False)
    made = plan([taken, using], seen(stranger))
    assert [action.ref.kind for action in made.actions] == ([] if kept else [user])
    assert [one.ref.kind for one in made.refusals] == ([foreign, user] if kept else [foreign])
    assert {one.reason for one in made.refusals} == {Reason.FOREIGN_OBJECT}
    if kept:
        assert str(stranger.ref) in made.refusals[-1].message
    assert len(plan([taken, using], seen(live(taken))).actions) == 1, "with our own it is written"


def test_an_object_with_our_label_but_another_owner_is_not_deleted() -> None:
    stray = live(manifest("Service", "stray"), owner=("PDDeployment", "other", "uid-x"))
    orphan = live(manifest("Service", "orphan"), owner=("", "", ""))
    assert plan([], seen(stray, orphan)).actions == ()


def test_a_child_that_is_not_rendered_any_more_is_deleted() -> None:
    old = live(manifest("Service", "old"))
    assert only(plan([], seen(old))) == Delete(old.ref, old.uid, Why.NOT_WANTED)


@pytest.mark.parametrize("change", [{"managed": False}, {"deleting": True}], ids=["label removed", "going already"])
def test_what_is_not_deleted(change: dict[str, Any]) -> None:
    assert plan([], seen(live(manifest("Service", "old"), **change))).actions == ()


def test_a_child_in_deletion_is_waited_for() -> None:
    made = plan([manifest(replicas=2)], seen(live(manifest(), deleting=True)))
    assert made.actions == ()
    assert made.refusals[0].reason is Reason.WAITING_FOR_CLEANUP


def test_a_fixed_field_replaces_the_object_and_keeps_its_pods() -> None:
    before = manifest(serviceName="a", selector={"matchLabels": {"x": "y"}})
    after = manifest(serviceName="b", selector={"matchLabels": {"x": "y"}})
    made = plan([after], seen(live(before)))
    action = only(made)
    assert isinstance(action, Delete)
    assert (action.orphan, action.why) == (True, Why.IMMUTABLE)
    assert made.refusals[0].reason is Reason.WAITING_FOR_CLEANUP
    assert "spec.serviceName" in made.refusals[0].message


def test_another_selector_is_refused_because_pods_would_be_left_behind() -> None:
    made = plan(
        [manifest(selector={"matchLabels": {"x": "z"}})], seen(live(manifest(selector={"matchLabels": {"x": "y"}})))
    )
    assert made.actions == ()
    assert made.refusals[0].reason is Reason.IMMUTABLE_FIELD
    assert "kubectl delete statefulset qwen-decode" in made.refusals[0].message


def test_defaults_inside_fixed_fields_are_no_difference() -> None:
    claim = {"metadata": {"name": "cache"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    rendered = manifest(replicas=2, volumeClaimTemplates=[claim])
    defaulted = copy.deepcopy(claim) | {"status": {"phase": "Pending"}}
    defaulted["spec"]["volumeMode"] = "Filesystem"  # type: ignore[index]
    workload = Workload(immutable=json.dumps({"volumeClaimTemplates": [defaulted], "podManagementPolicy": "Parallel"}))
    action = only(plan([rendered], seen(live(rendered, rendered_hash="older", workload=workload))))
    assert action.why is Why.CHANGED


def test_every_rendered_kind_is_one_that_is_watched() -> None:
    context = RenderContext(uid=UID, router_image="r:1", connector_image="c:1")
    rendered = render_children(
        deployment(("spec.engine.image", "vllm:v0.32.0"), ("spec.decode.replicas", 2), ("spec.router.replicas", 2)),
        context,
    )
    kinds = {one["kind"]: one["apiVersion"] for one in rendered}
    watched = {kind.name: kind.api_version for kind in CHILD_KINDS}
    assert kinds == watched
    assert len({ref_of(one) for one in rendered}) == len(rendered)


def test_a_kind_that_is_not_watched_is_an_error_not_a_gap() -> None:
    with pytest.raises(KeyError):
        plan([manifest("Secret", "x")], seen())


def test_refs_sort_and_read_well() -> None:
    assert str(Ref("Service", "models", "qwen-router")) == "Service qwen-router"
