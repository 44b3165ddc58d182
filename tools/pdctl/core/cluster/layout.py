"""Names, addresses and paths of one cluster. Everything that must differ between two clusters side by side is here.

Inside its network namespaces every cluster uses the same addresses; outside it has a name, a state folder, a cgroup and
one port on the machine's loopback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT_NAME: Final = "pd"
SERVICE_CIDR: Final = "10.96.0.0/16"
API_SERVICE_IP: Final = "10.96.0.1"
CLUSTER_DOMAIN: Final = "cluster.local"
PREFIX: Final = "pd-"
"""Of network namespaces and cgroups, so that nobody else's are ever touched."""
MAX_NODES: Final = 4
RUNTIME_SOCKET: Final = "/run/containerd/containerd.sock"
DEVICE_SOCKET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?")
_NETNS: Final = re.compile(re.escape(PREFIX) + r"(?P<name>[a-z0-9]([-a-z0-9]*[a-z0-9])?)(\.\d)?")


class ClusterNameError(ValueError):
    """A cluster name that can't be used, with the reason."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one cluster lives. ``state`` is its folder; ``assets`` and ``binaries`` are shared by all."""

    name: str
    state: Path

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; the same address serves inside the cluster's network and on the machine."""
        return self.state / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        """One file per daemon."""
        return self.state / "log"

    @property
    def audit_log(self) -> Path:
        """JSON lines, one per request that the API server answered."""
        return self.state / "log" / "audit.log"

    @property
    def audit_policy(self) -> Path:
        """What goes into the audit log."""
        return self.state / "audit-policy.json"

    @property
    def node_resolver(self) -> Path:
        """What a node's own programs see as /etc/resolv.conf."""
        return self.state / "node-resolv.conf"

    @property
    def record(self) -> Path:
        """What `up` made, for the other commands; written last."""
        return self.state / "cluster.json"

    @property
    def cgroup(self) -> str:
        """Path below each cgroup hierarchy."""
        return f"{PREFIX}{self.name}"

    def netns(self, node: int = 0) -> str:
        """Name of a node's network namespace. The control plane lives in that of node 0."""
        return f"{PREFIX}{self.name}" + (f".{node}" if node else "")

    def node_folder(self, node: int) -> Path:
        """What belongs to one node alone."""
        return self.state / node_name(node)


def check_name(name: str) -> None:
    """Raises ClusterNameError unless the name can be part of a path, a namespace and an address."""
    if not _NAME.fullmatch(name):
        raise ClusterNameError(
            f"{name!r} can't be a cluster's name: up to 20 lower-case letters, digits and inner dashes"
        )


def cluster_of_netns(netns: str) -> str | None:
    """The cluster that a network namespace belongs to, by its name; None if it is not one of ours."""
    match = _NETNS.fullmatch(netns)
    return match["name"] if match else None


def node_name(node: int) -> str:
    """Of the Kubernetes node, its host name and its folder."""
    return f"node-{node}"


def node_ip(node: int) -> str:
    """From a documentation range, which no real network uses."""
    return f"198.51.100.{10 + node}"


def pod_cidr(node: int) -> str:
    """The pods' addresses on one node."""
    return f"10.244.{node}.0/24"
