"""The chart with real pods: the operator runs under its own account in a namespace where only restricted pods are let
in, makes the pods of a PDDeployment, and those outlive its upgrade and its removal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_operator.core.observed_kinds import PODS
from pdctl.core.cluster.images import STAND_IN_IMAGE
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.places import ClusterError
from support.chart_release import Release, TenantLab, refusals, without_definition
from support.cluster_serving import is_ready
from support.clusters import eventually, make_namespace

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
STAND_IN = (
    ("spec.engine.image", STAND_IN_IMAGE),
    ("spec.engine.vllmVersion", "0.32.0"),
    ("spec.engine.preStopSeconds", 0),
    ("spec.engine.shutdownTimeoutSeconds", 0),
    ("spec.prefill.minReadySeconds", 0),
    ("spec.decode.minReadySeconds", 0),
)
"""Engines that start at once on the cluster's made-up p5en nodes."""


@pytest.fixture
def release(full_cluster: EmbeddedCluster, namespace: str) -> Iterator[Release]:
    """Installed, and waited for by helm."""
    without_definition(full_cluster)
    system = f"{namespace}-system"
    make_namespace(full_cluster.api, system, RESTRICTED)
    values = {"networkPolicy": {"enabled": True}, "operator": {"resyncSeconds": 5, "routerPollSeconds": 1}}
    made = Release(full_cluster, system, values)
    made.install("--wait", "--timeout", "5m")
    yield made
    with contextlib.suppress(ClusterError):
        made.uninstall()
    # Kept by the chart, and marked as this release's: the next one is somebody else's.
    without_definition(full_cluster)
    full_cluster.kubectl("delete", "namespace", system, "--wait=false")


@pytest.fixture
def lab(release: Release, namespace: str, tmp_path: Path) -> Iterator[TenantLab]:
    """A namespace for PDDeployments, which lets in engines that pin memory."""
    made = TenantLab(release.cluster, namespace, tmp_path)
    yield made
    made.close()


def operator_pod(release: Release) -> dict[str, Any]:
    """The one that runs."""
    text = release.cluster.kubectl("-n", release.namespace, "get", "pods", "-o", "json")
    [pod] = [one for one in json.loads(text)["items"] if "deletionTimestamp" not in one["metadata"]]
    assert isinstance(pod, dict)
    return pod


def started(pod: dict[str, Any]) -> tuple[str, list[tuple[str, int]]]:
    """Which pod it is, and how often its containers have been started."""
    states = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], [(one["name"], one["restartCount"]) for one in states]


def until_ready(lab: TenantLab) -> None:
    lab.cluster.kubectl("wait", "-n", lab.namespace, "--for=condition=Ready", "pdd/qwen", "--timeout=180s")


def test_pods_are_made_and_outlive_upgrade_and_removal(release: Release, lab: TenantLab) -> None:
    cluster = release.cluster
    begun = cluster.audit_position()
    first = operator_pod(release)
    assert started(first)[1] == [("operator", 0)]

    said = cluster.helm("test", release.name, "--namespace", release.namespace, "--timeout", "2m")
    assert "Phase:          Succeeded" in said

    lab.create(*STAND_IN)
    until_ready(lab)
    pods = {one["metadata"]["name"]: started(one) for one in lab.list(PODS)}
    assert len(pods) == 3
    reads = lab.condition("BidirectionalActive")
    assert reads["reason"] != "RouterUnreachable", "the operator asks the router, through both policies"
    own = [one for one in cluster.audit_events(begun) if one.user == release.account]
    assert refusals(own) == []

    # An upgrade replaces the operator's pod and no other.
    release.upgrade({"podAnnotations": {"changed": "yes"}}, "--wait", "--timeout", "5m")
    second = operator_pod(release)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert {one["metadata"]["name"]: started(one) for one in lab.list(PODS)} == pods
    lab.create(*STAND_IN, ("spec.decode.replicas", 2))
    # The deployment is Ready before all of its engines are.
    eventually("the new operator works", lambda: sum(map(is_ready, lab.pods("decode"))) == 2)
    until_ready(lab)

    # Without the operator everything runs on.
    pods = {one["metadata"]["name"]: started(one) for one in lab.list(PODS)}
    release.uninstall()
    eventually(
        "the operator is gone", lambda: not cluster.api.get(f"/api/v1/namespaces/{release.namespace}/pods")["items"]
    )
    assert {one["metadata"]["name"]: started(one) for one in lab.list(PODS)} == pods
    address = lab.get(lab.ref("Service", "qwen-router"))["spec"]["clusterIP"]
    fetch = cluster.inside(["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"http://{address}/v1/models"])
    assert cluster.run(fetch) == "200"

    # A new release finds everything as it is.
    release.install("--wait", "--timeout", "5m")
    until_ready(lab)
    assert {one["metadata"]["name"]: started(one) for one in lab.list(PODS)} == pods


def test_an_operator_without_the_definition_says_so_and_starts_again(
    full_cluster: EmbeddedCluster, namespace: str
) -> None:
    without_definition(full_cluster)
    make_namespace(full_cluster.api, namespace, RESTRICTED)
    release = Release(full_cluster, namespace, {"crds": {"install": False}})
    release.install()
    try:

        def ended() -> dict[str, Any]:
            [status] = operator_pod(release)["status"].get("containerStatuses") or [{}]
            found = status.get("lastState", {}).get("terminated") or status.get("state", {}).get("terminated") or {}
            assert isinstance(found, dict)
            return found

        assert eventually("it ends", ended)["exitCode"] == 1
        # The end of the log is the container's termination message: `kubectl describe` shows it.
        assert "does not serve pddeployments.pdserving.dev" in ended()["message"]
        release.upgrade({"crds": {"install": True}})
        full_cluster.kubectl("-n", namespace, "rollout", "status", f"deployment/{release.name}", "--timeout=180s")
    finally:
        release.uninstall()
        without_definition(full_cluster)
        full_cluster.kubectl("delete", "namespace", namespace, "--wait=false")
