"""Node profiles as data: what a kind of machine sets for an engine.

One frozen value per profile, so that a new machine is a new value and no renderer asks which machine it is on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pd_operator.core.choices import Backend, Device, NodeProfile
from pd_operator.core.model import PDDeploymentSpec


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a role's first engine. Both roles may use one side channel: they are on different hosts."""

    prefill_http: int = 8100
    decode_http: int = 8200
    side_channel: int = 5600


@dataclass(frozen=True, slots=True)
class Profile:
    """What one kind of machine sets.

    ``launcher`` comes before the model in the command; ``flags`` and ``env`` are added to every engine's.
    """

    device: Device
    accelerators_per_node: int
    default_backend: Backend
    allowed_backends: frozenset[Backend]
    launcher: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    one_host: bool = False
    """Both roles share this machine and its loopback address."""
    ports: Ports = Ports()


GPU_LAUNCHER: Final = ("vllm", "serve")
CPU_LAUNCHER: Final = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""The community build of vLLM for CPUs has no `vllm` command, because its distribution has another name."""

P5EN_EFA: Final = Profile(
    device=Device.CUDA,
    accelerators_per_node=8,
    default_backend=Backend.LIBFABRIC,
    allowed_backends=frozenset({Backend.LIBFABRIC}),
    launcher=GPU_LAUNCHER,
)

CPU: Final = Profile(
    device=Device.CPU,
    accelerators_per_node=1,
    default_backend=Backend.UCX,
    allowed_backends=frozenset({Backend.UCX}),
    launcher=CPU_LAUNCHER,
    # Compiling takes minutes on a few cores and gains little there.
    flags=("--enforce-eager",),
    # Without a list UCX also probes devices that such a machine does not have.
    env={"UCX_TLS": "tcp,shm,self", "VLLM_CPU_KVCACHE_SPACE": "2"},
    one_host=True,
)

BACKEND_ENV: Final[dict[Backend, dict[str, str]]] = {
    # Without a provider name a missing EFA device becomes TCP and nothing says so.
    Backend.LIBFABRIC: {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
    Backend.UCX: {},
}
"""What each backend needs, on whatever machine it runs."""


def profile_of(spec: PDDeploymentSpec) -> Profile:
    """The profile that a spec names.

    Raises:
        ValueError: for nodeProfile Custom without customProfile, which parsing refuses.
    """
    if spec.node_profile is NodeProfile.P5EN_EFA:
        return P5EN_EFA
    if spec.node_profile is NodeProfile.CPU:
        return CPU
    custom = spec.custom_profile
    if custom is None:
        raise ValueError("nodeProfile Custom needs customProfile")
    on_cpu = custom.device is Device.CPU
    return Profile(
        device=custom.device,
        accelerators_per_node=custom.accelerators_per_node,
        default_backend=custom.default_backend,
        allowed_backends=frozenset(Backend),
        launcher=CPU_LAUNCHER if on_cpu else GPU_LAUNCHER,
        flags=CPU.flags if on_cpu else (),
        env=CPU.env if on_cpu else {},
    )


def backend_of(spec: PDDeploymentSpec) -> Backend:
    """The NIXL backend of both roles: the one that is set, or the profile's."""
    return spec.kv_transfer.backend or profile_of(spec).default_backend
