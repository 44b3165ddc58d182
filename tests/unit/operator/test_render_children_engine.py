"""The engines' pods: the p5en profile field by field, the other profiles, and what users may change.

The p5en table repeats literal values on purpose: it is what an expert would look for on such a machine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.choices import Role
from pd_operator.core.render_children import RenderContext, cluster_generation, render_children
from pd_operator.core.render_engine import EngineEndpoint, render_engine
from pd_operator.core.render_engine_pod import termination_grace_seconds
from support.pddeployments import deployment, example, flag_table

Edit = tuple[str, Any]

IMAGE: Edit = ("spec.engine.image", "r.example/vllm:v0.32.0")
CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1")
P5EN = example("qwen3-32b-p5en")
CPU = example("cpu-tiny")
BOTH = pytest.mark.parametrize("role", ["prefill", "decode"])


def template(role: str, *edits: Edit, base: dict[str, Any] | None = None) -> dict[str, Any]:
    value = deployment(*([] if base else [IMAGE]), *edits, base=base)
    [found] = [
        child
        for child in render_children(value, CONTEXT)
        if child["kind"] == "StatefulSet" and child["metadata"]["labels"]["pdserving.dev/role"] == role
    ]
    result = found["spec"]["template"]
    assert isinstance(result, dict)
    return result


def pod(role: str, *edits: Edit, base: dict[str, Any] | None = None) -> dict[str, Any]:
    found = template(role, *edits, base=base)["spec"]
    assert isinstance(found, dict)
    return found


def engine(role: str, *edits: Edit, base: dict[str, Any] | None = None) -> dict[str, Any]:
    [found] = pod(role, *edits, base=base)["containers"]
    assert isinstance(found, dict)
    return found


def plain_env(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["mountPath"]: one for one in container["volumeMounts"]}


def volumes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found["volumes"]}


# --- p5en with EFA -------------------------------------------------------------------------------------------------


@BOTH
def test_p5en_resources(role: str) -> None:
    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi", "memory": "400Gi"}
    asked = {**devices, "cpu": "64", "ephemeral-storage": "100Gi"}
    assert engine(role, base=P5EN)["resources"] == {"requests": asked, "limits": devices}


def test_a_node_has_room_for_the_folders_on_its_disk() -> None:
    edits: list[Edit] = [
        ("spec.model.source.emptyDir", {"sizeLimitGiB": 100}),
        ("spec.engine.volumes", [
            {"name": "kernels", "mountPath": "/kernels", "emptyDir": {"sizeLimitGiB": 20}},
            {"name": "free", "mountPath": "/free", "emptyDir": {}},
        ]),
    ]  # fmt: skip
    for container in (engine("decode", *edits), pod("prefill", *edits)["initContainers"][-1]):
        assert container["resources"]["requests"]["ephemeral-storage"] == "120Gi"
        assert "ephemeral-storage" not in container["resources"]["limits"]
    more = ("spec.decode.resources", {"requests": {"ephemeral-storage": "1Ti"}})
    assert engine("decode", *edits, more)["resources"]["requests"]["ephemeral-storage"] == "1Ti"
    without = ("spec.model.source", {"emptyDir": {}})
    assert "ephemeral-storage" not in engine("decode", without)["resources"]["requests"]


@BOTH
def test_p5en_shared_memory(role: str) -> None:
    assert volumes(pod(role, base=P5EN))["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "120Gi"}
    assert mounts(engine(role, base=P5EN))["/dev/shm"]["name"] == "shm"


@BOTH
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FI_PROVIDER", "efa"),
        ("FI_EFA_USE_DEVICE_RDMA", "1"),
        ("FI_EFA_USE_HUGE_PAGE", "1"),
        ("NIXL_LOG_LEVEL", "INFO"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "$(POD_IP)"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "7200"),
        ("PYTHONPATH", "/opt/pd-connector"),
    ],
)
def test_p5en_environment(role: str, variable: str, value: str) -> None:
    assert plain_env(engine(role, base=P5EN))[variable] == value


@BOTH
@pytest.mark.parametrize("variable", ["FI_EFA_FORK_SAFE", "NCCL_SOCKET_IFNAME", "NIXL_BACKEND", "VLLM_NIXL_BACKEND"])
def test_p5en_variables_that_do_harm_or_nothing(role: str, variable: str) -> None:
    assert variable not in plain_env(engine(role, base=P5EN))


@BOTH
def test_p5en_nodes(role: str) -> None:
    found = pod(role, base=P5EN)
    assert found["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    assert found["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"},
    ]


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_p5en_one_zone_and_separate_hosts(role: str, other: str) -> None:
    affinity = pod(role, base=P5EN)["affinity"]
    [zone] = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert zone["topologyKey"] == "topology.kubernetes.io/zone"
    assert zone["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]
    [near] = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "topology.k8s.aws/network-node-layer-3"
    [host] = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert host["topologyKey"] == "kubernetes.io/hostname"
    assert host["labelSelector"]["matchLabels"]["pdserving.dev/role"] == other


@BOTH
def test_p5en_engines_of_a_role_spread_over_hosts_not_over_zones(role: str) -> None:
    [spread] = pod(role, base=P5EN)["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


@BOTH
def test_p5en_memory_may_be_pinned_without_privileges(role: str) -> None:
    for container in (engine(role, base=P5EN), pod(role, base=P5EN)["initContainers"][-1]):
        assert container["securityContext"] == {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    assert "hostNetwork" not in pod(role, base=P5EN)
    assert "hostIPC" not in pod(role, base=P5EN)


@BOTH
def test_p5en_a_cheaper_node_is_no_reason_to_load_a_model_again(role: str) -> None:
    assert template(role, base=P5EN)["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


@BOTH
def test_p5en_probes(role: str) -> None:
    found = engine(role, base=P5EN)
    startup, ready, alive = found["startupProbe"], found["readinessProbe"], found["livenessProbe"]
    for probe in (startup, ready, alive):
        assert probe["httpGet"] == {"path": "/health", "port": "http"}
        assert probe["timeoutSeconds"] >= 10
    assert startup["periodSeconds"] * startup["failureThreshold"] == 7200
    assert alive["periodSeconds"] * alive["failureThreshold"] == 300
    assert ready["failureThreshold"] > 3


@pytest.mark.parametrize(("role", "sleep", "grace"), [("prefill", 30, 180), ("decode", 15, 165)])
def test_p5en_end(role: str, sleep: int, grace: int) -> None:
    assert engine(role, base=P5EN)["lifecycle"] == {"preStop": {"sleep": {"seconds": sleep}}}
    assert pod(role, base=P5EN)["terminationGracePeriodSeconds"] == grace
    assert flag_table(tuple(engine(role, base=P5EN)["command"]))["--shutdown-timeout"] == ["120"]


@BOTH
@pytest.mark.parametrize(("width", "efa", "cpu"), [(1, "2", "8"), (2, "4", "16"), (4, "8", "32")])
def test_p5en_a_narrower_engine_takes_its_share(role: str, width: int, efa: str, cpu: str) -> None:
    edits: list[Edit] = [("spec.prefill.tensorParallelSize", width), ("spec.decode.tensorParallelSize", width)]
    resources = engine(role, *edits, base=P5EN)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == str(width)
    assert resources["limits"]["vpc.amazonaws.com/efa"] == efa
    assert resources["requests"]["cpu"] == cpu


# --- every engine --------------------------------------------------------------------------------------------------


@BOTH
def test_the_command_is_the_renderers_and_no_shell_stands_before_it(role: str) -> None:
    value = deployment(base=P5EN)
    process = render_engine(value, Role(role), EngineEndpoint("0.0.0.0", 8000, "$(POD_IP)", 5600))
    assert engine(role, base=P5EN)["command"] == list(process.argv)
    assert engine(role, base=P5EN)["command"][0] == "vllm"
    assert "args" not in engine(role, base=P5EN)


@BOTH
def test_the_pods_address_comes_before_what_refers_to_it(role: str) -> None:
    first = engine(role)["env"][0]
    assert first["name"] == "POD_IP"
    assert first["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@BOTH
def test_labels_carry_the_generation(role: str) -> None:
    labels = template(role)["metadata"]["labels"]
    assert labels["pdserving.dev/generation"] == cluster_generation(deployment(IMAGE), CONTEXT)
    assert labels["pdserving.dev/role"] == role


@BOTH
def test_ports(role: str) -> None:
    assert engine(role)["ports"] == [
        {"name": "http", "containerPort": 8000, "protocol": "TCP"},
        {"name": "nixl", "containerPort": 5600, "protocol": "TCP"},
    ]


@BOTH
def test_nothing_of_the_cluster_leaks_in(role: str) -> None:
    assert pod(role)["enableServiceLinks"] is False
    assert pod(role)["automountServiceAccountToken"] is False


@BOTH
def test_why_it_died_is_kept(role: str) -> None:
    found = pod(role)
    for container in (*found["initContainers"], *found["containers"]):
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


@BOTH
def test_no_variable_stands_twice_since_an_api_server_merges_by_name(role: str) -> None:
    edits: list[Edit] = [
        ("spec.engine.env", [{"name": "XDG_CACHE_HOME", "value": "/x"}, {"name": "PYTHONPATH", "value": "/y"}]),
        ("spec.model.source.tokenSecretRef", {"name": "hub", "key": "token"}),
        ("spec.decode.env", [{"name": "HF_TOKEN", "secretKeyRef": {"name": "mine", "key": "t"}}]),
    ]
    names = [one["name"] for one in engine(role, *edits)["env"]]
    assert len(names) == len(set(names))
    assert plain_env(engine(role, *edits))["XDG_CACHE_HOME"] == "/x", "the user's value wins"
    assert plain_env(engine(role, *edits))["PYTHONPATH"] == "/opt/pd-connector:/y"


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_dollars_reach_the_engine_as_they_were_written(text: str) -> None:
    edits: list[Edit] = [
        ("spec.engine.extraArgs", [f"--served-by={text}$(POD_IP)$"]),
        ("spec.engine.env", [{"name": "NOTE", "value": f"$(POD_IP){text}"}]),
    ]
    found = engine("decode", *edits)
    assert kubelet_expands(found["command"][-1]) == f"--served-by={text}$(POD_IP)$"
    assert kubelet_expands(plain_env(found)["NOTE"]) == f"$(POD_IP){text}"


def test_a_users_variable_is_never_filled_in() -> None:
    env = plain_env(engine("decode", ("spec.engine.env", [{"name": "NOTE", "value": "$(POD_IP)"}])))
    assert env["NOTE"] == "$$(POD_IP)"


def kubelet_expands(text: str) -> str:
    """Kubernetes' rule: `$$` is a dollar, `$(NAME)` is a variable, any other dollar stands for itself."""
    result, at = "", 0
    while at < len(text):
        if text[at] == "$" and text[at + 1 : at + 2] == "$":
            result, at = result + "$", at + 2
        elif text[at] == "$" and text[at + 1 : at + 2] == "(" and ")" in text[at + 2 :]:
            result, at = result + "EXPANDED", text.index(")", at) + 1
        else:
            result, at = result + text[at], at + 1
    return result


# --- the connector -------------------------------------------------------------------------------------------------


@BOTH
def test_the_connector_is_brought_and_tried_before_the_engine_starts(role: str) -> None:
    bring, test = pod(role)["initContainers"]
    assert (bring["name"], bring["image"]) == ("connector", "r.example/pd-connector:1")
    assert bring["command"] == ["cp", "-R", "/plugin/.", "/opt/pd-connector"]
    assert mounts(bring) == {"/opt/pd-connector": {"name": "connector", "mountPath": "/opt/pd-connector"}}
    assert mounts(engine(role))["/opt/pd-connector"]["readOnly"] is True
    assert test["name"] == "selftest"
    assert test["image"] == engine(role)["image"]
    config = json.loads(flag_table(tuple(engine(role)["command"]))["--kv-transfer-config"][0])
    assert test["command"][:5] == ["python3", "-m", "pd_connector.selftest", "--backend", "LIBFABRIC"]
    assert json.loads(test["command"][-1]) == config


@BOTH
def test_the_self_test_sees_what_the_engine_will_see(role: str) -> None:
    _, test = pod(role, base=P5EN)["initContainers"]
    for field in ("resources", "volumeMounts", "securityContext", "image"):
        assert test[field] == engine(role, base=P5EN)[field]
    *env, report = test["env"]
    assert env == engine(role, base=P5EN)["env"]
    assert report == {"name": "PD_SELF_TEST_REPORT", "value": "/dev/termination-log"}


@BOTH
def test_the_self_test_can_be_left_out(role: str) -> None:
    [only] = pod(role, ("spec.engine.selfTest", "Disabled"))["initContainers"]
    assert only["name"] == "connector"


@BOTH
def test_the_stock_connector_needs_nothing_brought(role: str) -> None:
    found = pod(role, ("spec.kvTransfer.connector", "Stock"))
    assert "initContainers" not in found
    assert "connector" not in volumes(found)
    assert "PYTHONPATH" not in plain_env(found["containers"][0])


# --- weights and secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "volume", "read_only"),
    [
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"persistentVolumeClaim": {"claimName": "c"}}, False),
        ({"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
         {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}, True),
        ({"emptyDir": {}}, {"emptyDir": {}}, False),
        ({"emptyDir": {"sizeLimitGiB": 9}}, {"emptyDir": {"sizeLimit": "9Gi"}}, False),
        ({"hostPath": {"path": "/mnt/m"}}, {"hostPath": {"path": "/mnt/m", "type": "Directory"}}, False),
        ({"hostPath": {"path": "/mnt/m"}, "download": "Forbidden"},
         {"hostPath": {"path": "/mnt/m", "type": "Directory"}}, True),
    ],
)  # fmt: skip
def test_volume_of_the_weights(source: dict[str, Any], volume: dict[str, Any], read_only: bool) -> None:
    found = pod("decode", ("spec.model.source", source))
    assert volumes(found)["model"] == {"name": "model", **volume}
    mount = mounts(found["containers"][0])["/models"]
    assert mount.get("readOnly", False) is read_only
    assert plain_env(found["containers"][0])["HF_HOME"] == "/models"


def test_without_a_volume_the_image_has_the_weights() -> None:
    assert "model" not in volumes(pod("decode"))
    assert "HF_HOME" not in plain_env(engine("decode"))


@pytest.mark.parametrize(
    ("name", "in_pod"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("/srv/qwen", "/srv/qwen"),
        ("../build/tiny-model", "/models/tiny-model"),
        ("./qwen/", "/models/qwen"),
    ],
)
def test_a_relative_folder_lies_where_weights_are_mounted(name: str, in_pod: str) -> None:
    command = engine("decode", ("spec.model.name", name))["command"]
    assert command[2] == in_pod
    assert flag_table(tuple(command))["--served-model-name"] == [
        deployment(("spec.model.name", name)).spec.model.public_name
    ]


def test_the_hubs_token_is_a_reference() -> None:
    env = engine("decode", ("spec.model.source.tokenSecretRef", {"name": "hub", "key": "token"}))["env"]
    assert {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}},
    } in env


def test_a_users_secret_is_a_reference() -> None:
    env = engine("decode", ("spec.decode.env", [{"name": "KEY", "secretKeyRef": {"name": "s", "key": "k"}}]))["env"]
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}} in env


def test_compiled_kernels_outlive_a_crash() -> None:
    assert volumes(pod("decode"))["cache"] == {"name": "cache", "emptyDir": {}}
    assert plain_env(engine("decode"))["VLLM_CACHE_ROOT"].startswith("/var/cache/pd-engine/")


# --- other profiles and the user's wishes --------------------------------------------------------------------------


@BOTH
def test_a_pair_without_accelerators_fits_on_one_node(role: str) -> None:
    found = pod(role, base=CPU)
    assert not {"affinity", "nodeSelector", "tolerations"} & found.keys()
    assert engine(role, base=CPU)["resources"] == {"requests": {"cpu": "400m", "memory": "2Gi"}}
    assert engine(role, base=CPU)["command"][:5] == [
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/models/tiny-model",
    ]


@pytest.mark.parametrize(
    ("resources", "threads"),
    [({}, "1"), ({"requests": {"cpu": 3}}, "3"), ({"requests": {"cpu": 1}, "limits": {"cpu": "2500m"}}, "2")],
)
def test_threads_follow_the_cores_that_a_pod_may_use(resources: dict[str, Any], threads: str) -> None:
    env = plain_env(engine("decode", ("spec.decode.resources", resources), base=CPU))
    assert env["OMP_NUM_THREADS"] == threads
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_node_of_ones_own() -> None:
    edits: list[Edit] = [
        ("spec.nodeProfile", "Custom"),
        ("spec.customProfile", {"acceleratorsPerNode": 4}),
        ("spec.decode.pod.nodeSelector", {"pool": "gpu"}),
    ]
    found = pod("decode", *edits)
    assert found["nodeSelector"] == {"pool": "gpu"}
    assert found["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert found["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert "affinity" not in found


@pytest.mark.parametrize(
    ("edits", "zones", "hosts"),
    [
        ([], True, True),
        ([("spec.topology.zone", "Any")], False, True),
        ([("spec.topology.hosts", "Any")], True, False),
        ([("spec.nodeProfile", "CPU"), ("spec.topology", {"zone": "Same", "hosts": "Separate"})], True, True),
        ([("spec.nodeProfile", "CPU")], False, False),
    ],
)
def test_topology(edits: list[Edit], zones: bool, hosts: bool) -> None:
    affinity = pod("decode", *edits).get("affinity", {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    assert (required in affinity.get("podAffinity", {})) is zones
    assert (required in affinity.get("podAntiAffinity", {})) is hosts


def test_a_users_placement_is_added_to_the_profiles() -> None:
    settings: Edit = (
        "spec.decode.pod",
        {
            "labels": {"team": "x"},
            "annotations": {"karpenter.sh/do-not-disrupt": "false"},
            "nodeMatchExpressions": [{"key": "pool", "operator": "In", "values": ["a", "b"]}],
            "tolerations": [{"key": "reserved", "value": "llm", "effect": "NoExecute", "tolerationSeconds": 60}],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "serviceAccountName": "engines",
        },
    )
    found = pod("decode", settings)
    assert template("decode", settings)["metadata"]["labels"]["team"] == "x"
    assert template("decode", settings)["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "false"
    assert found["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    assert found["tolerations"][-1] == {
        "key": "reserved",
        "operator": "Equal",
        "value": "llm",
        "effect": "NoExecute",
        "tolerationSeconds": 60,
    }
    [term] = found["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "pool", "operator": "In", "values": ["a", "b"]}]
    assert (found["priorityClassName"], found["runtimeClassName"]) == ("high", "nvidia")
    assert found["serviceAccountName"] == "engines"


def test_the_profiles_selector_can_be_taken_out() -> None:
    assert "nodeSelector" not in pod("decode", ("spec.decode.pod.nodeSelector", {}))


@BOTH
def test_without_devices_there_is_no_capability_at_all(role: str) -> None:
    assert engine(role, base=CPU)["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize("profile", ["Default", "Privileged"])
def test_the_copy_of_the_plugin_needs_nothing_whatever_the_engine_may_do(profile: str) -> None:
    copy = pod("decode", ("spec.engine.securityProfile", profile))["initContainers"][0]
    assert copy["name"] == "connector"
    assert copy["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_privileged() -> None:
    context = engine("decode", ("spec.engine.securityProfile", "Privileged"))["securityContext"]
    assert context == {"privileged": True, "runAsUser": 0}


def test_restricted_passes_the_restricted_standard() -> None:
    edits: list[Edit] = [("spec.engine.securityProfile", "Restricted"), ("spec.engine.runAsUser", 1000)]
    found = pod("decode", *edits)
    assert found["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in (*found["initContainers"], *found["containers"]):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert plain_env(found["containers"][0])["HOME"] == "/var/cache/pd-engine"


@pytest.mark.parametrize(("role", "http", "side"), [("prefill", 8100, 5600), ("decode", 8200, 5700)])
def test_on_the_hosts_network_roles_have_ports_of_their_own(role: str, http: int, side: int) -> None:
    found = pod(role, ("spec.engine.hostNetwork", "Enabled"))
    assert found["hostNetwork"] is True
    assert found["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert [port["containerPort"] for port in found["containers"][0]["ports"]] == [http, side]
    assert flag_table(tuple(found["containers"][0]["command"]))["--port"] == [str(http)]
    assert plain_env(found["containers"][0])["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(side)


def test_without_huge_pages_libfabric_is_told_so() -> None:
    container = engine("decode", ("spec.decode.resources", {"limits": {"hugepages-2Mi": "0"}}))
    assert "hugepages-2Mi" not in container["resources"]["limits"]
    assert plain_env(container)["FI_EFA_USE_HUGE_PAGE"] == "0"


@BOTH
@given(sleep=st.none() | st.integers(0, 3600), shutdown=st.integers(0, 3600), lease=st.integers(6, 3600))
@settings(deadline=None, max_examples=30)
def test_the_kubelet_never_kills_before_the_engine_gives_up(
    role: str, sleep: int | None, shutdown: int, lease: int
) -> None:
    value = deployment(
        IMAGE,
        ("spec.engine.preStopSeconds", sleep),
        ("spec.engine.shutdownTimeoutSeconds", shutdown),
        ("spec.kvTransfer.leaseDurationSeconds", lease),
    )
    wait = sleep if sleep is not None else max(15, lease) if role == "prefill" else 15
    assert termination_grace_seconds(value, Role(role)) > wait + shutdown


def test_no_sleep_no_hook() -> None:
    assert "lifecycle" not in engine("decode", ("spec.engine.preStopSeconds", 0))
