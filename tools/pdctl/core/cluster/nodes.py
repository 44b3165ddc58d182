"""How many nodes, with which labels and made-up devices, and how large they claim to be.

The kubelet and the scheduler are real; only what the machine reports to the kubelet is made up, so that a pod which
asks for a p5en.48xlarge's 64 CPUs and 400 GiB is scheduled and started here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdctl.core.cluster.layout import MAX_NODES, node_name

DEFAULT_DEVICES: Final = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16}
_UNITS: Final = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY: Final = re.compile(r"([0-9]+)(|Ki|Mi|Gi|Ti)")
HUGE_PAGE_BYTES: Final = 2**21


class NodeError(ValueError):
    """A wish about nodes that can't be fulfilled, in one sentence."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a node claims to have; None is what the machine has. Memory, huge pages and disk in bytes."""

    cpus: int | None = None
    memory: int | None = None
    huge_pages: int | None = None
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes are alike but for their names."""

    count: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_DEVICES))
    size: Size = Size()

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_NODES:
            raise NodeError(f"{self.count} nodes: 1 to {MAX_NODES} can be had")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the Kubernetes nodes."""
        return tuple(node_name(node) for node in range(self.count))


NODE_TYPES: Final = {
    "p5en.48xlarge": Nodes(
        count=2,
        labels={
            "node.kubernetes.io/instance-type": "p5en.48xlarge",
            "topology.kubernetes.io/region": "us-west-2",
            "topology.kubernetes.io/zone": "us-west-2a",
            "topology.k8s.aws/network-node-layer-3": "nn-0",
        },
        devices=DEFAULT_DEVICES,
        size=Size(cpus=192, memory=2 * 2**40, huge_pages=10 * 2**30, disk=8 * 3_840 * 10**9),
    )
}
"""Nodes that look like an instance type. Two, because P and D of one pair never share a host."""


def plan_nodes(
    node_type: str | None, count: int | None, labels: Mapping[str, str], capacity: Mapping[str, str]
) -> Nodes:
    """The nodes for the wishes of a command line: a type, then what is said beside it.

    ``capacity`` holds `cpu`, `memory`, `hugepages-2Mi`, `ephemeral-storage` (quantities) and any device resource
    (counts).

    Raises:
        NodeError: unknown type, bad quantity, too many nodes.
    """
    if node_type is not None and node_type not in NODE_TYPES:
        raise NodeError(f"unknown node type {node_type!r}; known: {', '.join(NODE_TYPES)}")
    nodes = Nodes() if node_type is None else NODE_TYPES[node_type]
    size, devices = nodes.size, dict(nodes.devices)
    for resource, quantity in capacity.items():
        amount = parse_quantity(resource, quantity)
        if resource == "cpu":
            size = replace(size, cpus=amount)
        elif resource == "memory":
            size = replace(size, memory=amount)
        elif resource == "hugepages-2Mi":
            size = replace(size, huge_pages=amount)
        elif resource == "ephemeral-storage":
            size = replace(size, disk=amount)
        elif "/" in resource:
            devices[resource] = amount
        else:
            known = "cpu, memory, hugepages-2Mi, ephemeral-storage or a device such as nvidia.com/gpu"
            raise NodeError(f"capacity {resource!r}: {known}")
    return replace(
        nodes,
        count=nodes.count if count is None else count,
        labels={**nodes.labels, **labels},
        devices={name: number for name, number in devices.items() if number},
        size=size,
    )


def parse_quantity(resource: str, text: str) -> int:
    """A Kubernetes quantity that is a whole number, with or without a binary unit."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise NodeError(f"capacity {resource}={text}: a whole number, with Ki, Mi, Gi or Ti for bytes")
    return int(match[1]) * _UNITS[match[2]]


def parse_pairs(option: str, pairs: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts of a repeated option.

    Raises:
        NodeError: a text without "=".
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise NodeError(f"{option} {pair!r}: KEY=VALUE is needed")
        found[key] = value
    return found


def render_meminfo(meminfo: str, total_bytes: int) -> str:
    """The machine's /proc/meminfo with another total; the kubelet takes a node's capacity from it."""
    return re.sub(r"(?m)^MemTotal:.*$", f"MemTotal:       {total_bytes // 1024} kB", meminfo)


def render_size(size: Size, meminfo: str) -> dict[str, str]:
    """Files that make the kubelet believe a size: relative path → content. See `init_plan.shown_instead`.

    ``meminfo`` is the machine's own /proc/meminfo. With made-up CPUs there is no NUMA node and no CPU with a socket:
    then the kubelet only counts CPUs. With a topology it would pin its pods to CPUs that don't exist.
    """
    files = {}
    if size.memory is not None:
        files["meminfo"] = render_meminfo(meminfo, size.memory)
    if size.huge_pages is not None:
        files["nr_hugepages"] = f"{size.huge_pages // HUGE_PAGE_BYTES}\n"
    if size.cpus is not None:
        files["numa/online"] = "\n"
        files |= {f"cpus/cpu{cpu}/online": "1\n" for cpu in range(size.cpus)}
    return files
