"""The full cluster: real pods from our images on nodes that look like p5en.48xlarge."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.cluster import images
from pdctl.core.cluster.nodes import NODE_TYPES
from pdctl.core.cluster.oci import Entry, Image, pack_archive
from pdctl.shell.cluster import network
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.images import host_architecture, observe_host
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.start import Wishes
from support.clusters import cluster_for_tests, eventually, exists, make_namespace

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LOCKED_DOWN = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
PDCTL = (sys.executable, "-m", "pdctl", "cluster")
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).status)"
P5EN = {
    "cpu": "96",
    "memory": "400Gi",
    "hugepages-2Mi": "5120Mi",
    "nvidia.com/gpu": "8",
    "vpc.amazonaws.com/efa": "16",
}


def workload(kind: str, name: str, container: dict[str, Any], **pod: Any) -> dict[str, Any]:
    """A Deployment or StatefulSet of one replica."""
    labels = {"app": name}
    spec: dict[str, Any] = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", **container}], **pod},
        },
    }
    if kind == "StatefulSet":
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def stand_in(**more: Any) -> dict[str, Any]:
    """A container that vLLM's command line starts and that answers its health check."""
    return {
        "image": images.STAND_IN_IMAGE,
        "command": ["vllm", "serve", "some/model", "--port", "8000"],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        **more,
    }


def service(name: str, *, headless: bool = False) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": spec | ({"clusterIP": "None"} if headless else {}),
    }


class Space:
    """A namespace of one test."""

    def __init__(self, cluster: EmbeddedCluster, name: str, labels: dict[str, str] | None = None) -> None:
        self.cluster, self.name = cluster, name
        make_namespace(cluster.api, name, labels)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=stdin)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create objects and wait until the workloads among them are rolled out."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
        for one in objects:
            if one["kind"] in ("Deployment", "StatefulSet"):
                self.kubectl("rollout", "status", f"{one['kind']}/{one['metadata']['name']}", "--timeout=120s")

    def pods(self, app: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", "pods", "-l", f"app={app}", "-o", "json"))["items"]
        return found


@pytest.fixture
def space(full_cluster: EmbeddedCluster, namespace: str) -> Iterator[Space]:
    made = Space(full_cluster, namespace)
    yield made
    full_cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def strict_space(full_cluster: EmbeddedCluster, namespace: str) -> Iterator[Space]:
    made = Space(full_cluster, namespace, RESTRICTED)
    yield made
    full_cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_restricted_deployment_answers_by_cluster_ip_and_by_name(strict_space: Space):
    container = {
        "image": images.ROUTER_IMAGE,
        "command": ["python", "-m", "http.server", "8000", "--directory", "/usr/share"],
        "securityContext": LOCKED_DOWN,
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    space, cluster = strict_space, strict_space.cluster
    space.apply(workload("Deployment", "web", container), service("web"))
    [pod] = space.pods("web")
    assert "hostPath" not in json.dumps(pod)
    assert space.kubectl("exec", "deploy/web", "--", "id", "--user").strip() == images.NON_ROOT.partition(":")[0]
    with pytest.raises(ClusterError, match="Read-only file system"):
        space.kubectl("exec", "deploy/web", "--", "touch", "/x")
    address = space.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    fetch = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}"]
    inside = cluster.inside([*fetch, f"http://{address}/"])
    # kube-proxy hears of a ready pod a little after everybody else.
    eventually("the Service", lambda: cluster.run(inside, check=False) == "200")
    # By name, too, as users do; and only the command sees the cluster's name server.
    machines = Path("/etc/resolv.conf").read_text(encoding="utf-8")
    by_name = [*PDCTL, "exec", "--name", cluster.name, *fetch, f"http://web.{space.name}.svc/"]
    assert cluster.run(by_name) == "200"
    assert Path("/etc/resolv.conf").read_text(encoding="utf-8") == machines
    # Also a pod that asks for itself through its Service.
    for url in (f"http://{address}/", f"http://web.{space.name}.svc/", "http://web/"):
        assert space.kubectl("exec", "deploy/web", "--", *fetch, url) == "200"


def test_the_operators_and_routers_programs_are_there(space: Space):
    for image, program in ((images.ROUTER_IMAGE, "pd-router"), (images.OPERATOR_IMAGE, "pd-operator")):
        name = program.replace("-", "")
        container = {"name": "main", "image": image, "command": [program, "--help"], "securityContext": LOCKED_DOWN}
        pod = {"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        space.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))
        space.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=120s")
        assert "usage" in space.kubectl("logs", name).lower()


def test_a_pods_own_mounts_hide_nothing_of_the_machine_and_the_other_way_round(space: Space):
    """A checkout may lie below /tmp, where pods like to mount an empty folder."""
    above, inside = str(Path(sys.prefix).parent), f"{sys.prefix}/share/inside"
    Path(inside).mkdir(parents=True, exist_ok=True)
    container = {
        "name": "main",
        "image": images.ROUTER_IMAGE,
        "command": ["sh", "-c", f"pd-router --help && touch {above}/a {inside}/b && echo both"],
        "volumeMounts": [{"name": "above", "mountPath": above}, {"name": "inside", "mountPath": inside}],
        "securityContext": LOCKED_DOWN,
    }
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "above", "emptyDir": {}}, {"name": "inside", "emptyDir": {}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "layers"}, "spec": spec}
    space.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    space.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/layers", "--timeout=120s")
    assert "both" in space.kubectl("logs", "layers")
    assert not Path(inside, "b").exists()


def test_two_p5en_pods_run_on_two_nodes_and_reach_each_other(space: Space):
    apart = {"labelSelector": {"matchLabels": {"app": "pair"}}, "topologyKey": "kubernetes.io/hostname"}
    wanted = workload(
        "StatefulSet",
        "pair",
        stand_in(
            resources={"limits": P5EN},
            securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
            volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}],
        ),
        nodeSelector={"node.kubernetes.io/instance-type": "p5en.48xlarge"},
        affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "120Gi"}}],
    )
    wanted["spec"]["replicas"] = 2
    space.apply(service("pair", headless=True), wanted)
    pods = space.pods("pair")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-0", "node-1"}
    devices = space.kubectl("exec", "pair-0", "--", "printenv", "FAKE_NVIDIA_COM_GPU", "FAKE_VPC_AMAZONAWS_COM_EFA")
    assert [len(line.split(",")) for line in devices.splitlines()] == [8, 16]
    for target in (pods[1]["status"]["podIP"], "pair-1.pair"):
        answer = space.kubectl("exec", "pair-0", "--", "python", "-c", FETCH, f"http://{target}:8000/health")
        assert answer.strip() == "200"
    assert "called with ['serve', 'some/model', '--port', '8000']" in space.kubectl("logs", "pair-0")
    # All devices are taken, so one more pod has to wait, and the scheduler says for what.
    space.kubectl("scale", "statefulset/pair", "--replicas=3")
    eventually(
        "unschedulable", lambda: "Insufficient nvidia.com/gpu" in json.dumps(space.pods("pair")[-1].get("status", {}))
    )
    space.kubectl("delete", "statefulset/pair", "--cascade=foreground", "--timeout=60s")
    assert space.pods("pair") == []


def test_the_connector_is_handed_over_and_the_engine_has_vllm(space: Space):
    shared = {"name": "connector", "mountPath": "/opt/pd-connector"}
    copy = {
        "name": "connector",
        "image": images.CONNECTOR_IMAGE,
        "command": ["cp", "-r", f"{images.PLUGIN_FOLDER}/.", shared["mountPath"]],
        "volumeMounts": [shared],
    }
    tell = "import importlib.util as u; print(u.find_spec('pd_connector').origin, u.find_spec('vllm').origin)"
    look = {
        "name": "look",
        "image": images.ENGINE_IMAGE,
        "command": ["python", "-c", tell],
        "env": [{"name": "PYTHONPATH", "value": shared["mountPath"]}],
        "volumeMounts": [shared],
    }
    volumes = [{"name": "connector", "emptyDir": {}}]
    space.apply(workload("StatefulSet", "engine", stand_in(), initContainers=[copy, look], volumes=volumes))
    plugin, vllm = space.kubectl("logs", "engine-0", "-c", "look").split()
    assert plugin == "/opt/pd-connector/pd_connector/__init__.py"
    assert vllm.endswith("/vllm/__init__.py")


def test_a_crashing_container_is_restarted_and_its_end_is_reported(space: Space):
    container = {
        "image": images.STAND_IN_IMAGE,
        "command": ["sh", "-c", "echo out of luck | tee /dev/termination-log; exit 3"],
    }
    wanted = workload("Deployment", "crash", container)
    space.kubectl("apply", "-f", "-", stdin=json.dumps(wanted))

    def ended() -> dict[str, Any] | None:
        statuses = [status for pod in space.pods("crash") for status in pod["status"].get("containerStatuses", [])]
        last = [status["lastState"].get("terminated") for status in statuses if status["restartCount"]]
        return last[0] if last else None

    end = eventually("a restart", ended)
    assert (end["exitCode"], end["message"]) == (3, "out of luck\n")


def test_an_image_of_the_users_own_is_loaded_and_keeps_its_own_root(space: Space, tmp_path: Path):
    entries = tuple(entry for entry in images.base_entries(observe_host()) if entry.path != images.MOUNT_LIST)
    pause = Path(space.cluster.status()["programs"]) / "pause"
    image = Image("localhost/own:1", (*entries, Entry("own", 0o755, pause.read_bytes())), entrypoint=("/own",))
    archive = tmp_path / "own.tar"
    archive.write_bytes(pack_archive([image], host_architecture()))
    space.cluster.load_image(archive)
    space.apply(workload("Deployment", "own", {"image": "localhost/own:1"}))
    with pytest.raises(ClusterError, match="no such file or directory"):
        space.kubectl("exec", "deploy/own", "--", "/usr/bin/env")


def test_there_is_no_way_out(space: Space):
    space.apply(workload("Deployment", "inmate", stand_in()))
    with pytest.raises(ClusterError, match=r"(unreachable|Failed to connect|Couldn't connect)"):
        space.kubectl("exec", "deploy/inmate", "--", "curl", "-sS", "-m", "20", "http://192.0.2.1/")
    with pytest.raises(ClusterError, match="Could not resolve host"):
        space.kubectl("exec", "deploy/inmate", "--", "curl", "-sS", "-m", "20", "http://example.com/")


def test_nothing_is_left_of_a_cluster_with_pods(namespace: str):
    with cluster_for_tests("gone", Wishes()) as cluster:
        space = Space(cluster, namespace)
        space.apply(workload("Deployment", "busy", stand_in()))
        assert exists(cluster.api, "/api/v1/nodes/node-0")
        inside = network.processes_in(cluster.layout.netns())
    assert cluster.leftovers() == []
    eventually("processes gone", lambda: not [pid for pid in inside if Path(f"/proc/{pid}").exists()])


def test_the_nodes_look_like_their_type(full_cluster: EmbeddedCluster):
    wanted = NODE_TYPES["p5en.48xlarge"]
    for name in wanted.names:
        node = full_cluster.api.get(f"/api/v1/nodes/{name}")
        assert wanted.labels.items() <= node["metadata"]["labels"].items()
        capacity = {key: node["status"]["capacity"][key] for key in ("cpu", "hugepages-2Mi", "nvidia.com/gpu")}
        assert capacity == {"cpu": "192", "hugepages-2Mi": "10Gi", "nvidia.com/gpu": "8"}
