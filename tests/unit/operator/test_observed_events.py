"""Which of a StatefulSet's Events tells why its pods are not made, and which of a pod's why nothing begins in it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed import Observed, observe_child
from pd_operator.core.observed_events import (
    ASKED_PODS,
    hindrance,
    pods_refused,
    pods_to_ask_about,
    with_hindrances,
)
from pd_operator.core.observed_pods import Pod, Trouble
from pd_operator.core.reasons import Reason


def event(reason: str, version: int, message: str = "") -> dict[str, Any]:
    return {"reason": reason, "message": message, "metadata": {"resourceVersion": str(version)}}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], ""),
        ([event("FailedCreate", 9, "exceeded\nquota")], "exceeded quota"),
        ([event("FailedCreate", 9, "old"), event("FailedCreate", 10, "new")], "new"),
        ([event("FailedCreate", 9, "old"), event("SuccessfulCreate", 10)], ""),
        ([event("SuccessfulCreate", 9), event("FailedCreate", 10, "new")], "new"),
        ([event("FailedCreate", 9, "this"), event("RecreatingFailedPod", 12, "other")], "this"),
    ],
    ids=["none", "one line", "newest", "made since", "made before", "others"],
)
def test_the_newest_word_counts(events: list[dict[str, Any]], told: str) -> None:
    assert pods_refused(events) == told
    assert pods_refused(reversed(events)) == told


@pytest.mark.parametrize(("status", "told"), [("True", "exceeded quota"), ("False", "")])
def test_a_deployment_tells_it_in_a_condition(status: str, told: str) -> None:
    condition = {"type": "ReplicaFailure", "status": status, "message": "exceeded quota"}
    child = observe_child("Deployment", {"metadata": {"name": "r"}, "status": {"conditions": [condition]}})
    assert child.workload is not None
    assert child.workload.pods_refused == told


@pytest.mark.parametrize(
    ("seen", "replicas", "lacks"), [(2, 0, True), (1, 0, False), (2, 1, False)], ids=["lacks", "not seen", "made"]
)
def test_pods_lack_only_once_the_controller_has_seen_the_spec(seen: int, replicas: int, lacks: bool) -> None:
    raw = {
        "metadata": {"name": "s", "generation": 2},
        "spec": {"replicas": 1},
        "status": {"observedGeneration": seen, "replicas": replicas},
    }
    workload = observe_child("StatefulSet", raw).workload
    assert workload is not None
    assert workload.lacks_pods is lacks


def told(reason: str, version: int, count: int, message: str = "", *, minute: int = 9) -> dict[str, Any]:
    return {**event(reason, version, message), "count": count, "lastTimestamp": f"2026-01-01T08:{minute:02}:00Z"}


MISSING = "hostPath type check failed: /none is not a directory"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], ""),
        ([told("FailedMount", 9, 3, MISSING)], f"FailedMount: {MISSING}"),
        ([told("FailedMount", 9, 2, MISSING)], ""),
        (
            [
                {**event("FailedMount", 9, "x"), "series": {"count": 4, "lastObservedTime": "2026-01-01T08:09:00.5Z"}},
                told("FailedMount", 8, 3, "old", minute=1),
            ],
            "FailedMount: x",
        ),
        ([event("FailedMount", 9, "x")], ""),
        ([told("FailedAttachVolume", 9, 5, "in use\nelsewhere")], "FailedAttachVolume: in use elsewhere"),
        ([told("FailedCreatePodSandBox", 9, 5, "no address")], "FailedCreatePodSandBox: no address"),
        ([told("FailedMount", 9, 5, "old", minute=3), told("FailedMount", 10, 4, "new")], "FailedMount: new"),
        ([told("FailedMount", 9, 5, "b", minute=5), told("FailedMount", 10, 4, "a")], "FailedMount: a; FailedMount: b"),
        ([told("FailedMount", 9, 5, "b"), told("FailedMount", 8, 4, "a")], "FailedMount: a; FailedMount: b"),
        ([told("FailedMount", n, 5, word) for n, word in enumerate("dcba")], "FailedMount: a; FailedMount: b"),
        ([told("FailedMount", 9, 5, "a"), told("FailedMount", 10, 1, "b")], "FailedMount: a"),
        ([told("FailedMount", 9, 5, "old"), told("Pulling", 10, 1)], ""),
        ([told("FailedMount", 9, 5, "this"), told("Scheduled", 10, 1)], "FailedMount: this"),
    ],
)
def test_what_hinders_a_pod_is_told_once_it_was_told_often(events: list[dict[str, Any]], words: str) -> None:
    wanted = Trouble(Reason.CONTAINER_NOT_CREATED, words) if words else None
    assert hindrance(events) == wanted
    assert hindrance(reversed(events)) == wanted


def pod(name: str, role: str = "decode", *, not_begun: bool = True, trouble: Trouble | None = None) -> Pod:
    return Pod("models", name, f"uid-{name}", 1, "qwen", role, not_begun=not_begun, trouble=trouble)


def test_few_pods_of_each_role_are_asked_about_and_only_silent_ones() -> None:
    trouble = Trouble(Reason.UNSCHEDULABLE, "x")
    many = tuple(pod(f"d-{n}") for n in range(ASKED_PODS + 2))
    observed = Observed(raw={}, pods=(pod("a", trouble=trouble), pod("b", not_begun=False), *many, pod("p", "prefill")))
    assert [one.name for one in pods_to_ask_about(observed)] == ["d-0", "d-1", "d-2", "p"]


def test_a_status_says_more_than_an_event() -> None:
    own, found = Trouble(Reason.UNSCHEDULABLE, "x"), Trouble(Reason.CONTAINER_NOT_CREATED, "y")
    observed = Observed(raw={}, pods=(pod("a", trouble=own), pod("b"), pod("c")))
    after = with_hindrances(observed, {"uid-a": found, "uid-b": found, "uid-c": None})
    assert [one.trouble for one in after.pods] == [own, found, None]
