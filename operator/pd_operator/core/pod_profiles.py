"""What a kind of machine sets for an engine's pod: devices, memory, selectors, tolerations.

Separate from `profiles`, which sets the engine's own arguments, because a local process has no pod. Amounts are per
accelerator of the engine, so that an engine that is half as wide asks for half a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pd_operator.core.choices import Device, NodeProfile
from pd_operator.core.model import PDDeploymentSpec
from pd_operator.core.profiles import profile_of

GPU: Final = "nvidia.com/gpu"
EFA: Final = "vpc.amazonaws.com/efa"
HUGE_PAGES: Final = "hugepages-2Mi"
INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"


@dataclass(frozen=True, slots=True)
class PodProfile:
    """Amounts per accelerator: whole devices, whole CPU cores, GiB of memory and shared memory, MiB of huge pages."""

    devices: dict[str, int] = field(default_factory=dict)
    cpu: int = 1
    memory_gib: int = 4
    memory_is_limited: bool = False
    shared_memory_gib: int = 2
    huge_pages_mib: int = 0
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerated: tuple[str, ...] = ()
    """Keys of NoSchedule taints."""
    near: str | None = None
    """Topology label of nodes that are better close to each other."""


# 8 accelerators make the amounts that the public sample for this machine uses: 64 cores, 400 GiB, 120 GiB shared
# memory, 5 GiB of huge pages, 8 GPUs, 16 EFA devices.
P5EN_EFA: Final = PodProfile(
    devices={GPU: 1, EFA: 2},
    cpu=8,
    memory_gib=50,
    memory_is_limited=True,
    shared_memory_gib=15,
    huge_pages_mib=640,
    node_selector={INSTANCE_TYPE: "p5en.48xlarge"},
    tolerated=(GPU, EFA),
    near="topology.k8s.aws/network-node-layer-3",
)
CPU: Final = PodProfile()
CUSTOM_CUDA: Final = PodProfile(
    devices={GPU: 1}, cpu=4, memory_gib=32, memory_is_limited=False, shared_memory_gib=8, tolerated=(GPU,)
)


def pod_profile_of(spec: PDDeploymentSpec) -> PodProfile:
    """The pod's share of the profile that a spec names."""
    if spec.node_profile is NodeProfile.P5EN_EFA:
        return P5EN_EFA
    return CPU if profile_of(spec).device is Device.CPU else CUSTOM_CUDA


def tolerations_of(profile: PodProfile) -> list[dict[str, Any]]:
    """The profile's tolerations as Kubernetes spells them."""
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in profile.tolerated]
