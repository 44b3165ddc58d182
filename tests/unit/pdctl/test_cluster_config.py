"""Names, keys, command lines and files of a cluster."""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path

import pytest

from pdctl.core.cluster import config, daemons, init_plan
from pdctl.core.cluster.audit import parse_events
from pdctl.core.cluster.binaries import BINARIES, KUBERNETES_VERSION, cluster_key, module_key
from pdctl.core.cluster.layout import ClusterNameError, Layout, cluster_of_netns, node_ip, pod_cidr
from pdctl.core.cluster.nodes import DEFAULT_DEVICES, Size
from pdctl.shell.cluster.places import GO_SOURCES, read_sources

LAYOUT = Layout("one", Path("/state/one"))
PROGRAMS = daemons.Programs(Path("/programs"))


def flag(argv: tuple[str, ...], name: str) -> str:
    """The value behind a flag, in either spelling."""
    for at, argument in enumerate(argv):
        if argument == name:
            return argv[at + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    raise AssertionError(f"{name} is not in {argv}")


def control_plane(**settings: int) -> dict[str, daemons.Daemon]:
    found = daemons.control_plane(LAYOUT, PROGRAMS, daemons.ControlPlane(4433, **settings))
    return {daemon.name: daemon for daemon in found}


@pytest.mark.parametrize("name", ["a", "pd", "t-1", "a" * 20])
def test_a_good_name_comes_back_from_its_namespaces(name: str):
    layout = Layout(name, Path("/x"))
    assert {cluster_of_netns(layout.netns(node)) for node in range(4)} == {name}
    assert len({layout.netns(node) for node in range(4)}) == 4


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a.1", "a/b", "a b", "a" * 21, "ä", "a\n"])
def test_a_bad_name_is_refused(name: str):
    with pytest.raises(ClusterNameError):
        Layout(name, Path("/x"))


@pytest.mark.parametrize("netns", ["one", "pdx", "pd-", "pd-a.10", "pd-a.x", "cni-1", "pd-A"])
def test_other_peoples_namespaces_are_not_ours(netns: str):
    assert cluster_of_netns(netns) is None


def test_nodes_have_addresses_of_their_own():
    assert len({node_ip(node) for node in range(4)} | {pod_cidr(node) for node in range(4)}) == 8


def test_the_key_changes_with_a_modules_sources_and_only_with_them():
    sources = {"node/go.mod": b"a", "etcd/go.mod": b"b"}
    changed = {**sources, "node/go.mod": b"c"}
    assert module_key("node", sources) != module_key("node", changed)
    assert module_key("etcd", sources) == module_key("etcd", changed)
    assert cluster_key(sources) != cluster_key(changed)
    assert cluster_key(sources) == cluster_key(dict(reversed(sources.items())))
    # Moving bytes from a path to its content makes another key.
    assert module_key("node", {"node/ab": b"c"}) != module_key("node", {"node/a": b"bc"})


def test_every_program_has_its_module_in_the_package_with_all_hashes():
    sources = read_sources()
    for binary in BINARIES:
        module = sources[f"{binary.module}/go.mod"].decode()
        assert module.startswith(f"module pdserving.dev/cluster/{binary.module}\n")
        assert (f"{binary.module}/go.sum" in sources) == ("require" in module)
        if binary.package.startswith("."):
            assert (GO_SOURCES / binary.module / binary.package / "main.go").exists()


def test_the_modules_pin_the_versions_that_the_programs_report():
    kubernetes = read_sources()["kubernetes/go.mod"].decode()
    assert f"k8s.io/kubernetes v{KUBERNETES_VERSION}" in kubernetes
    [server] = [binary for binary in BINARIES if binary.name == "kube-apiserver"]
    assert f"gitVersion=v{KUBERNETES_VERSION}" in server.linker_flags
    [helm] = [binary for binary in BINARIES if binary.name == "helm"]
    _, minor, _ = KUBERNETES_VERSION.split(".")
    assert f"chartutil.k8sVersionMinor={minor}" in helm.linker_flags
    assert len({binary.name for binary in BINARIES}) == len(BINARIES)


def test_the_api_server_checks_rights_and_logs_every_request():
    argv = control_plane()["apiserver"].argv
    assert flag(argv, "--authorization-mode") == "Node,RBAC"
    assert flag(argv, "--audit-log-path") == "/state/one/log/audit.log"
    assert flag(argv, "--audit-log-mode") == "blocking"
    assert flag(argv, "--secure-port") == "4433"
    assert not [argument for argument in argv if argument.startswith("--min-request-timeout")]
    assert flag(control_plane(watch_seconds=7)["apiserver"].argv, "--min-request-timeout") == "7"


def test_nobody_but_the_administrator_is_administrator():
    for daemon in (*control_plane().values(), *daemons.worker(LAYOUT, PROGRAMS, 0, DEFAULT_DEVICES)):
        if daemon.name != "apiserver":
            assert "admin" not in " ".join(daemon.argv)


def test_clients_of_the_api_server_wait_for_it():
    found = control_plane()
    assert {found[name].after_port for name in ("controller-manager", "scheduler")} == {4433}
    assert found["apiserver"].after_port == daemons.ETCD_PORT


def test_a_node_without_devices_has_no_device_plugin():
    names = [daemon.name for daemon in daemons.worker(LAYOUT, PROGRAMS, 1, {})]
    assert names == ["containerd", "kubelet", "kube-proxy"]


@pytest.mark.parametrize("major", [1, 2])
def test_containerd_runs_everything_through_the_wrapper(major: int):
    parsed = tomllib.loads(config.containerd_toml(LAYOUT, PROGRAMS, 1, major))
    assert parsed["version"] == major + 1
    runtime = next(value for name, value in parsed["plugins"].items() if "containerd" in value)
    options = runtime["containerd"]["runtimes"]["runc"]["options"]
    assert options["BinaryName"] == "/programs/hostmounts"
    assert runtime["restrict_oom_score_adj"] is True
    assert runtime["cni"]["conf_dir"] == "/state/one/node-1/cni"


def test_a_kubelet_keeps_to_its_own_cgroup():
    assert json.loads(config.kubelet(LAYOUT, 1))["cgroupRoot"] == "/pd-one/node-1"
    assert json.loads(config.kubelet(LAYOUT, 1))["protectKernelDefaults"] is True


def test_a_kubeconfig_holds_its_certificates():
    raw = json.loads(config.kubeconfig("https://127.0.0.1:1", b"A", b"C", b"K"))
    user = raw["users"][0]["user"]
    assert [base64.b64decode(user[f"client-{what}-data"]) for what in ("certificate", "key")] == [b"C", b"K"]


def test_a_plan_is_plain_data_and_mounts_nothing_over_the_machine():
    steps = [*init_plan.private_mounts(LAYOUT, 0, "/etc/resolv.conf"), *init_plan.kubelet_mounts(LAYOUT, 0, Size())]
    plan = init_plan.render_plan(LAYOUT, 0, steps, control_plane().values())
    assert json.loads(json.dumps(plan)) == plan
    targets = [step["run"][-1] for step in steps if "run" in step and step["run"][0] == "mount"]
    # Shared propagation must come last, or mounts would be taken along by the unmounting before it.
    assert targets[-1] == "/"
    assert {"/run", "/var/lib", "/var/log", "/etc/resolv.conf", "/sys"} <= set(targets)


def test_audit_lines_become_events():
    line = {
        "stage": "ResponseComplete",
        "user": {"username": "system:serviceaccount:ns:sa"},
        "userAgent": "kopf/1",
        "verb": "patch",
        "objectRef": {
            "resource": "pddeployments",
            "apiGroup": "pdserving.dev",
            "subresource": "status",
            "namespace": "ns",
            "name": "qwen",
        },
        "responseStatus": {"code": 200},
        "requestURI": "/apis/pdserving.dev/v1alpha1/namespaces/ns/pddeployments/qwen/status",
        "stageTimestamp": "2026-01-01T00:00:00.000000Z",
    }
    dry = {**line, "requestURI": line["requestURI"] + "?dryRun=All"}  # type: ignore[operator]
    bare = {key: line[key] for key in ("stage", "requestURI", "stageTimestamp")} | {"verb": "get"}
    first, second, third = parse_events([json.dumps(one).encode() for one in (line, dry, bare)] + [b"\n"])
    assert (first.resource, first.is_write, first.answered) == ("pddeployments.pdserving.dev/status", True, True)
    assert not second.is_write
    assert (third.resource, third.user, third.code, third.is_write) == ("", "", 0, False)
