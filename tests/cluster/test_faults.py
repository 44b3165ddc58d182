"""The real operator process under faults: killed at every write, refused, cut off, stalled, doubled. One end for all.

Every single call, reads included, is gone through in `tests/component/operator/test_faults.py`; here it is the server's
own semantics and the real process that count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.api_faults import Fault, FaultProxy, Seen
from support.clusters import eventually
from support.operator_lab import Lab
from support.operator_process import OperatorProcess

VOLATILE = ("uid", "resourceVersion", "generation", "managedFields", "creationTimestamp", "namespace", "annotations")
WRITES = ("PATCH", "POST", "DELETE")


@pytest.fixture
def lab(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    """A namespace of its own."""
    made = Lab(light_cluster, namespace, tmp_path)
    yield made
    made.close()


def end_state(lab: Lab, name: str) -> dict[str, Any]:
    """Specs of all children and the conditions, without what differs between two objects of other names."""
    found: dict[str, Any] = {}
    for ref, raw in lab.children(name).items():
        metadata = {key: value for key, value in raw["metadata"].items() if key not in VOLATILE}
        metadata["ownerReferences"] = [owner["name"] for owner in metadata["ownerReferences"]]
        body = {key: value for key, value in raw.items() if key not in ("status", "metadata")}
        for field in ("clusterIP", "clusterIPs", "nodePort"):
            body.get("spec", {}).pop(field, None) if isinstance(body.get("spec"), dict) else None
        found[str(ref)] = {"metadata": metadata, **body}
    text = repr(found).replace(name, "NAME").replace(lab.namespace, "NAMESPACE")
    conditions = lab.get(lab.ref("PDDeployment", name)).get("status", {}).get("conditions", [])
    return {"children": text, "conditions": [(one["type"], one["status"], one["reason"]) for one in conditions]}


def is_write(seen: Seen) -> bool:
    """Does the request change something?"""
    return seen.method in WRITES


@pytest.mark.parametrize("landed", [False, True], ids=["before it lands", "after it landed"])
def test_killed_at_every_write(lab: Lab, landed: bool) -> None:
    def is_told(name: str) -> bool:
        return bool(lab.condition("Ready", name).get("reason") == "Unschedulable")

    with lab.proxy() as proxy:
        operator = lab.operator(url=proxy.url)
        lab.create(name="whole")
        for kind in ("PrefillReady", "DecodeReady", "RouterReady"):
            lab.until_condition(kind, "False", "Unschedulable", name="whole")
        lab.settled(operator, "whole")
        expected = end_state(lab, "whole")
        for at in itertools.count(1):
            name = f"cut-{at}"
            hit = kill_at(proxy, operator, at, landed)
            lab.create(name=name)
            eventually("killed, or through", lambda: hit or is_told(name))  # noqa: B023
            proxy.rule = lambda _seen: None
            if not hit:
                break
            operator.start()
            eventually(f"the same end, killed at write {at}", lambda: end_state(lab, name) == expected)  # noqa: B023
        assert at > 12, "all children and the status are written in that many calls"


def kill_at(proxy: FaultProxy, operator: OperatorProcess, at: int, landed: bool) -> list[Seen]:
    """Arm the proxy: the operator dies at its n-th write from now on. The list is filled when that has happened."""
    hit: list[Seen] = []
    count = itertools.count(1)

    def rule(seen: Seen) -> Fault | None:
        if hit:
            return Fault(503)
        if is_write(seen) and next(count) == at:
            hit.append(seen)
            operator.kill()
            return Fault(0, landed=landed)
        return None

    proxy.rule = rule
    return hit


FAULTS = {
    "conflict": Fault(409),
    "too many requests": Fault(429, retry_after=1),
    "server error": Fault(500),
    "unavailable": Fault(503),
    "connection cut": Fault(0),
    "answer lost": Fault(0, landed=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_every_second_write_fails_once(lab: Lab, fault: Fault) -> None:
    with lab.proxy() as proxy:
        operator = lab.operator(url=proxy.url)
        lab.create(name="whole")
        for kind in ("PrefillReady", "DecodeReady", "RouterReady"):
            lab.until_condition(kind, "False", "Unschedulable", name="whole")
        expected = end_state(lab, "whole")
        failed: set[str] = set()
        turn = itertools.count()

        def rule(seen: Seen) -> Fault | None:
            # Reads are hit as well; watches have a test of their own.
            key = f"{seen.method} {seen.path}"
            if seen.watch or key in failed or next(turn) % 2:
                return None
            failed.add(key)
            return fault

        proxy.rule = rule
        lab.create(name="hit")
        eventually("the same end", lambda: end_state(lab, "hit") == expected)
        assert len(failed) > 3
        assert operator.running


def test_the_api_server_is_restarted(lab: Lab) -> None:
    operator = lab.operator("--resync", "5")
    lab.create()
    lab.settled(operator)
    lab.cluster.stop_daemon("apiserver")
    eventually("the operator notices", lambda: operator.metric("pd_operator_resyncs_total") > 0)
    lab.cluster.start_daemon("apiserver")
    lab.cluster.wait_until_ready()
    lab.create(("spec.decode.replicas", 2))
    ref = lab.ref("StatefulSet", "qwen-decode")
    eventually("served again", lambda: lab.get(ref)["spec"]["replicas"] == 2)
    service = lab.ref("Service", "qwen-decode")
    lab.delete(service)
    eventually("healed again", lambda: lab.exists(service))
    assert operator.running
    assert operator.health()[0] == 200


def test_stalled_watches_are_made_good_and_end_in_a_restart(lab: Lab) -> None:
    with lab.proxy() as proxy:
        operator = lab.operator("--resync", "3", url=proxy.url)
        lab.create()
        lab.settled(operator)
        lab.resynced(operator)
        assert operator.health()[0] == 200
        proxy.flowing.clear()
        service = lab.ref("Service", "qwen-decode")
        lab.delete(service)
        eventually("the complete look heals", lambda: lab.exists(service))
        numbers = itertools.count(2)

        def unhealthy() -> bool:
            # Something has to change in each period, or nobody can tell a dead watch from a quiet cluster.
            lab.create(("spec.decode.replicas", next(numbers)))
            return operator.health()[0] == 503

        eventually("liveness fails", unhealthy)
        assert "no watch" in operator.health()[1]
        assert operator.running, "it still does its work"


def test_two_operators_at_once_do_no_harm(lab: Lab) -> None:
    first, second = (lab.operator("--resync", "2", "--router-poll", "1") for _ in range(2))
    lab.create()
    for replicas in (2, 3, 1):
        lab.create(("spec.decode.replicas", replicas), ("spec.router.replicas", replicas))
    lab.serve()
    lab.until_condition("BidirectionalActive", "Unknown", "RouterUnreachable")
    for operator in (first, second):
        lab.settled(operator)
        lab.resynced(operator)
    assert lab.get(lab.ref("StatefulSet", "qwen-decode"))["spec"]["replicas"] == 1
    assert not lab.exists(lab.ref("PodDisruptionBudget", "qwen-router"))
    since = lab.cluster.audit_position()
    for operator in (first, second):
        lab.resynced(operator)
    assert lab.writes(since) == []
    assert first.running
    assert second.running


def test_a_terminated_operator_ends_soon_and_well(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    assert operator.terminate() == 0
    assert "Traceback" not in operator.log()
