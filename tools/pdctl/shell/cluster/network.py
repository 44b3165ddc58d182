"""Network namespaces of a cluster: no link to the outside, one bridge that joins the nodes.

Node 0's namespace holds the bridge, the control plane and its own pods; each further node is joined by a veth pair. In
the light mode there is only the loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from pdctl.core.cluster.layout import SERVICE_CIDR, Layout, cluster_of_netns, node_ip, pod_cidr
from pdctl.shell.cluster.places import ClusterError

NETNS_FOLDER: Final = Path("/run/netns")
KILL_SECONDS: Final = 60.0
SETTINGS: Final = {"ipv4/ip_forward": "1", "bridge/bridge-nf-call-iptables": "1"}
"""Forwarding for pods; and packets between two pods of one bridge pass the Service rules, too."""


def netns_path(netns: str) -> Path:
    """What nsenter takes."""
    return NETNS_FOLDER / netns


def enter(netns: str, argv: list[str]) -> list[str]:
    """The command line that runs another one in a network namespace and nowhere else but there."""
    return ["nsenter", f"--net={netns_path(netns)}", "--", *argv]


def with_resolver(resolver: Path, argv: list[str]) -> list[str]:
    """The command line that runs another one which sees ``resolver`` as /etc/resolv.conf; nobody else does."""
    target = os.path.realpath("/etc/resolv.conf")
    if not os.path.exists(target):
        return argv
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--", "sh", "-c", script, "sh", str(resolver), target, *argv]


def make_light_network(layout: Layout, api_port: int) -> None:
    """Loopback only, with the address that the API server advertises."""
    _make_netns(layout.netns(), api_port)
    _ip(layout.netns(), "address", "add", f"{node_ip(0)}/32", "dev", "lo")


def make_network(layout: Layout, nodes: int, api_port: int) -> None:
    """All nodes' namespaces, joined."""
    control = layout.netns()
    _make_netns(control, api_port)
    _ip(control, "link", "add", "nodes", "type", "bridge")
    _ip(control, "address", "add", f"{node_ip(0)}/24", "dev", "nodes")
    _ip(control, "link", "set", "nodes", "up")
    for node in range(1, nodes):
        _make_netns(layout.netns(node), api_port)
        far = str(netns_path(layout.netns(node)))
        _ip(control, "link", "add", f"node{node}", "type", "veth", "peer", "name", "nodes", "netns", far)
        _ip(control, "link", "set", f"node{node}", "master", "nodes", "up")
        _ip(layout.netns(node), "address", "add", f"{node_ip(node)}/24", "dev", "nodes")
        _ip(layout.netns(node), "link", "set", "nodes", "up")
    for node in range(nodes):
        # So that a ClusterIP passes the routing step before its address is translated.
        _ip(layout.netns(node), "route", "add", SERVICE_CIDR, "dev", "nodes")
        for other in range(nodes):
            if other != node:
                _ip(layout.netns(node), "route", "add", pod_cidr(other), "via", node_ip(other))
        for name, value in SETTINGS.items():
            _set(layout.netns(node), name, value)


def namespaces_of(name: str) -> list[str]:
    """Network namespaces that exist for a cluster."""
    return [netns for netns in _all_netns() if cluster_of_netns(netns) == name]


def clusters_with_namespaces() -> set[str]:
    """Names of clusters that have a network namespace."""
    return {name for netns in _all_netns() if (name := cluster_of_netns(netns)) is not None}


def init_of(netns: str) -> int | None:
    """The machine's number of the node's process 1; None when none runs."""
    for pid in processes_in(netns):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
                # Its numbers: here, and in its own namespace. A pod's first process has one more, in the node's.
                if line.startswith("NSpid:") and line.split()[2:] == ["1"]:
                    return pid
    return None


def processes_in(netns: str) -> list[int]:
    """Every process whose network namespace it is, as seen from the machine."""
    try:
        wanted = os.stat(netns_path(netns))
    except FileNotFoundError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # A process may be gone by now.
            with contextlib.suppress(OSError):
                seen = os.stat(f"/proc/{entry}/ns/net")
                if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(entry))
    return found


def kill_processes(netns: str) -> None:
    """SIGKILL to everything in a namespace. The node's process 1 takes its pods along, whatever namespace they are in.

    Raises:
        ClusterError: this process is one of them, or some don't die.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while pids := processes_in(netns):
        if os.getpid() in pids:
            raise ClusterError("this runs inside the cluster's network and would end itself; run it outside")
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {pids} in {netns} don't die")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def delete_netns(netns: str) -> None:
    """Remove the name, and with it the namespace, once nothing runs in it."""
    # In a session of its own, where Ctrl-C at a terminal doesn't reach it.
    subprocess.run(["ip", "netns", "delete", netns], check=False, capture_output=True, start_new_session=True)


def _all_netns() -> list[str]:
    try:
        return sorted(os.listdir(NETNS_FOLDER))
    except FileNotFoundError:
        return []


def _make_netns(netns: str, api_port: int) -> None:
    _run("ip", "netns", "add", netns)
    _ip(netns, "link", "set", "lo", "up")
    # The API server's port is one that the kernel would also hand out to outgoing connections.
    _set(netns, "ipv4/ip_local_reserved_ports", str(api_port))


def _ip(netns: str, *arguments: str) -> None:
    _run("ip", "-netns", netns, *arguments)


def _set(netns: str, name: str, value: str) -> None:
    _run(*enter(netns, ["sh", "-c", f"echo {value} > /proc/sys/net/{name}"]))


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")
