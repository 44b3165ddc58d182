"""What a deployment tells its decode engines about memory, read from the very arguments that they are started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pd_operator.core.choices import Connector, Device, NodeProfile, Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.profiles import profile_of
from pd_operator.core.render_engine import EngineEndpoint, render_engine
from pd_operator.core.spec_transfer import Lease
from pdctl.core.memory_plan import PlanError
from pdctl.core.retention_modes import UNPINNED, Mode, leased, pinned

P5EN_GPU_GIB: Final = 139.0
"""What an H200 shows to programs of its 141 GB."""
VLLM_UTILIZATION: Final = 0.92
"""vLLM's default of `--gpu-memory-utilization` (0.32)."""
BLOCK_TOKENS: Final = {Device.CUDA: 16, Device.CPU: 128}
SHORT_TTL_S: Final = 60.0
_CPU_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_SPLIT: Final = ("--decode-context-parallel-size", "-dcp")
_ENDPOINT: Final = EngineEndpoint("127.0.0.1", 8200, "127.0.0.1", 5600)


@dataclass(frozen=True, slots=True)
class ToldEngine:
    """One decode engine, as far as it is told. None: not said.

    ``cpu_gib`` is the pool of an engine without GPUs, ``kv_bytes`` of one with them on each, ``blocks`` an override of
    either. ``gpu_gib`` is known of some machines only.
    """

    replicas: int
    tensor_parallel: int
    block_tokens: int
    utilization: float
    dtype: str
    kv_cache_dtype: str
    gpu_gib: float | None
    cpu_gib: float | None
    kv_bytes: float | None
    blocks: int | None


def told_engine(deployment: PDDeployment) -> ToldEngine:
    """Read the decode role.

    Raises:
        PlanError: an argument has no number, or splits the model in a way that isn't counted here.
    """
    process = render_engine(deployment, Role.DECODE, _ENDPOINT)
    for flag in _SPLIT:
        if _value(process.argv, flag) not in (None, "1"):
            raise PlanError(f"{flag} is not counted here: give --pool-tokens, from the engine's log")
    device = profile_of(deployment.spec).device
    block = _value(process.argv, "--block-size")
    kv_bytes = _value(process.argv, "--kv-cache-memory-bytes")
    blocks = _value(process.argv, "--num-gpu-blocks-override")
    return ToldEngine(
        replicas=deployment.spec.decode.replicas,
        tensor_parallel=deployment.spec.decode.tensor_parallel_size,
        block_tokens=BLOCK_TOKENS[device] if block is None else int(_number("--block-size", block)),
        utilization=_number(
            "--gpu-memory-utilization", _value(process.argv, "--gpu-memory-utilization") or str(VLLM_UTILIZATION)
        ),
        dtype=_value(process.argv, "--dtype") or "auto",
        kv_cache_dtype=_value(process.argv, "--kv-cache-dtype") or "auto",
        gpu_gib=P5EN_GPU_GIB if deployment.spec.node_profile is NodeProfile.P5EN_EFA else None,
        cpu_gib=_cpu_gib(process.env) if device is Device.CPU else None,
        kv_bytes=None if kv_bytes is None else _number("--kv-cache-memory-bytes", kv_bytes),
        blocks=None if blocks is None else int(_number("--num-gpu-blocks-override", blocks)),
    )


def possible_modes(deployment: PDDeployment) -> list[Mode]:
    """Ways of retaining that the deployment could use, the simplest first, by its own numbers; Pinned also short."""
    transfer = deployment.spec.kv_transfer
    ttl = float(transfer.decoder_blocks_ttl_seconds)
    modes = [pinned(ttl, float(transfer.handle_ttl_seconds))]
    if ttl > SHORT_TTL_S:
        modes.append(pinned(SHORT_TTL_S))
    if transfer.connector is Connector.STOCK:
        return modes
    lease = transfer.lease or Lease()
    free = [UNPINNED, leased(float(lease.seconds), lease.share_percent / 100, float(lease.tool_hold_seconds))]
    if transfer.router_ttl_seconds is not None:
        free = [replace(mode, readable_s=float(transfer.router_ttl_seconds)) for mode in free]
    return [*free, *modes]


def _cpu_gib(env: Mapping[str, str]) -> float | None:
    value = env.get(_CPU_SPACE)
    return None if value is None else _number(_CPU_SPACE, value)


def _value(argv: Sequence[str], flag: str) -> str | None:
    """What a flag was given last, as `--flag value` or `--flag=value`."""
    found = None
    for at, word in enumerate(argv):
        if word == flag and at + 1 < len(argv):
            found = argv[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise PlanError(f"{name} must be a number over 0, got {value!r}")
    return number
