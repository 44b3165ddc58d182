"""Conditions and counts, as tables: what was seen on the left, the words that programs match on on the right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_operator.core.observed import Child, Observed, Workload
from pd_operator.core.observed_endings import ends_soon
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import Pod, Trouble
from pd_operator.core.observed_router import Flow, RouterAnswer
from pd_operator.core.plan import Refusal
from pd_operator.core.problems import Problem
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.render_children import cluster_generation, render_children
from pd_operator.core.render_context import RenderContext
from pd_operator.core.status import MESSAGE_LIMIT, Wish, compute_status, previous_status
from pd_operator.core.status_events import happenings
from pd_operator.core.status_model import PDDeploymentStatus
from pd_operator.core.status_roles import ROLES
from support.pddeployments import deployment

UID = "uid-of-qwen"
CONTEXT = RenderContext(uid=UID, router_image="r:1", connector_image="registry:5000/pd-connector:0.1.0")
NOW = "2026-11-30T10:00:00Z"
LATER = "2026-11-30T11:00:00Z"
DONE = Workload(current=True, wanted=1, replicas=1, ready=1, updated=1, current_revision="r1", update_revision="r1")
REVISED = replace(DONE, update_revision="r2", updated=0)


def wish(*edits: tuple[str, Any]) -> Wish:
    """An accepted spec."""
    made = deployment(("spec.engine.image", "vllm/vllm-openai:v0.32.0"), ("metadata.namespace", "models"), *edits)
    return Wish(made, cluster_generation(made, CONTEXT), render_children(made, CONTEXT), CONTEXT.connector_image)


def workload(role: str, numbers: Workload) -> Child:
    """A role's StatefulSet or Deployment."""
    kind = "Deployment" if role == "router" else "StatefulSet"
    return Child(
        Ref(kind, "models", f"qwen-{role}"), f"uid-{role}", 5, "qwen", role, True, ("PDDeployment", "qwen", UID),
        workload=numbers,
    )  # fmt: skip


def pod(role: str, **changes: Any) -> Pod:
    """A pod, ready unless something is wrong with it."""
    trouble = changes.get("trouble")
    fields: dict[str, Any] = {
        "namespace": "models",
        "name": f"qwen-{role}-0",
        "uid": f"uid-{role}-0",
        "version": 3,
        "deployment": "qwen",
        "role": role,
        "ready": trouble is None,
    }
    return Pod(**{**fields, **changes})


def seen(
    prefill: Workload | None = DONE,
    decode: Workload | None = DONE,
    router: Workload | None = DONE,
    pods: tuple[Pod, ...] = (),
    routers: dict[str, RouterAnswer | None] | None = None,
    status: dict[str, Any] | None = None,
) -> Observed:
    """A deployment and what exists of it."""
    found = {"prefill": prefill, "decode": decode, "router": router}
    children = [workload(role, numbers) for role, numbers in found.items() if numbers is not None]
    raw: dict[str, Any] = {"metadata": {"name": "qwen", "namespace": "models", "uid": UID, "generation": 4}}
    return Observed(
        raw if status is None else {**raw, "status": status},
        {child.ref: child for child in children},
        pods,
        routers or {},
    )


def word(status: PDDeploymentStatus, kind: ConditionType) -> tuple[str, str]:
    """A condition's status and reason."""
    condition = status.condition(kind)
    assert condition is not None
    return condition.status.value, condition.reason


def message(status: PDDeploymentStatus, kind: ConditionType) -> str:
    """A condition's message."""
    condition = status.condition(kind)
    assert condition is not None
    return condition.message


STARTING = replace(DONE, ready=0)
LOOP = Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 1: no NIXL plugin")
PULL = Trouble(Reason.IMAGE_PULL_FAILED, "container engine: image x: not found")
PENDING = Trouble(Reason.UNSCHEDULABLE, "0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa.")
OLD_AND_READY = replace(REVISED, updated=0)
ROLE_CASES = {
    "ready": (DONE, (), "True", "AllReady", "False", "Complete"),
    "not created": (None, (), "False", "Creating", "True", "Creating"),
    "spec not seen by its controller": (replace(DONE, current=False), (), "True", "Serving", "True", "RollingOut"),
    "just created": (replace(DONE, begun=False, current=False, replicas=0, ready=0, updated=0), (),
                     "False", "Creating", "True", "Creating"),
    "scaled, not seen by its controller": (replace(DONE, current=False, wanted=2), (),
                                           "True", "Serving", "True", "Scaling"),
    "a pod is drained": (replace(DONE, ready=0, updated=0), (), "False", "Starting", "True", "Starting"),
    "starting": (STARTING, (), "False", "Starting", "True", "Starting"),
    "old template": (OLD_AND_READY, (), "True", "Serving", "True", "RollingOut"),
    "only new ones, starting": (replace(REVISED, updated=1, ready=0), (), "False", "Starting", "True", "ServiceGap"),
    "pods missing": (replace(DONE, replicas=0, ready=0, updated=0), (), "False", "Scaling", "True", "Scaling"),
    "pods too many": (replace(DONE, replicas=2, updated=2), (), "True", "Serving", "True", "Scaling"),
    "unschedulable": (STARTING, (PENDING,), "False", "Unschedulable", "False", "Unschedulable"),
    "image": (STARTING, (PULL,), "False", "ImagePullFailed", "False", "ImagePullFailed"),
    "crash loop": (STARTING, (LOOP,), "False", "CrashLooping", "False", "CrashLooping"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLE_CASES.values(), ids=ROLE_CASES.keys())
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role(role: str, case: tuple[Workload | None, tuple[Trouble, ...], str, str, str, str]) -> None:
    numbers, troubles, ready, reason, progressing, why = case
    pods = tuple(pod(role, name=f"qwen-{role}-{n}", trouble=trouble) for n, trouble in enumerate(troubles))
    status = compute_status(wish(), seen(**{role: numbers}, pods=pods), (), NOW)
    kind = ConditionType.PREFILL_READY if role == "prefill" else ConditionType.DECODE_READY
    other = ConditionType.DECODE_READY if role == "prefill" else ConditionType.PREFILL_READY
    assert word(status, kind) == (ready, reason)
    assert word(status, other) == ("True", "AllReady")
    assert word(status, ConditionType.READY) == (ready, reason)
    assert word(status, ConditionType.PROGRESSING) == (progressing, why)
    for trouble in troubles:
        for judged in (kind, ConditionType.READY, ConditionType.PROGRESSING):
            assert trouble.message in message(status, judged)
            assert f"qwen-{role}-0" in message(status, judged)


def test_scaling_up_is_no_outage() -> None:
    grown = replace(DONE, wanted=3, replicas=3, updated=3)
    status = compute_status(wish(("spec.decode.replicas", 3)), seen(decode=grown), (), NOW)
    for kind in (ConditionType.READY, ConditionType.DECODE_READY):
        assert word(status, kind) == ("True", "Serving")
        assert "1 of 3 ready" in message(status, kind)
    assert word(status, ConditionType.PROGRESSING) == ("True", "Starting")


def test_a_broken_engine_beside_one_that_serves_is_told_by_progressing() -> None:
    numbers = replace(DONE, wanted=2, replicas=2, updated=2)
    broken = pod("decode", name="qwen-decode-1", trouble=LOOP)
    status = compute_status(wish(("spec.decode.replicas", 2)), seen(decode=numbers, pods=(broken,)), (), NOW)
    assert word(status, ConditionType.READY) == ("True", "Serving")
    assert word(status, ConditionType.PROGRESSING) == ("False", "CrashLooping")
    assert LOOP.message in message(status, ConditionType.READY)


def test_ready_engines_of_two_generations_are_no_pair() -> None:
    pods = (pod("prefill", generation="g1"), pod("decode", generation="g2"))
    status = compute_status(wish(), seen(REVISED, REVISED, pods=pods), (), NOW)
    assert word(status, ConditionType.READY) == ("False", "NoPair")
    assert word(status, ConditionType.PREFILL_READY) == ("True", "Serving")
    assert word(status, ConditionType.PROGRESSING) == ("True", "ServiceGap")
    same = tuple(replace(one, generation="g1") for one in pods)
    assert word(compute_status(wish(), seen(pods=same), (), NOW), ConditionType.READY) == ("True", "AllReady")


def test_every_condition_is_there_in_a_fixed_order() -> None:
    assert [one.type for one in compute_status(wish(), seen(None, None, None), (), NOW).conditions] == [
        "Ready", "PrefillReady", "DecodeReady", "RouterReady", "Progressing", "BidirectionalActive", "TransfersFlowing",
    ]  # fmt: skip


def test_counts_selector_address_generation_and_versions() -> None:
    status = compute_status(wish(("spec.decode.replicas", 3)), seen(decode=replace(DONE, wanted=3)), (), NOW).document()
    assert status["decode"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "ready": "1/3",
        "selector": "pdserving.dev/pddeployment=qwen,pdserving.dev/role=decode",
    }
    assert status["url"] == "http://qwen-router.models.svc:80"
    assert status["generation"] == wish().generation
    assert status["observedGeneration"] == 4
    assert status["engine"] == {"vllmVersion": "0.32", "nixlVersion": "", "connectorVersion": "0.1.0"}


def test_versions_are_what_the_self_tests_of_this_generation_found() -> None:
    made = wish()
    old = pod("prefill", name="qwen-prefill-0", generation="old", vllm_version="0.31.0", nixl_version="1.0.0")
    silent = pod("prefill", name="qwen-prefill-1", generation=made.generation)
    new = pod("decode", generation=made.generation, vllm_version="0.32.0+cpu", nixl_version="1.1.0")
    known = {"vllmVersion": "0.32.0+cpu", "nixlVersion": "1.1.0", "connectorVersion": "0.1.0"}
    assert compute_status(made, seen(pods=(old, silent, new)), (), NOW).document()["engine"] == known
    unknown = {**known, "vllmVersion": "0.32", "nixlVersion": ""}
    assert compute_status(made, seen(pods=(old, silent)), (), NOW).document()["engine"] == unknown


def test_no_pod_wanted_is_not_ready() -> None:
    none = replace(DONE, wanted=0, replicas=0, ready=0, updated=0)
    status = compute_status(wish(("spec.decode.replicas", 0)), seen(decode=none), (), NOW)
    assert word(status, ConditionType.READY) == ("False", "ScaledToZero")
    assert word(status, ConditionType.PROGRESSING) == ("False", "Complete")


def test_replicas_of_an_autoscaler_are_what_is_wanted() -> None:
    scaled = replace(DONE, wanted=3, replicas=3, ready=3, updated=3)
    status = compute_status(wish(("spec.decode.scaling", "External")), seen(decode=scaled), (), NOW)
    assert word(status, ConditionType.DECODE_READY) == ("True", "AllReady")
    assert status.decode.ready == "3/3"


# --- bad specs ----------------------------------------------------------------------------------


PROBLEMS = (Problem("spec.decode.replicas", "must be 1 to 9, got 0"), Problem("spec.x", "unknown"))


def test_a_bad_spec_lists_every_problem_and_leaves_what_serves_alone() -> None:
    before = compute_status(wish(), seen(), (), NOW)
    status = compute_status(PROBLEMS, seen(status=before.document()), (), LATER)
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        assert word(status, kind) == ("False", "InvalidSpec")
        assert all(str(problem) in message(status, kind) for problem in PROBLEMS)
    for kind in (ConditionType.PREFILL_READY, ConditionType.DECODE_READY, ConditionType.ROUTER_READY):
        assert word(status, kind) == ("True", "AllReady")
    assert (status.generation, status.url, status.decode) == (before.generation, before.url, before.decode)
    assert status.observed_generation == 4


def test_a_bad_spec_at_first_sight() -> None:
    status = compute_status(PROBLEMS, seen(None, None, None), (), NOW)
    assert word(status, ConditionType.READY) == ("False", "InvalidSpec")
    assert word(status, ConditionType.DECODE_READY) == ("False", "Creating")


def test_messages_are_bounded() -> None:
    many = [Problem(f"spec.field{n}", "x" * 100) for n in range(100)]
    text = message(compute_status(many, seen(), (), NOW), ConditionType.READY)
    assert len(text) == MESSAGE_LIMIT
    assert text.startswith("spec.field0")


# --- refused children ---------------------------------------------------------------------------


def refusal(kind: str, name: str, role: str, reason: Reason = Reason.FOREIGN_OBJECT) -> Refusal:
    """A child that is not as wanted."""
    return Refusal(Ref(kind, "models", name), role, reason, f"{kind} {name} is in the way")


IN_THE_WAY = {
    "Service": refusal("Service", "qwen-decode", "decode"),
    "budget": refusal("PodDisruptionBudget", "qwen-decode", "decode"),
    "template": refusal("StatefulSet", "qwen-decode", "decode", Reason.APPLY_REFUSED),
}


@pytest.mark.parametrize("one", IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_what_is_refused_beside_pods_that_serve_is_told_and_is_no_outage(one: Refusal) -> None:
    before = compute_status(wish(), seen(), (), NOW)
    status = compute_status(wish(), seen(status=before.document()), (one,), LATER)
    assert word(status, ConditionType.READY) == ("True", "Serving")
    assert word(status, ConditionType.DECODE_READY) == ("True", "Serving")
    assert word(status, ConditionType.PREFILL_READY) == word(status, ConditionType.ROUTER_READY) == ("True", "AllReady")
    assert word(status, ConditionType.PROGRESSING) == ("False", one.reason)
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        assert message(status, kind) == (f"decode: {one.message}; requests are served as before, and it is tried again")
    assert message(status, ConditionType.DECODE_READY) == f"1 of 1 ready; {one.message}"
    assert (one.reason, "Warning") in {(told.reason, told.kind) for told in happenings(before, status)}


def test_what_is_refused_for_all_roles_is_said_once() -> None:
    one = refusal("NetworkPolicy", "qwen-engines", "")
    status = compute_status(wish(), seen(), (one,), NOW)
    assert word(status, ConditionType.READY) == ("True", "Serving")
    assert word(status, ConditionType.PREFILL_READY) == word(status, ConditionType.ROUTER_READY) == ("True", "Serving")
    assert word(status, ConditionType.PROGRESSING) == ("False", "ForeignObject")
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        assert message(status, kind) == f"{one.message}; requests are served as before, and it is tried again"
    two = refusal("StatefulSet", "qwen-decode", "decode", Reason.APPLY_REFUSED)
    both = message(compute_status(wish(), seen(), (one, two), NOW), ConditionType.PROGRESSING)
    assert both.startswith(f"{one.message}; decode: {one.message}; {two.message}; requests are served")


@pytest.mark.parametrize("kind", ["Service", "StatefulSet"])
def test_what_is_refused_of_a_role_without_a_ready_pod_is_its_reason(kind: str) -> None:
    one = refusal(kind, "qwen-decode", "decode")
    for numbers in (None, STARTING):
        status = compute_status(wish(), seen(decode=numbers), (one,), NOW)
        for judged in (ConditionType.DECODE_READY, ConditionType.READY, ConditionType.PROGRESSING):
            assert word(status, judged) == ("False", "ForeignObject")
        assert "no request is served, and it is tried again" in message(status, ConditionType.READY)
    broken = seen(decode=STARTING, pods=(pod("decode", trouble=LOOP),))
    assert LOOP.message in message(compute_status(wish(), broken, (one,), NOW), ConditionType.DECODE_READY)


@pytest.mark.parametrize("role", ["decode", ""])
def test_a_budget_or_policy_in_the_way_does_not_hide_why_a_pod_is_not_ready(role: str) -> None:
    one = refusal("PodDisruptionBudget" if role else "NetworkPolicy", "qwen-decode", role)
    status = compute_status(wish(), seen(decode=STARTING, pods=(pod("decode", trouble=LOOP),)), (one,), NOW)
    assert word(status, ConditionType.DECODE_READY) == ("False", "CrashLooping")
    assert word(status, ConditionType.READY) == ("False", "CrashLooping")
    assert word(status, ConditionType.PROGRESSING) == ("False", "ForeignObject")
    for kind in (ConditionType.DECODE_READY, ConditionType.READY, ConditionType.PROGRESSING):
        assert LOOP.message in message(status, kind)
        assert one.message in message(status, kind)


def test_without_the_routers_service_nobody_is_served() -> None:
    one = refusal("Service", "qwen-router", "router")
    status = compute_status(wish(), seen(), (one,), NOW)
    assert word(status, ConditionType.ROUTER_READY) == ("True", "Serving")
    assert word(status, ConditionType.READY) == ("False", "ForeignObject")
    ours = Child(one.ref, "uid-service", 5, "qwen", "router", True, ("PDDeployment", "qwen", UID))
    observed = seen()
    kept = replace(observed, children={**observed.children, one.ref: ours})
    refused = replace(one, reason=Reason.APPLY_REFUSED)
    assert word(compute_status(wish(), kept, (refused,), NOW), ConditionType.READY) == ("True", "Serving")


def test_a_refusal_is_told_before_a_rollout_that_it_keeps_from_being_mended() -> None:
    numbers = replace(REVISED, replicas=2, wanted=2, ready=1, updated=1)
    broken = pod("decode", name="qwen-decode-1", trouble=LOOP, revision="r2")
    one = refusal("StatefulSet", "qwen-decode", "decode", Reason.APPLY_REFUSED)
    status = compute_status(wish(("spec.decode.replicas", 2)), seen(decode=numbers, pods=(broken,)), (one,), NOW)
    assert word(status, ConditionType.PROGRESSING) == ("False", "ApplyRefused")
    for text in (one.message, LOOP.message):
        assert text in message(status, ConditionType.PROGRESSING)


def test_the_worst_reason_speaks_for_ready() -> None:
    pods = (pod("prefill", trouble=PENDING), pod("decode", trouble=LOOP))
    status = compute_status(wish(), seen(STARTING, STARTING, pods=pods), (), NOW)
    assert word(status, ConditionType.READY) == ("False", "CrashLooping")
    assert PENDING.message in message(status, ConditionType.READY)


# --- stuck rollouts -----------------------------------------------------------------------------


def test_a_broken_pod_of_an_earlier_template_must_be_deleted_by_hand() -> None:
    numbers = replace(REVISED, replicas=2, wanted=2, ready=1, updated=0)
    broken = pod("decode", name="qwen-decode-1", trouble=LOOP, revision="r-bad")
    status = compute_status(wish(("spec.decode.replicas", 2)), seen(decode=numbers, pods=(broken,)), (), NOW)
    assert word(status, ConditionType.PROGRESSING) == ("False", "RolloutStuck")
    assert "kubectl delete pod qwen-decode-1" in message(status, ConditionType.PROGRESSING)


def test_a_broken_pod_of_the_newest_template_holds_up_the_rollout() -> None:
    numbers = replace(REVISED, replicas=2, wanted=2, ready=1, updated=1)
    broken = pod("decode", name="qwen-decode-1", trouble=LOOP, revision="r2")
    status = compute_status(wish(("spec.decode.replicas", 2)), seen(decode=numbers, pods=(broken,)), (), NOW)
    assert word(status, ConditionType.PROGRESSING) == ("False", "RolloutStuck")
    for kind in (ConditionType.DECODE_READY, ConditionType.READY):
        assert word(status, kind) == ("True", "Serving"), "the other engine serves on"
    for kind in (ConditionType.PROGRESSING, ConditionType.DECODE_READY, ConditionType.READY):
        assert "qwen-decode-1" in message(status, kind)
        assert LOOP.message in message(status, kind)
    assert "keep the previous one" in message(status, ConditionType.PROGRESSING)


def test_words_that_end_in_a_full_stop_get_no_second_one() -> None:
    numbers = replace(REVISED, replicas=2, wanted=2, ready=1, updated=1)
    waits = pod("decode", name="qwen-decode-1", trouble=PENDING, revision="r2")
    status = compute_status(wish(("spec.decode.replicas", 2)), seen(decode=numbers, pods=(waits,)), (), NOW)
    assert "amazonaws.com/efa. It runs the newest template" in message(status, ConditionType.PROGRESSING)


def test_the_only_pod_of_a_new_template_is_a_crash_loop_not_a_stuck_rollout() -> None:
    numbers = replace(REVISED, updated=1, ready=0)
    status = compute_status(wish(), seen(decode=numbers, pods=(pod("decode", trouble=LOOP, revision="r2"),)), (), NOW)
    assert word(status, ConditionType.DECODE_READY) == ("False", "CrashLooping")


def test_a_router_rollout_past_its_deadline() -> None:
    numbers = replace(DONE, replicas=2, ready=1, updated=1, deadline_passed=True)
    status = compute_status(wish(), seen(router=numbers), (), NOW)
    assert word(status, ConditionType.ROUTER_READY) == ("True", "Serving")
    assert word(status, ConditionType.PROGRESSING) == ("False", "RolloutStuck")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (replace(DONE, paused=True, updated=0), "RolloutStuck"),
        (DONE, "Complete"),
        (replace(DONE, paused=True), "Complete"),
        (replace(DONE, paused=True, updated=0, current=False), "RollingOut"),
    ],
    ids=["paused", "not paused", "nothing to roll out", "its controller has not seen it"],
)
def test_a_router_rollout_that_somebody_has_paused_is_named_with_the_way_out(numbers: Workload, reason: str) -> None:
    status = compute_status(wish(), seen(router=numbers), (), NOW)
    assert word(status, ConditionType.PROGRESSING)[1] == reason
    assert word(status, ConditionType.READY)[0] == "True"
    named = "kubectl rollout resume deployment qwen-router" in message(status, ConditionType.PROGRESSING)
    assert named is (reason == "RolloutStuck")


# --- pods that are over, and pods that run without being ready --------------------------------------

EVICTED = Trouble(Reason.POD_FAILED, "Evicted: The node was low on resource: memory")
TURNED_AWAY = Trouble(Reason.POD_FAILED, "UnexpectedAdmissionError: no healthy devices")


def over(role: str, trouble: Trouble, **changes: Any) -> Pod:
    """A pod in a final phase, made at ten."""
    return pod(role, name="over", trouble=trouble, finished=True, created="2026-11-30T10:00:00Z", **changes)


def started(role: str, name: str, hour: int = 9, **changes: Any) -> Pod:
    """A pod whose container runs."""
    return pod(role, name=name, created=f"2026-11-30T{hour:02}:00:00Z", begun=True, runs=True, **changes)


@pytest.mark.parametrize(
    "one", [over("router", EVICTED, begun=True), over("router", TURNED_AWAY)], ids=["evicted", "refused by its node"]
)
@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (DONE, "Complete"),
        (replace(DONE, wanted=2, replicas=2, ready=1, updated=2), "Starting"),
        (replace(DONE, wanted=2, replicas=2, ready=2, updated=1), "RollingOut"),
    ],
    ids=["settled", "scaled up", "rolled out"],
)
def test_a_router_pod_that_is_over_and_has_a_successor_does_not_count(one: Pod, numbers: Workload, reason: str) -> None:
    routers = (
        one,
        started("router", "next", 11),
        pod("router", name="new", ready=False, created="2026-11-30T12:00:00Z"),
    )
    observed = seen(router=numbers, pods=routers)
    status = compute_status(wish(("spec.router.replicas", numbers.wanted)), observed, (), NOW)
    assert word(status, ConditionType.PROGRESSING)[1] == reason
    for kind in (ConditionType.PROGRESSING, ConditionType.ROUTER_READY, ConditionType.READY):
        assert "PodFailed" not in message(status, kind)


def made_at(hour: int, **changes: Any) -> Pod:
    """A router of which nothing has begun."""
    return pod("router", name=f"at-{hour}", ready=False, created=f"2026-11-30T{hour:02}:00:00Z", **changes)


@pytest.mark.parametrize(
    ("routers", "reason", "named"),
    [
        ((over("router", EVICTED, begun=True),), "Starting", ""),
        ((over("router", TURNED_AWAY),), "PodFailed", "pod over: "),
        ((over("router", TURNED_AWAY), made_at(15)), "Starting", ""),
        ((over("router", TURNED_AWAY), made_at(15, deleting=True)), "Starting", ""),
        ((made_at(9), over("router", TURNED_AWAY)), "PodFailed", "pod over: "),
        ((over("router", TURNED_AWAY), made_at(15, trouble=TURNED_AWAY, finished=True)), "PodFailed", "pod at-15: "),
        (
            (over("router", TURNED_AWAY), made_at(15), made_at(16, trouble=TURNED_AWAY, finished=True)),
            "PodFailed",
            "ready; pod at-16: ",
        ),
    ],
    ids=[
        "evicted",
        "refused",
        "the next one is on its way",
        "the next one ends",
        "an earlier one is on its way",
        "the next one is refused too",
        "only the last one speaks",
    ],
)
def test_a_router_that_its_node_refused_speaks_while_none_that_came_after_is_on_its_way(
    routers: tuple[Pod, ...], reason: str, named: str
) -> None:
    numbers = replace(DONE, wanted=2, replicas=2, ready=1, updated=2)
    observed = seen(router=numbers, pods=(started("router", "older"), *routers))
    status = compute_status(wish(("spec.router.replicas", 2)), observed, (), NOW)
    assert word(status, ConditionType.PROGRESSING)[1] == reason
    assert named in message(status, ConditionType.PROGRESSING)


def test_an_engine_that_failed_counts_until_its_statefulset_has_deleted_it() -> None:
    observed = seen(decode=STARTING, pods=(over("decode", EVICTED, begun=True),))
    assert word(compute_status(wish(), observed, (), NOW), ConditionType.DECODE_READY) == ("False", "PodFailed")


def test_a_router_that_runs_and_sees_no_pair_is_not_called_starting() -> None:
    observed = seen(router=STARTING, pods=(started("router", "qwen-router-a", ready=False),))
    status = compute_status(wish(), observed, (), NOW)
    assert word(status, ConditionType.ROUTER_READY) == ("False", "NotReady")
    assert word(status, ConditionType.PROGRESSING) == ("True", "NotReady")
    for kind in (ConditionType.ROUTER_READY, ConditionType.READY):
        text = message(status, kind)
        assert "0 of 1 ready; qwen-router-a runs but is not ready: a router is ready while it sees a ready" in text
        assert "starting" not in text


def test_while_a_pod_has_yet_to_start_the_role_is_starting() -> None:
    numbers = replace(DONE, wanted=2, replicas=2, ready=0, updated=2)
    runs, starts = started("decode", "a", ready=False), pod("decode", name="b", ready=False)
    two = wish(("spec.decode.replicas", 2))
    for pods, reason in (((runs, starts), "Starting"), ((runs,), "NotReady"), ((), "Starting")):
        status = compute_status(two, seen(decode=numbers, pods=pods), (), NOW)
        assert word(status, ConditionType.DECODE_READY) == ("False", reason)
    assert "a runs but is not ready: the readiness probe fails" in message(
        compute_status(two, seen(decode=numbers, pods=(runs,)), (), NOW), ConditionType.DECODE_READY
    )


def test_engines_that_load_are_what_the_deployment_waits_for_not_routers_that_wait_for_them() -> None:
    observed = seen(STARTING, STARTING, STARTING, pods=(started("router", "r", ready=False),))
    status = compute_status(wish(), observed, (), NOW)
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        assert word(status, kind)[1] == "Starting"


ENDS = "2026-11-30T09:58:00Z"
SOON, OVER, LONG_OVER = "2026-11-30T09:58:59Z", "2026-11-30T09:59:00Z", "2026-12-01T10:00:00Z"
"""A second before a minute after the end of the grace period, that minute, and a day later."""


def ending(role: str, **changes: Any) -> Pod:
    """An engine in deletion."""
    return pod(role, **{"ready": False, "deleting": True, "ends_by": ENDS, "revision": "r1", "node": "n7", **changes})


def test_an_engine_that_does_not_end_holds_up_the_rollout_and_is_named() -> None:
    numbers = replace(REVISED, replicas=2, wanted=2, ready=1, updated=0)
    two = wish(("spec.decode.replicas", 2))
    held = seen(decode=numbers, pods=(ending("decode", name="qwen-decode-1"),))
    before = compute_status(two, held, (), SOON)
    assert word(before, ConditionType.PROGRESSING) == ("True", "RollingOut")
    status = compute_status(two, replace(held, raw={**held.raw, "status": before.document()}), (), OVER)
    assert word(status, ConditionType.PROGRESSING) == ("False", "RolloutStuck")
    assert message(status, ConditionType.PROGRESSING) == (
        f"decode: pod qwen-decode-1: TerminationStuck: it had to end by {ENDS} and is still there; is node n7 alive? "
        "If it is not: kubectl delete pod qwen-decode-1 --force, once nothing runs there any more. "
        "The rollout waits for it"
    )
    assert word(status, ConditionType.READY) == ("True", "Serving")
    assert "qwen-decode-1" in message(status, ConditionType.DECODE_READY)
    assert ("RolloutStuck", "Warning") in {(one.reason, one.kind) for one in happenings(before, status)}
    later = compute_status(two, replace(held, raw={**held.raw, "status": status.document()}), (), LONG_OVER)
    assert later == status, "a pod that stays is told once"


def test_an_engine_that_does_not_end_is_named_without_a_rollout_too() -> None:
    drained = seen(decode=replace(DONE, ready=0, updated=0), pods=(ending("decode", finalizers=("a.io/b", "c.io/d")),))
    before = compute_status(wish(), drained, (), SOON)
    assert word(before, ConditionType.DECODE_READY) == ("False", "Starting")
    assert message(before, ConditionType.DECODE_READY) == ("0 of 1 ready; qwen-decode-0 must end before another starts")
    status = compute_status(wish(), drained, (), OVER)
    for kind in (ConditionType.DECODE_READY, ConditionType.READY, ConditionType.PROGRESSING):
        assert word(status, kind) == ("False", "TerminationStuck")
        assert "kept by the finalizers a.io/b, c.io/d" in message(status, kind)


@pytest.mark.parametrize(
    "one",
    [ending("router"), ending("decode", ends_by=""), ending("decode", ends_by="?"), pod("decode", ends_by=ENDS)],
    ids=["router", "no time", "no time that can be read", "not ending"],
)
def test_what_does_not_hold_anything_up_or_tells_no_time_is_not_called_stuck(one: Pod) -> None:
    observed = seen(decode=STARTING, router=STARTING, pods=(one,))
    assert word(compute_status(wish(), observed, (), LONG_OVER), ConditionType.PROGRESSING) == ("True", "Starting")
    assert not ends_soon(observed, SOON)


def test_an_engine_is_looked_at_until_its_time_is_up() -> None:
    observed = seen(pods=(ending("prefill"),))
    assert [ends_soon(observed, time) for time in (ENDS, SOON, OVER, LONG_OVER)] == [True, True, False, False]


# --- a new generation -----------------------------------------------------------------------------


def test_what_a_rollout_keeps_back_is_told() -> None:
    two = replace(DONE, wanted=2, replicas=2, ready=2, available=2, updated=2)
    new = wish(("spec.prefill.replicas", 2), ("spec.decode.replicas", 2))
    half = replace(two, update_revision="r2", updated=1, ready=1, available=1, generation=new.generation, partition=1)
    pods = tuple(
        pod(role, name=f"qwen-{role}-{n}", generation=generation, ready=ready)
        for role in ("prefill", "decode")
        for n, generation, ready in ((0, "old", True), (1, new.generation, role == "decode"))
    )
    status = compute_status(new, seen(half, replace(half, ready=2, available=2), pods=pods), (), NOW)
    told = message(status, ConditionType.PROGRESSING)
    assert word(status, ConditionType.READY) == ("True", "Serving")
    assert word(status, ConditionType.PROGRESSING) == ("True", "RollingOut")
    assert "prefill: 1 of 2 ready; 1 of 2 run the newest template; 1 of an earlier generation kept until decode" in told
    assert "decode: 2 of 2 ready; 1 of 2 run the newest template; 1 of an earlier generation kept until prefill" in told


def test_a_coming_gap_is_told_before_it_comes() -> None:
    new = wish(("spec.decode.replicas", 2))
    two = replace(DONE, wanted=2, replicas=2, ready=2, updated=2)
    pods = tuple(
        pod(role, name=f"qwen-{role}-{n}", generation="old")
        for role, n in (("prefill", 0), ("decode", 0), ("decode", 1))
    )
    before = seen(replace(REVISED, available=1), replace(two, update_revision="r2", updated=0, available=2), pods=pods)
    status = compute_status(new, before, (), NOW)
    assert word(status, ConditionType.READY) == ("True", "Serving")
    told = message(status, ConditionType.PROGRESSING)
    assert (
        "prefill: 1 of 1 ready; 0 of 1 run the newest template; kept until decode has a new one; then requests" in told
    )
    assert "decode: 2 of 2 ready; 0 of 2 run the newest template; 1 of an earlier generation kept until prefill" in told


# --- time ---------------------------------------------------------------------------------------


def times(status: PDDeploymentStatus) -> dict[str, str]:
    """When each condition changed."""
    return {one.type: one.last_transition_time for one in status.conditions}


def test_a_pass_that_finds_nothing_new_gives_the_very_same_status() -> None:
    first = compute_status(wish(), seen(STARTING), (), NOW)
    assert compute_status(wish(), seen(STARTING, status=first.document()), (), LATER) == first


def test_a_live_status_is_compared_in_what_is_ours() -> None:
    status = compute_status(wish(), seen(), (), NOW)
    live = status.document()
    theirs = {"type": "ExampleChecked", "status": "True", "reason": "Yes", "lastTransitionTime": NOW}
    assert status.stands_in(live)
    assert status.stands_in({**live, "conditions": [theirs, *reversed(live["conditions"])]})
    assert not status.stands_in({**live, "conditions": live["conditions"][1:]})
    edited = [{**live["conditions"][0], "message": "all is well"}, *live["conditions"][1:]]
    assert not status.stands_in({**live, "conditions": edited})
    assert not status.stands_in({**live, "url": "http://elsewhere"})
    assert not status.stands_in({key: value for key, value in live.items() if key != "router"})
    assert not status.stands_in(None)


def test_only_a_changed_verdict_gets_a_new_time() -> None:
    first = compute_status(wish(), seen(STARTING), (), NOW)
    second = compute_status(wish(), seen(DONE, status=first.document()), (), LATER)
    changed = {kind for kind, time in times(second).items() if time == LATER}
    assert changed == {"Ready", "PrefillReady", "Progressing"}
    third = compute_status(wish(), seen(None, status=first.document()), (), LATER)
    assert word(third, ConditionType.PREFILL_READY) == ("False", "Creating")
    assert times(third)["PrefillReady"] == NOW, "another reason is no transition"


def test_a_status_that_cannot_be_read_counts_as_none() -> None:
    assert previous_status({"status": {"conditions": "?"}}) == PDDeploymentStatus()
    assert previous_status({"status": {"conditions": None}}) == PDDeploymentStatus()
    assert previous_status({"status": None}) == PDDeploymentStatus()


THEIRS = {"type": "example.com/Audited", "status": "True", "reason": "Yes", "lastTransitionTime": NOW}


@pytest.mark.parametrize(
    "theirs",
    [THEIRS, {**THEIRS, "reason": "no word"}, {**THEIRS, "observedGeneration": "new"}, "?", {}],
    ids=["well formed", "another reason", "another number", "text", "empty"],
)
def test_conditions_of_others_do_not_make_ours_forgotten(theirs: Any) -> None:
    first = compute_status(wish(), seen(), (), NOW)
    live = first.document()
    live["conditions"] = [theirs, *live["conditions"]]
    assert previous_status({"status": live}) == first
    assert compute_status(wish(), seen(status=live), (), LATER) == first


def test_of_a_status_that_cannot_be_read_whole_the_conditions_are() -> None:
    first = compute_status(wish(), seen(), (), NOW)
    live = first.document()
    live["conditions"][1]["status"] = "Perhaps"
    read = previous_status({"status": {**live, "url": 7}})
    assert read == PDDeploymentStatus(conditions=(first.conditions[0], *first.conditions[2:]))
    times_of_all = times(compute_status(wish(), seen(status={**live, "url": 7}), (), LATER))
    assert {kind for kind, time in times_of_all.items() if time == LATER} == {first.conditions[1].type}


# --- reuse --------------------------------------------------------------------------------------

ROUTER = pod("router", name="r-0")
SECOND = pod("router", name="r-1")
GOOD = RouterAnswer(reuse=True, pairs=True, flow=Flow.FLOWING)
REUSE_CASES: dict[str, tuple[tuple[Pod, ...], dict[str, RouterAnswer | None], tuple[str, str], tuple[str, str]]] = {
    "flowing": ((ROUTER,), {"r-0": GOOD}, ("True", "ReuseOn"), ("True", "TokensPulled")),
    "no turns": ((ROUTER,), {"r-0": replace(GOOD, flow=Flow.NO_TURNS)}, ("True", "ReuseOn"), ("Unknown", "NoTurnsYet")),
    "starved": ((ROUTER,), {"r-0": replace(GOOD, flow=Flow.STARVED)}, ("True", "ReuseOn"), ("False", "NothingPulled")),
    "reused": ((ROUTER,), {"r-0": replace(GOOD, flow=Flow.REUSED)}, ("True", "ReuseOn"), ("False", "BlocksReused")),
    "one starves": ((ROUTER, SECOND), {"r-0": GOOD, "r-1": replace(GOOD, flow=Flow.STARVED)}, ("True", "ReuseOn"),
                    ("False", "NothingPulled")),
    "one is idle": ((ROUTER, SECOND), {"r-0": GOOD, "r-1": replace(GOOD, flow=Flow.NO_TURNS)}, ("True", "ReuseOn"),
                    ("True", "TokensPulled")),
    "no pair": ((ROUTER,), {"r-0": replace(GOOD, pairs=False)}, ("False", "NoPair"), ("True", "TokensPulled")),
    "still off": ((ROUTER,), {"r-0": replace(GOOD, reuse=False)}, ("False", "ReuseOff"), ("True", "TokensPulled")),
    "silent": ((ROUTER,), {"r-0": None}, ("Unknown", "RouterUnreachable"), ("Unknown", "RouterUnreachable")),
    "one silent": ((ROUTER, SECOND), {"r-0": None, "r-1": GOOD}, ("True", "ReuseOn"), ("True", "TokensPulled")),
    "not asked": ((ROUTER,), {}, ("Unknown", "RouterNotAsked"), ("Unknown", "RouterNotAsked")),
    "not ready": ((replace(ROUTER, ready=False),), {"r-0": GOOD}, ("Unknown", "RouterNotReady"),
                  ("Unknown", "RouterNotReady")),
}  # fmt: skip


def test_what_decode_does_with_its_blocks_is_told_and_why() -> None:
    told = replace(GOOD, retentions=frozenset({"Pinned", "Unpinned"}), fallbacks=frozenset({"it can't"}))
    for answer, expected in ((told, "; decode retains Pinned and Unpinned, because it can't"), (GOOD, "use them with")):
        status = compute_status(wish(), seen(pods=(ROUTER,), routers={"r-0": answer}), (), NOW)
        active = next(one for one in status.conditions if one.type == ConditionType.BIDIRECTIONAL_ACTIVE)
        assert active.message.endswith(expected)


@pytest.mark.parametrize(
    ("retentions", "fallbacks", "expected"),
    [
        (["Leased"], [], "; decode retains Leased"),
        (["Leased", "Unpinned"], [], "; decode retains Leased and Unpinned"),
        (
            ["Pinned"],
            ["it can't"],
            "; decode retains Pinned, not Leased as spec.kvTransfer.retention asks, because it can't",
        ),
        (["Leased", "Pinned"], ["it can't"], "; decode retains Leased and Pinned, because it can't"),
    ],
)
def test_a_mode_that_was_not_asked_for_is_told(retentions: list[str], fallbacks: list[str], expected: str) -> None:
    told = replace(GOOD, retentions=frozenset(retentions), fallbacks=frozenset(fallbacks))
    asked = wish(("spec.kvTransfer.retention", "Leased"))
    status = compute_status(asked, seen(pods=(ROUTER,), routers={"r-0": told}), (), NOW)
    active = next(one for one in status.conditions if one.type == ConditionType.BIDIRECTIONAL_ACTIVE)
    assert active.message.endswith(f"use them with{expected}")


def test_without_a_verdict_the_status_claims_nothing_about_turns_that_came_since() -> None:
    status = compute_status(wish(), seen(pods=(ROUTER,), routers={"r-0": replace(GOOD, flow=Flow.NO_TURNS)}), (), NOW)
    assert message(status, ConditionType.TRANSFERS_FLOWING).startswith("when the routers were last asked, ")


@pytest.mark.parametrize("case", REUSE_CASES.values(), ids=REUSE_CASES.keys())
def test_reuse(case: tuple[Any, Any, Any, Any]) -> None:
    pods, routers, active, flowing = case
    status = compute_status(wish(), seen(pods=pods, routers=routers), (), NOW)
    assert word(status, ConditionType.BIDIRECTIONAL_ACTIVE) == active
    assert word(status, ConditionType.TRANSFERS_FLOWING) == flowing
    assert word(status, ConditionType.READY) == ("True", "AllReady"), "reuse is not readiness"


def test_a_restarted_operator_keeps_what_was_known_until_it_has_asked() -> None:
    known = compute_status(wish(), seen(pods=(ROUTER,), routers={"r-0": GOOD}), (), NOW)
    assert compute_status(wish(), seen(pods=(ROUTER,), status=known.document()), (), LATER) == known
    off = compute_status(wish(("spec.kvTransfer.bidirectional", "Disabled")), seen(pods=(ROUTER,)), (), NOW)
    on = compute_status(wish(), seen(pods=(ROUTER,), status=off.document()), (), LATER)
    assert word(on, ConditionType.BIDIRECTIONAL_ACTIVE) == ("Unknown", "RouterNotAsked")


def test_reuse_that_is_switched_off() -> None:
    off = wish(("spec.kvTransfer.bidirectional", "Disabled"))
    status = compute_status(off, seen(pods=(ROUTER,), routers={"r-0": GOOD}), (), NOW)
    assert word(status, ConditionType.BIDIRECTIONAL_ACTIVE) == ("False", "Disabled")
    assert word(status, ConditionType.TRANSFERS_FLOWING) == ("False", "Disabled")


REFUSED = 'create Pod qwen-decode-0 failed error: pods "qwen-decode-0" is forbidden: violates PodSecurity'
LACKING = replace(DONE, replicas=0, ready=0, updated=0)


@pytest.mark.parametrize("role", ["decode", "router"])
def test_pods_that_are_refused_are_told_with_the_servers_words(role: str) -> None:
    if role == "router":
        observed = seen(router=replace(LACKING, pods_refused=REFUSED))
    else:
        observed = replace(seen(decode=LACKING), pods_refused={Ref("StatefulSet", "models", "qwen-decode"): REFUSED})
    status = compute_status(wish(), observed, (), NOW)
    for kind in (ConditionType.READY, ConditionType.PROGRESSING, ROLES[role]):
        assert word(status, kind) == ("False", "PodsRefused")
        assert REFUSED in message(status, kind)
    assert "Warning" in {one.kind for one in happenings(PDDeploymentStatus(), status)}


def test_a_rollout_past_its_deadline_says_why_when_pods_are_refused() -> None:
    late = replace(DONE, updated=0, deadline_passed=True, pods_refused=REFUSED)
    status = compute_status(wish(), seen(router=late), (), NOW)
    assert word(status, ConditionType.PROGRESSING) == ("False", "RolloutStuck")
    assert REFUSED in message(status, ConditionType.PROGRESSING)
    assert word(status, ConditionType.READY) == ("True", "Serving")


def test_what_all_roles_wait_for_is_said_once_and_is_no_warning() -> None:
    account = Ref("ServiceAccount", "models", "qwen-router")
    waiting = Refusal(account, "", Reason.WAITING_FOR_API, "waiting for it")
    status = compute_status(wish(), seen(None, None, None), (waiting,), NOW)
    assert word(status, ConditionType.READY) == ("False", "WaitingForAPI")
    assert message(status, ConditionType.READY) == "waiting for it"
    assert message(status, ConditionType.PROGRESSING) == "waiting for it"
    assert {one.kind for one in happenings(PDDeploymentStatus(), status)} == {"Normal"}
    serving = compute_status(wish(), seen(), (waiting,), NOW)
    assert word(serving, ConditionType.READY) == ("True", "Serving")
    assert word(serving, ConditionType.PROGRESSING) == ("True", "WaitingForAPI"), "it is not complete"
