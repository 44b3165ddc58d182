"""When a demo may begin: what objects of a cluster say about one deployment."""

from typing import Any

import pytest

from pdctl.core.cluster.sight import pods_of, read_sight


def pdd(bidirectional: str = "Enabled", observed: int = 3, **conditions: str) -> dict[str, Any]:
    listed = {"Ready": "True", "BidirectionalActive": "True", "Progressing": "False", **conditions}
    return {
        "metadata": {"name": "tiny", "generation": 3},
        "spec": {"kvTransfer": {"bidirectional": bidirectional}},
        "status": {
            "observedGeneration": observed,
            "conditions": [
                {"type": name, "status": status, "reason": "R", "message": f"{name} is {status}"}
                for name, status in listed.items()
            ],
        },
    }


def pod(
    name: str, role: str = "prefill", restarts: int = 0, leaving: bool = False, ip: str = "10.0.0.1"
) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "labels": {"pdserving.dev/role": role}}
    if leaving:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    container: dict[str, Any] = {"name": "engine", "restartCount": restarts}
    if restarts:
        container["lastState"] = {"terminated": {"reason": "Error", "message": "no memory\n"}}
    return {"metadata": meta, "status": {"podIP": ip, "containerStatuses": [container]}}


def test_ready_as_wanted():
    sight = read_sight(pdd(), [pod("tiny-prefill-0")])
    assert (sight.ready, sight.waiting_for, sight.deaths) == (True, "", ())


def test_with_reuse_off_the_condition_must_be_off_too():
    assert read_sight(pdd("Disabled", BidirectionalActive="False"), []).ready
    assert not read_sight(pdd("Disabled"), []).ready


def test_what_the_operator_waits_for_is_said_once():
    waiting = pdd(Ready="False")
    waiting["status"]["conditions"][0]["message"] = "waiting for the API server"
    assert read_sight(waiting, []).waiting_for == "the API server"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observed": 2}, "the operator"),
        ({"Ready": "False"}, "Ready is False"),
        ({"BidirectionalActive": "Unknown"}, "BidirectionalActive is Unknown"),
        ({"Progressing": "True"}, "Progressing is True"),
    ],
)
def test_what_is_waited_for(change: dict[str, Any], words: str):
    sight = read_sight(pdd(**change), [])
    assert not sight.ready
    assert words in sight.waiting_for


def test_a_fresh_object_waits_for_the_operator():
    fresh = pdd()
    del fresh["status"]
    assert read_sight(fresh, []).waiting_for == "the operator"


def test_old_pods_must_be_gone():
    sight = read_sight(pdd(), [pod("tiny-prefill-0", leaving=True)])
    assert not sight.ready
    assert "tiny-prefill-0" in sight.waiting_for


def test_a_lost_container_is_told_with_its_last_words():
    (death,) = read_sight(pdd(), [pod("tiny-decode-0", restarts=1)]).deaths
    assert death == "tiny-decode-0: container engine ended (no memory)"


def test_pods_of_a_role_are_those_that_stay_and_have_an_address():
    pods = [pod("b"), pod("a"), pod("c", leaving=True), pod("d", ip=""), pod("r", role="router")]
    assert [one["metadata"]["name"] for one in pods_of(pods, "prefill")] == ["a", "b"]
