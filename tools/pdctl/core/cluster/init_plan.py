"""What a node's pid 1 does: mounts that only the node sees, then the daemons.

The plan is data, so that it can be looked at and tested; `shell.cluster.init` carries it out without deciding anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pdctl.core.cluster.daemons import Daemon
from pdctl.core.cluster.layout import Layout, node_name
from pdctl.core.cluster.nodes import Size

KUBELET_SYSCTLS: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""The kubelet wants these values and would set them for the whole machine: it is shown files with them instead."""

Step = dict[str, Any]


def run(*argv: str) -> Step:
    """A command that must succeed."""
    return {"run": list(argv)}


def make_folders(*paths: str | Path) -> Step:
    """Folders with their parents; present ones are fine."""
    return {"folders": [str(path) for path in paths]}


def render_plan(layout: Layout, node: int, steps: Iterable[Step], daemons: Iterable[Daemon]) -> dict[str, Any]:
    """The plan file of one node."""
    folder = layout.node_folder(node)
    return {
        "hostname": node_name(node),
        "logs": str(layout.logs),
        "log_prefix": "" if node == 0 else f"{node_name(node)}.",
        "control": str(folder / "control"),
        "ended": str(folder / "ended"),
        "steps": list(steps),
        "daemons": [daemon.as_json() for daemon in daemons],
    }


def private_mounts(layout: Layout, node: int, resolv_conf: str, disk: int | None = None) -> list[Step]:
    """/run and /var/lib in memory and own logs, so that nothing of a cluster is left on the machine's disk.

    ``disk`` is how large /var/lib claims to be, in bytes: the kubelet takes it for its disk. What is written there is
    memory all the same. None: half of the machine's memory.
    ``resolv_conf`` is the path behind /etc/resolv.conf: the node's own programs shall not ask the machine's resolver.
    """
    pod_logs = layout.node_folder(node) / "pod-logs"
    options = "mode=755" if disk is None else f"mode=755,size={disk}"
    return [
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"),
        make_folders("/run/lock", "/run/netns"),
        run("mount", "-t", "tmpfs", "-o", options, "tmpfs", "/var/lib"),
        make_folders("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/lib/etcd"),
        run("chmod", "700", "/var/lib/etcd"),
        run("mount", "--bind", str(pod_logs), "/var/log"),
        make_folders("/var/log/pods", "/var/log/containers"),
        run("mount", "--bind", str(layout.node_resolver), resolv_conf),
    ]


def kubelet_mounts(layout: Layout, node: int, size: Size, cgroups: str = "/sys/fs/cgroup") -> list[Step]:
    """A /sys of the node's own network namespace with the machine's cgroups, sysctls to look at, and a made-up size.

    Shared propagation comes last (else unmounting the helper mount would take the new one along): pods may ask for it.
    """
    folder = layout.node_folder(node)
    keep = str(folder / "cgroups")
    steps = [
        make_folders(keep),
        run("mount", "--rbind", cgroups, keep),
        run("mount", "-t", "sysfs", "sysfs", "/sys"),
        run("mount", "--rbind", keep, cgroups),
        run("umount", "-R", keep),
    ]
    for name in KUBELET_SYSCTLS:
        steps.append(run("mount", "--bind", str(sysctl_file(layout, node, name)), f"/proc/sys/{name}"))
    for name, target in shown_instead(size).items():
        steps.append(run("mount", "--bind", str(folder / name), target))
    steps.append(run("mount", "--make-rshared", "/"))
    return steps


def shown_instead(size: Size) -> dict[str, str]:
    """What the kubelet shall see of the machine's size: path below the node's folder → path that it covers."""
    covered = {}
    if size.memory is not None:
        covered["meminfo"] = "/proc/meminfo"
    if size.huge_pages is not None:
        covered["nr_hugepages"] = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
    if size.cpus is not None:
        covered["numa"] = "/sys/devices/system/node"
        covered["cpus"] = "/sys/devices/system/cpu"
    return covered


def sysctl_file(layout: Layout, node: int, name: str) -> Path:
    """Where the value that is shown for a sysctl lies."""
    return layout.node_folder(node) / "sysctl" / name.replace("/", ".")
