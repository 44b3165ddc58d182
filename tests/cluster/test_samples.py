"""The p5en sample on two nodes that look like p5en.48xlarge, tainted as such nodes are: accepted, scheduled, started.

The pods are read back from the API server and from inside, and compared field by field with what EFA, the device
plugins and vLLM need. The image is a stand-in that can serve, so the sample also answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdctl.core.cluster.nodes import NODE_TYPES
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import PATIENCE, Serving
from support.cluster_serving_image import FAKE_IMAGE
from support.clusters import eventually
from support.pddeployments import edited, example

FILE, NAME = "qwen3-32b-p5en", "qwen3-32b"
ROLES = ("prefill", "decode")
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
NO_SCHEDULE = {"operator": "Exists", "effect": "NoSchedule"}
DEVICES = {GPU: "8", EFA: "16", "hugepages-2Mi": "5Gi", "memory": "400Gi"}

Pod = dict[str, Any]


class Sample:
    """The running sample."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        # There are no other nodes here that the router could go to.
        tolerations = [{"key": key, **NO_SCHEDULE} for key in (GPU, EFA)]
        edits = ("spec.engine.image", FAKE_IMAGE), ("spec.router.pod.tolerations", tolerations)
        raw = edited(example(FILE), *edits)
        self.serving.apply(raw)
        self.serving.until_settled(NAME)
        self.pods: dict[str, Pod] = {}
        for role in ROLES:
            [self.pods[role]] = self.serving.pods(NAME, role)

    def engine(self, role: str) -> dict[str, Any]:
        """The engine's container as the API server has it."""
        [container] = self.pods[role]["spec"]["containers"]
        return dict(container)

    def run(self, role: str, *argv: str) -> str:
        """A command in the engine's container."""
        return self.serving.kubectl("exec", f"{NAME}-{role}-0", "-c", "engine", "--", *argv)

    def environment(self, role: str) -> dict[str, str]:
        """What the engine's process got."""
        lines = self.run(role, "env").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture(scope="module")
def sample(full_cluster: EmbeddedCluster) -> Iterator[Sample]:
    with Serving(full_cluster, "sample") as serving, tainted(full_cluster):
        yield Sample(serving)


@contextmanager
def tainted(cluster: EmbeddedCluster) -> Iterator[None]:
    """Nodes that take only pods which tolerate what device plugins' nodes are tainted with."""
    keys = (GPU, EFA)
    cluster.kubectl("taint", "node", "--all", "--overwrite", *(f"{key}=present:NoSchedule" for key in keys))
    try:
        yield
    finally:
        cluster.kubectl("taint", "node", "--all", *(f"{key}-" for key in keys))


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_prefill_and_decode_are_on_different_hosts_of_one_zone(sample: Sample) -> None:
    names = {role: pod["spec"]["nodeName"] for role, pod in sample.pods.items()}
    assert sorted(names.values()) == sorted(NODE_TYPES["p5en.48xlarge"].names)
    nodes = [sample.serving.api.get(f"/api/v1/nodes/{name}")["metadata"]["labels"] for name in names.values()]
    assert {labels["node.kubernetes.io/instance-type"] for labels in nodes} == {"p5en.48xlarge"}
    assert len({labels["topology.kubernetes.io/zone"] for labels in nodes}) == 1


def test_an_engine_has_all_devices_and_as_much_in_limits_as_in_requests(sample: Sample, role: str) -> None:
    resources = sample.engine(role)["resources"]
    assert resources["limits"] == DEVICES
    assert resources["requests"] == {**DEVICES, "cpu": "64", "ephemeral-storage": "100Gi"}
    found = sample.environment(role)
    assert len(set(found["FAKE_NVIDIA_COM_GPU"].split(","))) == 8
    assert len(set(found["FAKE_VPC_AMAZONAWS_COM_EFA"].split(","))) == 16


def test_shared_memory_is_as_large_as_said(sample: Sample, role: str) -> None:
    [volume] = [one for one in sample.pods[role]["spec"]["volumes"] if one["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "120Gi"}
    mounts = {one["name"]: one["mountPath"] for one in sample.engine(role)["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"
    kind, kib = sample.run(role, "df", "--output=fstype,size", "/dev/shm").splitlines()[1].split()
    assert (kind, int(kib)) == ("tmpfs", 120 * 1024 * 1024)


ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_USE_HUGE_PAGE": "1",
    "NIXL_LOG_LEVEL": "INFO",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    "PYTHONPATH": "/opt/pd-connector",
}
NEVER = ("NIXL_BACKEND", "VLLM_NIXL_BACKEND", "NCCL_SOCKET_IFNAME", "UCX_TLS", "PYTHONHASHSEED", "VLLM_PORT")
"""Without effect in vLLM, or harmful on EFA."""


@pytest.mark.parametrize(("name", "value"), ENVIRONMENT.items())
def test_an_engine_has_the_variable(sample: Sample, role: str, name: str, value: str) -> None:
    assert sample.environment(role)[name] == value


def test_an_engine_has_no_variable_that_misleads(sample: Sample, role: str) -> None:
    found = sample.environment(role)
    assert not set(NEVER) & found.keys()
    # Service links are off: nothing but the API server's own.
    assert {name for name in found if name.endswith("_SERVICE_HOST")} == {"KUBERNETES_SERVICE_HOST"}


def test_peers_are_told_the_pods_own_address(sample: Sample, role: str) -> None:
    assert sample.environment(role)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == sample.pods[role]["status"]["podIP"]
    assert "hostNetwork" not in sample.pods[role]["spec"]
    ports = [(one["name"], one["containerPort"]) for one in sample.engine(role)["ports"]]
    assert ports == [("http", 8000), ("nixl", 5600)]


def test_the_command_is_vllm_itself_with_libfabric(sample: Sample, role: str) -> None:
    command = sample.engine(role)["command"]
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen3-32B"]
    flags = dict(itertools.pairwise(command))
    assert (flags["--tensor-parallel-size"], flags["--max-model-len"]) == ("8", "32768")
    config = json.loads(flags["--kv-transfer-config"])
    assert config["kv_buffer_device"] == "cuda"
    assert config["kv_load_failure_policy"] == ("recompute" if role == "prefill" else "fail")
    assert config["kv_connector_extra_config"]["pd_retention"] == "Unpinned"
    extra = config["kv_connector_extra_config"]
    assert (extra["backends"], extra["bidirectional_kv_xfer"]) == (["LIBFABRIC"], True)
    # No shell in between: the engine is the container's first process.
    assert "support.cluster_serving_engine" in sample.run(role, "cat", "/proc/1/cmdline")


def test_probes_let_a_model_load_for_an_hour(sample: Sample, role: str) -> None:
    engine = sample.engine(role)
    startup, liveness, readiness = (engine[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    for probe in (startup, liveness, readiness):
        assert probe["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTP"}
    patience = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience >= 3600
    assert sample.environment(role)["VLLM_ENGINE_READY_TIMEOUT_S"] == str(patience)
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 300
    assert readiness["periodSeconds"] * readiness["failureThreshold"] >= 60


def test_an_ending_engine_has_time_for_all_that_it_still_owes(sample: Sample, role: str) -> None:
    engine = sample.engine(role)
    sleep = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    command = engine["command"]
    shutdown = int(command[command.index("--shutdown-timeout") + 1])
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert shutdown > 0
    assert sample.pods[role]["spec"]["terminationGracePeriodSeconds"] > sleep + shutdown
    # Decode engines may read from P for a lease after its last answer.
    least = config["kv_connector_extra_config"]["kv_lease_duration"] if role == "prefill" else 15
    assert sleep >= least


def test_an_engine_is_root_with_ipc_lock_and_no_more(sample: Sample, role: str) -> None:
    assert sample.engine(role)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
        "runAsUser": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert sample.run(role, "id", "--user").strip() == "0"
    status = sample.run(role, "cat", "/proc/self/status")
    [effective] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff")]
    ipc_lock, sys_admin = 14, 21
    assert effective >> ipc_lock & 1
    assert not effective >> sys_admin & 1


def test_placement_is_one_zone_other_host_near_each_other(sample: Sample, role: str) -> None:
    spec = sample.pods[role]["spec"]
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    other = {"prefill": "decode", "decode": "prefill"}[role]
    engines = {
        "matchLabels": {"pdserving.dev/pddeployment": NAME},
        "matchExpressions": [{"key": "pdserving.dev/role", "operator": "In", "values": ["prefill", "decode"]}],
    }
    them = {"matchLabels": {"pdserving.dev/pddeployment": NAME, "pdserving.dev/role": other}}
    required, preferred = (
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
    )
    near = {"labelSelector": engines, "topologyKey": "topology.k8s.aws/network-node-layer-3"}
    assert spec["affinity"] == {
        "podAffinity": {
            required: [{"labelSelector": engines, "topologyKey": "topology.kubernetes.io/zone"}],
            preferred: [{"weight": 100, "podAffinityTerm": near}],
        },
        "podAntiAffinity": {required: [{"labelSelector": them, "topologyKey": "kubernetes.io/hostname"}]},
    }
    # Over hosts only: spreading over zones would part what EFA must reach.
    assert [one["topologyKey"] for one in spec["topologySpreadConstraints"]] == ["kubernetes.io/hostname"]
    for key in (GPU, EFA):
        assert {"key": key, **NO_SCHEDULE} in spec["tolerations"]


def test_the_rest_of_the_pod(sample: Sample, role: str) -> None:
    pod = sample.pods[role]
    assert pod["spec"]["enableServiceLinks"] is False
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert "hostPath" not in json.dumps(pod["spec"]["volumes"])
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["connector", "selftest"]
    assert all(one["state"]["terminated"]["exitCode"] == 0 for one in pod["status"]["initContainerStatuses"])


def test_both_roles_are_one_generation(sample: Sample) -> None:
    labels = [pod["metadata"]["labels"] for pod in sample.pods.values()]
    assert len({one["pdserving.dev/generation"] for one in labels}) == 1
    assert [one["pdserving.dev/role"] for one in labels] == list(ROLES)


def test_the_sample_answers_and_reuses(sample: Sample) -> None:
    url = sample.serving.service_url(NAME)
    sample.serving.run_client("-m", "support.cluster_serving_client", "--url", url, "--turns", "2", "--model", "Qwen")
    assert sample.serving.funnel("pulled", NAME) == 1
    sample.serving.until_condition(NAME, "TransfersFlowing", "True")
    assert sample.serving.judgement()["violations"] == []


def test_an_engine_too_many_is_named_with_what_it_lacks(sample: Sample) -> None:
    serving = sample.serving
    before = serving.roles(NAME)
    serving.patch(NAME, {"decode": {"replicas": 2}})

    def look() -> dict[str, Any] | None:
        found = serving.condition(NAME, "Progressing")
        return found if found.get("reason") == "Unschedulable" else None

    message = eventually("the condition says it", look, PATIENCE)["message"]
    assert serving.condition(NAME, "Ready")["status"] == "True", "the other engines serve"
    assert f"{NAME}-decode-1" in message
    assert f"Insufficient {EFA}" in message or f"Insufficient {GPU}" in message
    serving.patch(NAME, {"decode": {"replicas": 1}})
    serving.until_settled(NAME)
    after = serving.roles(NAME)
    assert {role: after[role].pods for role in after} == {role: before[role].pods for role in before}
