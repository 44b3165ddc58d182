"""Wishes about nodes, the made-up size, and what a machine lacks for a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdctl.core.cluster import init_plan, nodes, preflight
from pdctl.core.cluster.layout import Layout
from pdctl.core.cluster.nodes import DEFAULT_DEVICES, NODE_TYPES, NodeError, Nodes, Size, parse_pairs, plan_nodes

GOOD = preflight.Observed(
    platform="linux",
    is_root=True,
    missing_programs=(),
    namespaces_error="",
    cgroup_version=1,
    cgroup_controllers=frozenset(preflight.V1_CONTROLLERS),
    cgroup_error="",
    has_overlay=True,
    paths={"the state folder": "/home/me/.local/state"},
)


def test_a_plain_cluster_is_one_node_with_made_up_devices():
    assert plan_nodes(None, None, {}, {}) == Nodes(1, {}, DEFAULT_DEVICES, Size())


def test_a_type_brings_two_nodes_and_wishes_beside_it_win():
    sizes = {"memory": "4Ti", "nvidia.com/gpu": "4", "ephemeral-storage": "1Ti"}
    planned = plan_nodes("p5en.48xlarge", 3, {"a": "b"}, sizes)
    assert (planned.count, planned.names) == (3, ("node-0", "node-1", "node-2"))
    assert planned.labels == {**NODE_TYPES["p5en.48xlarge"].labels, "a": "b"}
    assert planned.size == Size(cpus=192, memory=4 * 2**40, huge_pages=10 * 2**30, disk=2**40)
    assert planned.devices == {"nvidia.com/gpu": 4, "vpc.amazonaws.com/efa": 16}


def test_a_made_up_disk_is_the_size_of_what_the_kubelet_lies_on():
    layout = Layout("one", Path("/state/one"))

    def mounted(disk: int | None) -> list[str]:
        steps = init_plan.private_mounts(layout, 0, "/etc/resolv.conf", disk)
        return next(step["run"] for step in steps if "run" in step and step["run"][-1] == "/var/lib")

    sample_needs = 100 * 2**30
    disk = NODE_TYPES["p5en.48xlarge"].size.disk
    assert disk is not None
    assert disk > sample_needs
    assert f"mode=755,size={disk}" in mounted(disk)
    assert "mode=755" in mounted(None)


def test_a_device_of_zero_is_not_there():
    assert plan_nodes(None, None, {}, {"nvidia.com/gpu": "0"}).devices == {"vpc.amazonaws.com/efa": 16}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("t3.nano", None, {}, {}), "t3.nano"),
        ((None, 0, {}, {}), "0 nodes"),
        ((None, 5, {}, {}), "5 nodes"),
        ((None, None, {}, {"memory": "2TB"}), "memory=2TB"),
        ((None, None, {}, {"cpu": "-1"}), "cpu=-1"),
        ((None, None, {}, {"disk": "1"}), "'disk'"),
    ],
    ids=["type", "no-nodes", "too-many", "unit", "negative", "unknown"],
)
def test_bad_wishes_are_refused_by_name(
    arguments: tuple[str | None, int | None, dict[str, str], dict[str, str]], names: str
):
    with pytest.raises(NodeError, match=names):
        plan_nodes(*arguments)


def test_pairs_are_split_at_the_first_equals_sign():
    assert parse_pairs("--node-label", ["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    with pytest.raises(NodeError, match="--node-label 'x'"):
        parse_pairs("--node-label", ["x"])


def test_a_made_up_size_is_shown_in_files_that_exist():
    size = Size(cpus=3, memory=2**40, huge_pages=5 * 2**21)
    files = nodes.render_size(size, "MemTotal:       100 kB\nMemFree:  5 kB\n")
    assert files["meminfo"] == f"MemTotal:       {2**30} kB\nMemFree:  5 kB\n"
    assert files["nr_hugepages"] == "5\n"
    assert [path for path in files if path.startswith("cpus/")] == [f"cpus/cpu{cpu}/online" for cpu in range(3)]
    for shown in init_plan.shown_instead(size):
        assert any(path == shown or path.startswith(f"{shown}/") for path in files)


@pytest.mark.parametrize("size", [Size(), Size(memory=2**40), Size(cpus=2), Size(huge_pages=2**21)])
def test_only_what_is_made_up_is_covered(size: Size):
    shown = init_plan.shown_instead(size)
    assert ("/proc/meminfo" in shown.values()) == (size.memory is not None)
    assert ("/sys/devices/system/cpu" in shown.values()) == (size.cpus is not None)
    files = nodes.render_size(size, "MemTotal:       100 kB\n")
    assert {path.partition("/")[0] for path in files} == set(shown)


def test_a_machine_with_everything_has_no_problem():
    assert preflight.problems(GOOD, light=False) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"platform": "darwin"}, "needs Linux; this is darwin"),
        ({"is_root": False}, "needs root"),
        ({"missing_programs": ("runc", "nft")}, "missing: runc, nft; Debian packages: nftables runc"),
        ({"namespaces_error": "unshare failed"}, "namespaces can't be made here: unshare failed"),
        ({"cgroup_version": None}, "no cgroups"),
        ({"cgroup_controllers": frozenset({"cpu", "memory"})}, "lacks the controllers blkio, cpuacct"),
        (
            {"cgroup_version": 2, "cgroup_controllers": frozenset({"cpu", "memory"})},
            "v2 lacks the controllers cpuset, io, pids",
        ),
        ({"cgroup_error": "Read-only file system"}, "no cgroup can be made: Read-only file system"),
        ({"has_overlay": False}, "overlay"),
        ({"state_error": "/state has 1 MB"}, "the state folder /state has 1 MB; XDG_STATE_HOME names another place"),
        ({"paths": {"the cache folder": "/var/lib/ci/cache"}}, "the cache folder is /var/lib/ci/cache"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_lack_is_named(change: dict[str, object], says: str):
    [problem] = preflight.problems(replace(GOOD, **change), light=False)  # type: ignore[arg-type]
    assert says in problem


def test_the_light_mode_needs_no_cgroups_and_no_runtime():
    bare = replace(GOOD, cgroup_version=None, cgroup_controllers=frozenset(), has_overlay=False)
    assert preflight.problems(bare, light=True) == []
    assert set(preflight.LIGHT_PROGRAMS) < set(preflight.FULL_PROGRAMS)


def test_a_folder_that_only_begins_alike_is_not_hidden():
    assert preflight.problems(replace(GOOD, paths={"x": "/running/x", "y": "/var/library"}), light=False) == []
