"""Pods keep no token of an account that is gone: what waits for an account, and what a new one rolls."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from pd_operator.core.observed import HASH_ANNOTATION, Child, Observed, observe_child
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import ACCOUNT_ANNOTATION, Pod, observe_pod
from pd_operator.core.plan import Apply, Plan, plan, ref_of, stamp
from pd_operator.core.plan_accounts import account_of, for_its_account
from pd_operator.core.reasons import Reason
from pd_operator.core.render_children import render_children
from pd_operator.core.render_context import RenderContext
from support.pddeployments import deployment

UID = "uid-of-qwen"
RAW = {"metadata": {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}}
EARLIER, THEN, LATER = "2026-11-30T09:59:59Z", "2026-11-30T10:00:00Z", "2026-11-30T10:00:01Z"
RENDERED = render_children(
    deployment(
        ("metadata.namespace", "models"),
        ("spec.engine.image", "v:v0.32.0"),
        ("spec.router.pod.annotations", {"team": "a"}),
    ),
    RenderContext(UID, "r:1", "c:1"),
)
ACCOUNT, ROUTER = (
    next(one for one in RENDERED if one["kind"] == kind) for kind in ("ServiceAccount", "Deployment")
)  # fmt: skip


def record(value: Any) -> Any:
    """The ownership record of an applied value, lists as a whole."""
    return {f"f:{key}": record(item) for key, item in value.items()} if isinstance(value, dict) else {}


def live(manifest: dict[str, Any], created: str, **changes: Any) -> Child:
    """A child as it is after that very manifest was applied."""
    raw = copy.deepcopy(stamp(manifest))
    owner = {"kind": "PDDeployment", "name": "qwen", "uid": UID, "controller": True}
    fields = record({key: value for key, value in raw.items() if key not in ("apiVersion", "kind")})
    entry = {"manager": "pd-operator", "operation": "Apply", "fieldsV1": fields}
    uid = f"uid-of-{manifest['kind']}"
    raw["metadata"] |= {
        "uid": uid,
        "creationTimestamp": created,
        "ownerReferences": [owner],
        "managedFields": [entry],
    }
    return replace(observe_child(manifest["kind"], raw), **changes)


def seen(*children: Child) -> Observed:
    """What was seen: these children and nothing else."""
    return Observed(raw=RAW, children={child.ref: child for child in children})


def running(created: str, account: str = "", **changes: Any) -> Pod:
    """A router that runs."""
    labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "router"}
    metadata = {"name": "qwen-router-7d9f8-x", "namespace": "models", "uid": "p", "labels": labels}
    annotations = {ACCOUNT_ANNOTATION: account} if account else {}
    raw = {"metadata": {**metadata, "creationTimestamp": created, "annotations": annotations}}
    return replace(observe_pod(raw), **changes)


def uid_on(manifest: Any) -> str | None:
    """The account's uid on a template."""
    value = manifest["spec"]["template"]["metadata"].get("annotations", {}).get(ACCOUNT_ANNOTATION)
    return None if value is None else str(value)


@pytest.mark.parametrize(
    ("account", "workload", "expected"),
    [
        (THEN, THEN, None),
        (EARLIER, THEN, None),
        (LATER, THEN, "uid-of-ServiceAccount"),
        (None, THEN, None),
        (LATER, None, None),
        ("", "", None),
    ],
    ids=["made with it", "made before it", "made anew", "no account", "no workload", "no times"],
)
def test_the_uid_is_written_where_the_account_is_younger(
    account: str | None, workload: str | None, expected: str | None
) -> None:
    times = ((ACCOUNT, account), (ROUTER, workload))
    found = seen(*(live(manifest, time) for manifest, time in times if time is not None))
    before = copy.deepcopy(ROUTER)
    made = for_its_account(ROUTER, ref_of(ROUTER), found)
    assert uid_on(made) == expected
    assert made["spec"]["template"]["metadata"]["annotations"]["team"] == "a"
    assert before == ROUTER, "the rendered manifest is not changed"


def test_only_a_template_names_an_account() -> None:
    found = seen(*(live(manifest, LATER if manifest is ACCOUNT else THEN) for manifest in RENDERED))
    changed = [one["kind"] for one in RENDERED if for_its_account(one, ref_of(one), found) is not one]
    assert changed == ["Deployment"]
    assert [one["kind"] for one in RENDERED if account_of(one)] == ["Deployment"]


def test_a_new_account_rolls_the_routers_once_and_an_old_one_never() -> None:
    young = live(ACCOUNT, LATER)
    made = plan([ACCOUNT, ROUTER], seen(young, live(ROUTER, THEN)))
    (action,) = made.actions
    assert isinstance(action, Apply)
    assert uid_on(action.manifest) == young.uid
    assert plan([ACCOUNT, ROUTER], seen(young, live(action.manifest, THEN))) == Plan(), "and then nothing"
    third = replace(young, uid="uid-of-a-third")
    (action,) = plan([ACCOUNT, ROUTER], seen(third, live(action.manifest, THEN))).actions
    assert isinstance(action, Apply)
    assert uid_on(action.manifest) == "uid-of-a-third"
    assert plan([ACCOUNT, ROUTER], seen(live(ACCOUNT, THEN), live(ROUTER, THEN))) == Plan(), "as after an upgrade"


def test_a_workload_is_not_touched_before_the_new_account_is_known() -> None:
    named = copy.deepcopy(ROUTER)
    named["spec"]["template"]["metadata"]["annotations"] |= {ACCOUNT_ANNOTATION: "uid-of-the-second"}
    made = plan([ACCOUNT, ROUTER], seen(live(named, THEN)))
    assert [action.ref.kind for action in made.actions] == ["ServiceAccount"]
    assert [(one.ref.kind, one.role, one.reason) for one in made.refusals] == [
        ("Deployment", "router", Reason.CREATING)
    ]


def test_both_are_made_at_once_when_neither_exists() -> None:
    made = plan([ACCOUNT, ROUTER], seen())
    assert [action.ref.kind for action in made.actions] == ["ServiceAccount", "Deployment"]
    assert made.refusals == ()
    assert isinstance(made.actions[1], Apply)
    assert uid_on(made.actions[1].manifest) is None
    assert made.actions[1].manifest["metadata"]["annotations"][HASH_ANNOTATION]


@pytest.mark.parametrize(
    ("pods", "named"),
    [
        ((running(EARLIER),), True),
        ((running(EARLIER, "uid-of-an-earlier"),), True),
        ((running(LATER, "uid-of-ServiceAccount"),), True),
        ((running(LATER), running(EARLIER)), True),
        ((running(THEN),), False),
        ((running(""),), False),
        ((running(EARLIER, deleting=True), running(EARLIER, finished=True)), False),
        ((running(EARLIER, name="qwen-decode-0"),), False),
        ((), False),
    ],
    ids=[
        "with tokens of an earlier account",
        "made for an earlier account",
        "made for this account",
        "some of an earlier account",
        "of this account",
        "of an unknown age",
        "none that lasts",
        "of another role",
        "none",
    ],
)
def test_routers_that_a_new_deployment_adopts_are_rolled_only_if_their_account_is_gone(
    pods: tuple[Pod, ...], named: bool
) -> None:
    account = live(ACCOUNT, THEN)
    found = replace(seen(account), pods=pods)
    (action,) = plan([ACCOUNT, ROUTER], found).actions
    assert isinstance(action, Apply)
    assert uid_on(action.manifest) == (account.uid if named else None)
    after = {account.ref: account, action.ref: live(dict(action.manifest), LATER)}
    assert plan([ACCOUNT, ROUTER], replace(found, children=after)) == Plan(), (
        "and then nothing, whatever pods there are"
    )
    assert plan([ACCOUNT, ROUTER], replace(found, children=after, pods=())) == Plan()


def test_while_routers_live_a_deployment_is_not_made_before_its_account() -> None:
    found = replace(seen(), pods=(running(EARLIER),))
    made = plan([ACCOUNT, ROUTER], found)
    assert [action.ref.kind for action in made.actions] == ["ServiceAccount"]
    assert [(one.ref.kind, one.reason) for one in made.refusals] == [("Deployment", Reason.CREATING)]


@pytest.mark.parametrize("exists", [True, False], ids=["the Deployment runs", "it is absent"])
@pytest.mark.parametrize(
    "going",
    [{"deleting": True}, {"owner": ("PDDeployment", "qwen", "uid-of-an-earlier-qwen")}],
    ids=["in deletion", "of an earlier PDDeployment"],
)
def test_no_pod_gets_an_account_that_is_going(going: dict[str, Any], exists: bool) -> None:
    children = [live(ACCOUNT, THEN, **going), *([live(ROUTER, THEN, rendered_hash="older")] if exists else [])]
    made = plan([ACCOUNT, ROUTER], seen(*children))
    assert made.actions == ()
    assert [(one.ref.kind, one.reason) for one in made.refusals] == [
        ("ServiceAccount", Reason.WAITING_FOR_CLEANUP),
        ("Deployment", Reason.WAITING_FOR_CLEANUP),
    ]
    assert str(Ref("ServiceAccount", "models", "qwen-router")) in made.refusals[1].message


def test_the_record_of_a_live_child_is_read_back() -> None:
    child = live(ROUTER, THEN)
    assert (child.created, json.loads(child.owned_fields).keys()) == (THEN, {"f:metadata", "f:spec"})
