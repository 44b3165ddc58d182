"""Which of a StatefulSet's Events tells why its pods are not made."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed import observe_child
from pd_operator.core.observed_events import pods_refused


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
