"""The chart on a real API server with the real helm: accepted, upgraded, uninstalled, and what outlives it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator.core.observed_kinds import PODS
from pdctl.shell.cluster.api import ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.places import ClusterError
from support.chart_release import DEFINITION, Release, TenantLab, without_definition
from support.charts import CHART, render
from support.clusters import eventually, exists, make_namespace
from support.operator_lab import Lab
from support.operator_process import OperatorProcess
from support.pddeployments import REMOVED, edited

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
RICH: dict[str, Any] = {
    "commonLabels": {"team": "serving"},
    "metrics": {"dashboards": {"enabled": True}},
    "networkPolicy": {"enabled": True, "apiServer": {"cidrs": ["10.0.0.0/8"]}},
    "imagePullSecrets": [{"name": "pull"}],
    "children": {"imagePullSecrets": ["pull"]},
    "operator": {"extraEnv": [{"name": "TZ", "value": "UTC"}]},
}


@pytest.fixture
def cluster(light_cluster: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """One that has never heard of PDDeployments, and has not in the end."""
    without_definition(light_cluster)
    yield light_cluster
    without_definition(light_cluster)


@pytest.fixture
def system(cluster: EmbeddedCluster, namespace: str) -> Iterator[str]:
    """A namespace for the operator, of the strictest Pod Security level."""
    name = f"{namespace}-system"
    make_namespace(cluster.api, name, RESTRICTED)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def release(cluster: EmbeddedCluster, system: str) -> Iterator[Release]:
    """Not installed yet; uninstalled in the end if it was. What is of the cluster must not meet the next test."""
    made = Release(cluster, system)
    yield made
    with contextlib.suppress(ClusterError):
        made.uninstall()


@contextlib.contextmanager
def served(release: Release, name: str, folder: Path) -> Iterator[tuple[Lab, OperatorProcess]]:
    """A namespace with a PDDeployment `qwen` and its children, kept by an operator with the release's account."""
    lab = TenantLab(release.cluster, name, folder)
    try:
        kubeconfig = release.token_kubeconfig(folder)
        with OperatorProcess(kubeconfig, folder / "operator.log", "--namespace", name) as operator:
            lab.create()
            lab.settled(operator)
            eventually("pods", lambda: len(lab.pods()) == 3)
            yield lab, operator
    finally:
        lab.close()


def identities(lab: Lab) -> dict[str, str]:
    """Uids of the PDDeployment, its children and its pods."""
    objects = [lab.get(lab.ref("PDDeployment")), *lab.children().values(), *lab.list(PODS)]
    return {one["metadata"]["name"] + one.get("kind", ""): one["metadata"]["uid"] for one in objects}


# --- install ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, RICH], ids=["defaults", "rich"])
def test_every_object_is_accepted_and_kept_as_it_is(release: Release, values: dict[str, Any]) -> None:
    release.values = {**release.values, **values}
    for one in rendered(release):
        text = json.dumps(one)
        release.cluster.kubectl(
            "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
        )
    release.install()
    for one in yaml.safe_load_all(release.manifest()):
        stored = json.loads(release.cluster.kubectl(*address(one), "-o", "json"))
        assert covers(stored, one), f"{one['kind']} {one['metadata']['name']}"


def rendered(release: Release) -> list[dict[str, Any]]:
    return render(release.values, namespace=release.namespace, release=release.name)


def address(one: dict[str, Any]) -> list[str]:
    where = one["metadata"].get("namespace")
    return ["get", f"{one['kind']}.{group(one)}", one["metadata"]["name"], *(["-n", where] if where else [])]


def group(one: dict[str, Any]) -> str:
    name, slash, version = one["apiVersion"].partition("/")
    return f"{version}.{name}" if slash else f"{name}."


def covers(stored: Any, sent: Any) -> bool:
    """Is all that was sent in what is kept?"""
    if isinstance(sent, dict):
        return all(key in stored and covers(stored[key], value) for key, value in sent.items())
    if isinstance(sent, list):
        return len(stored) == len(sent) and all(map(covers, stored, sent))
    return bool(stored == sent)


def test_the_notes_say_how_to_go_on_and_how_to_remove(release: Release) -> None:
    notes = release.install()
    assert "serves all namespaces" in notes
    assert f"helm -n {release.namespace} test {release.name}" in notes
    assert notes.index("kubectl delete pdd") < notes.index(f"uninstall {release.name}") < notes.index("delete crd")


def test_the_operators_pod_is_admitted_where_only_restricted_pods_are(release: Release) -> None:
    release.values["networkPolicy"] = {"enabled": True}
    release.install()
    pods = f"/api/v1/namespaces/{release.namespace}/pods"
    [pod] = eventually("the pod is made", lambda: release.cluster.api.get(pods)["items"])
    assert pod["spec"]["serviceAccountName"] == release.name
    # The pod of `helm test` is made only when it is asked for.
    [test] = [one for one in rendered(release) if one["kind"] == "Pod"]
    release.cluster.api.request("POST", f"{pods}?dryRun=All", test)


def test_routers_are_admitted_there_and_engines_that_can_be(release: Release, namespace: str, tmp_path: Path) -> None:
    release.install()
    lab = TenantLab(release.cluster, namespace, tmp_path, RESTRICTED)
    try:
        with OperatorProcess(
            release.token_kubeconfig(tmp_path), tmp_path / "log", "--namespace", namespace
        ) as operator:
            lab.create(("spec.engine.securityProfile", "Restricted"), ("spec.engine.runAsUser", 1000))
            lab.settled(operator)
            eventually("pods are made", lambda: len(lab.pods()) == 3)
    finally:
        lab.close()


def test_one_namespace_per_team_without_rights_of_the_cluster(cluster: EmbeddedCluster, system: str) -> None:
    teams = [f"{system}-a", f"{system}-b"]
    for team in teams:
        make_namespace(cluster.api, team)
    values = {"watch": {"scope": "Namespaces", "namespaces": teams}, "rbac": {"userRoles": False}}
    release = Release(cluster, system, values)
    notes = release.install()
    try:
        assert f"serves the namespaces {', '.join(teams)}" in notes
        account = f"--as={release.account}"
        for where, answer in ((teams[0], "yes"), (teams[1], "yes"), (system, "no"), ("default", "no")):
            said = cluster.kubectl("auth", "can-i", "patch", "statefulsets", "-n", where, account, check=False)
            assert said.strip() == answer, where
        kinds = {one["kind"] for one in yaml.safe_load_all(release.manifest())}
        assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    finally:
        release.uninstall()
        for team in teams:
            cluster.kubectl("delete", "namespace", team, "--wait=false")


# --- upgrade ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The chart as an earlier version could have been: no field `minReadySeconds`, no status column, other labels."""
    chart = tmp_path / "previous" / "pd-operator"
    shutil.copytree(CHART, chart)
    for path, before, after in (
        ("Chart.yaml", "version: 0.1.0", "version: 0.0.9"),
        ("values.yaml", "memory: 256Mi", "memory: 128Mi"),
    ):
        text = (chart / path).read_text(encoding="utf-8")
        assert before in text
        (chart / path).write_text(text.replace(before, after), encoding="utf-8")
    definition = chart / "files" / "pddeployments.yaml"
    raw = yaml.safe_load(definition.read_text(encoding="utf-8"))
    role = "spec.versions[0].schema.openAPIV3Schema.properties.spec.properties.decode"
    raw = edited(
        raw,
        (f"{role}.properties.minReadySeconds", REMOVED),
        (f"{role}.default.minReadySeconds", REMOVED),
    )
    head, _, _ = definition.read_text(encoding="utf-8").partition("spec:\n")
    body = yaml.safe_dump({"spec": raw["spec"]}, sort_keys=False, width=4096)
    definition.write_text(head + body, encoding="utf-8")
    return chart


def explained(release: Release) -> str:
    """What users are told about one part of the spec, empty until the server knows it."""
    return release.cluster.kubectl("explain", "pdd.spec.decode", check=False)


def test_an_upgrade_brings_the_new_definition_and_keeps_objects_and_pods(
    release: Release, previous: Path, namespace: str, tmp_path: Path
) -> None:
    release.install(chart=previous)
    eventually("it is explained", lambda: "replicas" in explained(release))
    assert "minReadySeconds" not in explained(release)
    with served(release, namespace, tmp_path) as (lab, operator):
        before = identities(lab)
        generation = lab.get(lab.ref("PDDeployment"))["metadata"]["generation"]
        since = lab.cluster.audit_position()
        release.upgrade({"resources": {"limits": {"memory": "1Gi"}}})
        eventually("new field is served", lambda: "minReadySeconds" in explained(release))
        lab.settled(operator)
        assert identities(lab) == before
        assert lab.get(lab.ref("PDDeployment"))["metadata"]["generation"] == generation
        # Nothing but the operator's own objects was written.
        wrote = [one for one in lab.cluster.audit_events(since) if one.user_agent.startswith("Helm") and one.is_write]
        assert wrote
        assert not [
            one for one in wrote if one.namespace == lab.namespace or one.resource == "pddeployments.pdserving.dev"
        ]
        [deployment] = lab.api.get(f"/apis/apps/v1/namespaces/{release.namespace}/deployments")["items"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == "1Gi"
        assert container["resources"]["requests"]["memory"] == "256Mi"
        assert deployment["metadata"]["labels"]["helm.sh/chart"].startswith("pd-operator-0.1")
        # And an upgrade that changes nothing changes nothing.
        resource_version = deployment["metadata"]["resourceVersion"]
        release.upgrade({"resources": {"limits": {"memory": "1Gi"}}})
        assert identities(lab) == before
        [again] = lab.api.get(f"/apis/apps/v1/namespaces/{release.namespace}/deployments")["items"]
        assert again["metadata"]["generation"] == deployment["metadata"]["generation"], resource_version


def test_a_rollback_works(release: Release, previous: Path, namespace: str, tmp_path: Path) -> None:
    release.install(chart=previous)
    release.upgrade({})
    with served(release, namespace, tmp_path) as (lab, _operator):
        before = identities(lab)
        release.cluster.helm("rollback", release.name, "1", "--namespace", release.namespace)
        assert identities(lab) == before
        assert exists(lab.api, DEFINITION)


def test_an_upgrade_can_narrow_the_scope(release: Release, namespace: str) -> None:
    release.install()
    cluster, account = release.cluster, f"--as={release.account}"
    make_namespace(cluster.api, namespace)

    def may(where: str) -> bool:
        said = cluster.kubectl("auth", "can-i", "patch", "statefulsets", "-n", where, account, check=False)
        return said.strip() == "yes"

    try:
        eventually("the whole cluster", lambda: may("default") and may(namespace))
        release.upgrade({"watch": {"scope": "Namespaces", "namespaces": [namespace]}})
        eventually("one namespace", lambda: may(namespace) and not may("default"))
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


# --- uninstall --------------------------------------------------------------------------------------------------------


def test_uninstalling_keeps_the_definition_objects_and_pods_and_a_new_release_takes_over(
    release: Release, namespace: str, tmp_path: Path
) -> None:
    release.install()
    with served(release, namespace, tmp_path) as (lab, operator):
        before = identities(lab)
        objects = list(yaml.safe_load_all(release.manifest()))
        operator.kill()
        said = release.uninstall()
        assert "kept due to the resource policy" in said
        for one in objects:
            left = release.cluster.kubectl(*address(one), "--ignore-not-found", "-o", "name")
            assert bool(left) == (one["kind"] == "CustomResourceDefinition"), one["kind"]
        assert identities(lab) == before
        release.install()
        with OperatorProcess(
            release.token_kubeconfig(tmp_path), tmp_path / "second.log", "--namespace", namespace
        ) as two:
            lab.settled(two)
        assert identities(lab) == before


def test_a_release_of_another_name_has_to_say_that_it_takes_the_definition_over(
    release: Release, cluster: EmbeddedCluster, system: str
) -> None:
    release.install()
    release.uninstall()
    other = Release(cluster, system, {"fullnameOverride": "other"}, name="other")
    with pytest.raises(ClusterError, match="invalid ownership metadata"):
        other.install()
    try:
        other.install("--take-ownership")
    finally:
        other.uninstall()
    assert exists(cluster.api, DEFINITION)


def test_a_definition_that_was_applied_by_hand_is_taken_over_or_left_alone(
    release: Release, cluster: EmbeddedCluster
) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(CHART.parents[1] / "crds" / "pddeployments.yaml"))
    release.values["crds"] = {"install": False}
    assert "not part of this release" in release.install()
    release.uninstall()
    assert "helm.sh/resource-policy" not in json.dumps(cluster.api.get(DEFINITION)["metadata"])
    release.values["crds"] = {"install": True}
    release.install("--take-ownership")
    assert cluster.api.get(DEFINITION)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_who_wants_it_so_loses_the_definition_with_the_release(release: Release, cluster: EmbeddedCluster) -> None:
    release.values["crds"] = {"keep": False}
    assert "CAREFUL: crds.keep=false" in release.install()
    release.uninstall()
    eventually("definition is gone", lambda: not exists(cluster.api, DEFINITION))


def test_a_namespace_of_the_operator_can_be_deleted(release: Release, cluster: EmbeddedCluster, system: str) -> None:
    """Nothing in it waits for a program that is gone; what is of the cluster stays and is removed by helm elsewhere."""
    release.install()
    cluster.api.request("DELETE", f"/api/v1/namespaces/{system}")
    eventually("namespace is gone", lambda: not exists(cluster.api, f"/api/v1/namespaces/{system}"))
    assert exists(cluster.api, DEFINITION)
    make_namespace(cluster.api, system, RESTRICTED)
    # Helm's record went with the namespace, so the cluster's own objects are adopted by name.
    release.install()


def test_values_that_the_server_can_not_know_are_refused_before_anything_is_made(
    release: Release, cluster: EmbeddedCluster
) -> None:
    release.values["image"] = {**release.values["image"], "tagg": "x"}
    with pytest.raises(ClusterError, match="additional properties 'tagg' not allowed"):
        release.install()
    with pytest.raises(ApiError):
        cluster.api.get(DEFINITION)
