"""With how many pods a workload is made anew whose number an autoscaler decides about."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.observed import HASH_ANNOTATION, Child, Observed, Workload
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import Pod, Trouble
from pd_operator.core.plan import Apply, Why, plan, ref_of, stamp
from pd_operator.core.plan_adoption import living_replicas, with_living_replicas
from pd_operator.core.reasons import Reason

UID = "uid-of-qwen"
RAW = {"metadata": {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}}
SET = Ref("StatefulSet", "models", "qwen-decode")
ROUTER = Ref("Deployment", "models", "qwen-router")
EVICTED = Trouble(Reason.POD_FAILED, "Evicted")
LOOPING = Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 1")


def manifest(ref: Ref = SET, **spec: Any) -> dict[str, Any]:
    """A small rendered workload."""
    metadata = {"name": ref.name, "namespace": ref.namespace, "labels": {"app.kubernetes.io/managed-by": "pd-operator"}}
    return {"apiVersion": "apps/v1", "kind": ref.kind, "metadata": metadata, "spec": {"template": {}, **spec}}


def pod(name: str, **changes: Any) -> Pod:
    """A pod of the deployment."""
    return Pod("models", name, f"uid-{name}", 3, "qwen", name.split("-")[1], **changes)


def seen(*pods: Pod, children: tuple[Child, ...] = ()) -> Observed:
    """What was seen."""
    return Observed(RAW, {child.ref: child for child in children}, pods)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_a_statefulset_is_made_for_all_its_living_pods_and_no_more(living: set[int], ending: set[int]) -> None:
    ending -= living
    pods = [pod(f"qwen-decode-{n}", deleting=n in ending) for n in living | ending]
    strangers = [pod("qwen-prefill-50"), pod("qwen-decode-canary"), pod("qwen-decode-x-60"), pod("qwen-decode2-70")]
    made = with_living_replicas(manifest(), SET, seen(*pods, *strangers))
    replicas = made["spec"].get("replicas", 1)
    assert living <= set(range(replicas)), "none of them is ended"
    assert replicas == max(living, default=0) + 1, "and none is made above them"


@given(st.integers(0, 30), st.integers(0, 5), st.integers(0, 5))
def test_a_deployment_is_made_for_its_pods_that_run_or_will(living: int, ending: int, over: int) -> None:
    pods = [pod(f"qwen-router-a-{n}", trouble=LOOPING if n % 2 else None) for n in range(living)]
    pods += [pod(f"qwen-router-b-{n}", deleting=True) for n in range(ending)]
    pods += [pod(f"qwen-router-c-{n}", trouble=EVICTED) for n in range(over)]
    made = with_living_replicas(manifest(ROUTER), ROUTER, seen(*pods))
    assert made["spec"].get("replicas", 1) == max(living, 1)


@pytest.mark.parametrize(
    ("ref", "spec"),
    [(SET, {"replicas": 2}), (Ref("Service", "models", "qwen-decode"), {})],
    ids=["a number is rendered", "no workload"],
)
def test_what_else_is_created_stays_as_rendered(ref: Ref, spec: dict[str, Any]) -> None:
    rendered = manifest(ref, **spec)
    found = seen(*(pod(f"qwen-decode-{n}") for n in range(5)))
    assert with_living_replicas(rendered, ref, found) is rendered
    assert living_replicas(Ref("Service", "models", "qwen-decode"), found) == 0


def test_the_number_is_sent_once_and_is_no_part_of_the_wish() -> None:
    rendered = manifest()
    (action,) = plan([rendered], seen(*(pod(f"qwen-decode-{n}") for n in range(3)))).actions
    assert isinstance(action, Apply)
    assert (action.why, action.manifest["spec"]["replicas"]) == (Why.ABSENT, 3)
    annotations = stamp(rendered)["metadata"]["annotations"]
    assert action.manifest["metadata"]["annotations"][HASH_ANNOTATION] == annotations[HASH_ANNOTATION]


@pytest.mark.parametrize(("rendered_hash", "why"), [("older", Why.CHANGED), ("", Why.EDITED)])
def test_an_apply_without_the_number_keeps_the_live_one(rendered_hash: str, why: Why) -> None:
    """The creation made us its owner, and what its only owner drops falls to the server's default."""
    rendered = manifest()
    child = Child(
        ref_of(rendered), "uid-of-child", 7, "qwen", "decode", True, ("PDDeployment", "qwen", UID),
        rendered_hash or stamp(rendered)["metadata"]["annotations"][HASH_ANNOTATION],
        owned_fields='{"f:spec": {"f:replicas": {}}}', workload=Workload(wanted=4),
    )  # fmt: skip
    (action,) = plan([rendered], seen(children=(child,))).actions
    assert isinstance(action, Apply)
    assert action.why is why
    assert action.hand_over is not None
    assert action.hand_over["spec"] == {"replicas": 4}
