"""The mirror: three sources, in any order, and whom a change concerns."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed_kinds import CHILD_KINDS, DEPLOYMENTS, PODS
from pd_operator.shell.mirror import Mirror
from pd_operator.shell.wakeups import Key

QWEN = Key("n", "qwen")
SERVICES = next(kind for kind in CHILD_KINDS if kind.name == "Service")


def deployment(version: int = 10, **metadata: Any) -> dict[str, Any]:
    """A PDDeployment."""
    base = {"name": "qwen", "namespace": "n", "uid": "u", "resourceVersion": str(version)}
    return {"kind": "PDDeployment", "metadata": {**base, **metadata}, "spec": {}}


def service(version: int = 10, uid: str = "s", labelled: bool = True, hashed: str = "h") -> dict[str, Any]:
    """A child of it."""
    labels = {"pdserving.dev/pddeployment": "qwen", "app.kubernetes.io/managed-by": "pd-operator"}
    owner = {"kind": "PDDeployment", "name": "qwen", "uid": "u", "controller": True}
    metadata = {
        "name": "qwen-decode",
        "namespace": "n",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels if labelled else {},
        "annotations": {"pdserving.dev/rendered-hash": hashed},
        "ownerReferences": [owner],
    }
    return {"kind": "Service", "metadata": metadata, "spec": {"big": "x" * 1000}}


def pod(version: int = 10, ready: bool = False) -> dict[str, Any]:
    """A router pod of it."""
    labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "router"}
    metadata = {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": str(version), "labels": labels}
    ports = [{"name": "admin", "containerPort": 9000}]
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"podIP": "10.0.0.1", "conditions": conditions}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": [{"ports": ports}]}, "status": status}


@pytest.fixture
def mirror() -> Mirror:
    made = Mirror()
    made.see(DEPLOYMENTS, deployment())
    return made


def children(mirror: Mirror) -> list[str]:
    """Hashes of the children that are seen."""
    observed = mirror.observed(QWEN, {})
    assert observed is not None
    return [child.rendered_hash for child in observed.children.values()]


def test_news_wake_and_repetition_does_not(mirror: Mirror) -> None:
    assert mirror.see(SERVICES, service(11)) == QWEN
    assert mirror.see(SERVICES, service(11)) is None
    assert mirror.see(SERVICES, service(12)) is None, "only its version moved"
    assert mirror.see(SERVICES, service(13, hashed="other")) == QWEN


def test_what_is_older_is_ignored(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(20, hashed="new"))
    assert mirror.see(SERVICES, service(15, hashed="old")) is None
    assert children(mirror) == ["new"]


def test_a_deletion_of_a_predecessor_is_ignored(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(20, uid="second"))
    assert mirror.see(SERVICES, service(30, uid="first"), gone=True) is None
    assert len(children(mirror)) == 1
    assert mirror.see(SERVICES, service(31, uid="second"), gone=True) == QWEN
    assert children(mirror) == []


def test_a_complete_list_removes_what_vanished(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(20))
    assert mirror.listed(SERVICES, None, [], 25) == {QWEN}
    assert children(mirror) == []


def test_a_complete_list_does_not_remove_what_is_newer_than_it(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(30))
    assert mirror.listed(SERVICES, None, [], 25) == set()
    assert len(children(mirror)) == 1


def test_a_list_of_one_namespace_says_nothing_about_others(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(20))
    assert mirror.listed(SERVICES, "other", [], 25) == set()
    assert len(children(mirror)) == 1


def test_a_child_whose_label_is_lost_still_wakes_its_owner(mirror: Mirror) -> None:
    mirror.see(SERVICES, service(20))
    assert mirror.see(SERVICES, service(21, labelled=False)) == QWEN


def test_a_deployment_that_is_gone_is_gone(mirror: Mirror) -> None:
    assert mirror.see(DEPLOYMENTS, deployment(40), gone=True) == QWEN
    assert mirror.observed(QWEN, {}) is None
    assert mirror.keys() == ()


def test_only_changes_of_a_deployment_wake(mirror: Mirror) -> None:
    assert mirror.see(DEPLOYMENTS, deployment(11)) is None
    assert mirror.see(DEPLOYMENTS, deployment(12, generation=2)) == QWEN
    assert mirror.see(DEPLOYMENTS, deployment(13, generation=2, managedFields=[{"manager": "x"}])) is None


def test_changes_that_no_watch_brings_are_remembered_once(mirror: Mirror) -> None:
    mirror.listed(SERVICES, None, [service(20)], 25)
    mirror.see(SERVICES, service(20))
    assert mirror.take_unconfirmed() == ()
    mirror.listed(SERVICES, None, [service(30, hashed="other")], 35)
    assert [ref.name for ref in mirror.take_unconfirmed()] == ["qwen-decode"]
    assert mirror.take_unconfirmed() == ()
    mirror.listed(SERVICES, None, [service(30, hashed="other")], 36)
    assert mirror.take_unconfirmed() == ()


def test_routers_that_can_be_asked(mirror: Mirror) -> None:
    mirror.see(PODS, pod(11))
    assert mirror.routers() == []
    mirror.see(PODS, pod(12, ready=True))
    assert [one.name for one in mirror.routers()] == ["p"]
    mirror.see(DEPLOYMENTS, deployment(40), gone=True)
    assert mirror.routers() == [], "nobody is interested in it any more"
