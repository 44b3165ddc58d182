"""Listed namespaces that are deleted and come back, with the chart's own rights, and watches that fail for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.api_faults import Fault
from support.chart_release import Release, TenantLab
from support.clusters import eventually, exists, make_namespace
from support.operator_lab import Lab
from support.operator_process import OperatorProcess


@pytest.fixture
def lab(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    """A namespace for PDDeployments."""
    made = Lab(light_cluster, namespace, tmp_path)
    yield made
    made.close()


def test_a_listed_namespace_is_deleted_and_made_again(lab: Lab, tmp_path: Path) -> None:
    going, system = f"{lab.namespace}-going", f"{lab.namespace}-system"
    for name in (going, system):
        make_namespace(lab.api, name)
    watch = {"watch": {"scope": "Namespaces", "namespaces": [going, lab.namespace]}, "crds": {"install": False}}
    release = Release(lab.cluster, system, watch)
    release.install()
    arguments = ("--namespace", going, "--namespace", lab.namespace, "--resync", "2")
    try:
        with OperatorProcess(release.token_kubeconfig(tmp_path), tmp_path / "operator.log", *arguments) as operator:
            lab.create()
            lab.settled(operator)
            delete_namespace(lab, going)
            eventually("the loss is told", lambda: f"not served: {going}" in operator.health()[1])
            assert operator.health()[0] == 200
            assert operator.metric("pd_operator_namespace_served") == 1
            serves(lab, operator, replicas=2)
            assert operator.terminate() == 0
            operator.start()
            serves(lab, operator, replicas=3)
            assert f"not served: {going}" in operator.health()[1]
            back = TenantLab(lab.cluster, going, tmp_path)
            release.upgrade(watch)
            back.create()
            eventually("served again", lambda: operator.metric("pd_operator_namespace_served") == 2, 180)
            serves(back, operator, replicas=2)
            serves(lab, operator, replicas=1)
            assert operator.terminate() == 0
    finally:
        release.uninstall()
        for name in (going, system):
            lab.api.request("DELETE", f"/api/v1/namespaces/{name}")


def test_watches_that_fail_for_good_end_the_process(lab: Lab) -> None:
    with lab.proxy() as proxy:
        proxy.rule = lambda seen: Fault(404) if seen.watch else None
        operator = lab.operator(url=proxy.url)
        eventually("the process ends", lambda: not operator.running)
        assert "the watches have ended" in operator.log()
        proxy.rule = lambda _seen: None
        operator.start()
        lab.create()
        lab.settled(operator)
        assert operator.terminate() == 0


def serves(lab: Lab, operator: OperatorProcess, replicas: int) -> None:
    """An edit is carried out."""
    lab.create(("spec.decode.replicas", replicas))
    ref = lab.ref("StatefulSet", "qwen-decode")
    eventually(f"{replicas} in {lab.namespace}", lambda: lab.get(ref)["spec"]["replicas"] == replicas)
    lab.settled(operator)


def delete_namespace(lab: Lab, name: str) -> None:
    """Delete it, and wait until it is gone."""
    path = f"/api/v1/namespaces/{name}"
    lab.api.request("DELETE", path)
    eventually(f"{name} is gone", lambda: not exists(lab.api, path))
