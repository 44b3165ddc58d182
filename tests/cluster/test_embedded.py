"""The light cluster: a real API server with its controllers, apart from the machine and from other clusters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.core.cluster.binaries import KUBERNETES_VERSION
from pdctl.shell.cluster.api import Api, ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster, known_clusters
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.start import Wishes
from support.clusters import cluster_for_tests, eventually, exists, make_namespace

SETTINGS = "/api/v1/namespaces/{}/configmaps"


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[EmbeddedCluster]:
    """A second one beside it, with short watches."""
    with cluster_for_tests("other", Wishes(light=True, watch_seconds=2)) as cluster:
        yield cluster


def test_the_version_is_the_pinned_one(light_cluster: EmbeddedCluster):
    assert light_cluster.api.get("/version")["gitVersion"] == f"v{KUBERNETES_VERSION}"
    assert f"Client Version: v{KUBERNETES_VERSION}" in light_cluster.kubectl("version")


def test_children_go_with_their_owner(light_cluster: EmbeddedCluster, namespace: str):
    api, settings = light_cluster.api, SETTINGS.format(namespace)
    make_namespace(api, namespace)
    owner = api.request("POST", settings, {"metadata": {"name": "owner"}})["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["uid"]}
    api.request("POST", settings, {"metadata": {"name": "child", "ownerReferences": [reference]}})
    api.request("DELETE", f"{settings}/owner")
    eventually("child collected", lambda: not exists(api, f"{settings}/child"))


def test_a_service_account_may_do_what_its_role_says(light_cluster: EmbeddedCluster, namespace: str):
    make_namespace(light_cluster.api, namespace)
    kubectl = light_cluster.kubectl
    kubectl("-n", namespace, "create", "role", "reader", "--verb=get,list", "--resource=configmaps")
    kubectl(
        "-n", namespace, "create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:default"
    )
    token = kubectl("-n", namespace, "create", "token", "default").strip()
    # Without the administrator's certificate, which would win over a token.
    as_account = ["--kubeconfig=/dev/null", f"--server={light_cluster.api.server}", f"--token={token}"]
    as_account += [f"--certificate-authority={light_cluster.layout.pki / 'ca.crt'}", "-n", namespace]
    assert "kube-root-ca.crt" in kubectl(*as_account, "get", "configmaps")
    with pytest.raises(ClusterError, match='cannot list resource "secrets"'):
        kubectl(*as_account, "get", "secrets")


def test_the_audit_log_tells_who_did_what(light_cluster: EmbeddedCluster, namespace: str):
    api, settings = light_cluster.api, SETTINGS.format(namespace)
    make_namespace(api, namespace)
    position = light_cluster.audit_position()
    api.request("POST", settings, {"metadata": {"name": "one"}})
    api.request("POST", f"{settings}?dryRun=All", {"metadata": {"name": "two"}})
    api.get(f"{settings}/one")
    with pytest.raises(ApiError, match="404"):
        api.request("DELETE", f"{settings}/three")
    events = [event for event in light_cluster.audit_events(position) if event.namespace == namespace]
    mine = [event for event in events if event.user == "admin" and event.answered]
    assert [(event.verb, event.resource, event.name, event.code) for event in mine] == [
        ("create", "configmaps", "one", 201),
        ("create", "configmaps", "two", 201),
        ("get", "configmaps", "one", 200),
        ("delete", "configmaps", "three", 404),
    ]
    assert [event.is_write for event in mine] == [True, False, False, True]


def test_pod_security_is_enforced(light_cluster: EmbeddedCluster, namespace: str):
    make_namespace(light_cluster.api, namespace, {"pod-security.kubernetes.io/enforce": "restricted"})
    container = {"name": "c", "image": "localhost/none:1", "securityContext": {"privileged": True}}
    with pytest.raises(ApiError, match=r'403: .*violates PodSecurity "restricted'):
        light_cluster.api.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/pods",
            {"metadata": {"name": "p"}, "spec": {"containers": [container]}},
        )


def test_helm_installs_into_it(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path):
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: tried\nversion: 0.1.0\n")
    (chart / "templates" / "one.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-made}\n"
    )
    light_cluster.helm("install", "out", str(chart), "--namespace", namespace, "--create-namespace")
    assert exists(light_cluster.api, f"{SETTINGS.format(namespace)}/out-made")


def test_two_side_by_side_know_nothing_of_each_other(
    light_cluster: EmbeddedCluster, other_cluster: EmbeddedCluster, namespace: str
):
    make_namespace(light_cluster.api, namespace)
    assert not exists(other_cluster.api, f"/api/v1/namespaces/{namespace}")
    assert {light_cluster.name, other_cluster.name} <= set(known_clusters())
    # The authority of one is unknown to the other.
    address = ["--kubeconfig", str(light_cluster.kubeconfig), "--server", other_cluster.api.server]
    with pytest.raises(ClusterError, match="certificate"):
        other_cluster.kubectl(*address, "get", "namespaces")


def test_watches_end_early_where_asked(other_cluster: EmbeddedCluster):
    # Without the setting a watch lives for half an hour; the client's time limit is far below that.
    events = Api(other_cluster.kubeconfig, timeout=100).watch("/api/v1/namespaces?watch=true")
    assert {"ADDED"} == {event["type"] for event in events}


def test_its_network_is_its_own(light_cluster: EmbeddedCluster):
    addresses = json.loads(light_cluster.run(light_cluster.inside(["ip", "-json", "address"])))
    assert [one["ifname"] for one in addresses] == ["lo"]
    assert light_cluster.run(light_cluster.inside(["ip", "route"])) == ""
    assert light_cluster.run(light_cluster.inside(["kubectl", "get", "--raw", "/readyz"])) == "ok"
