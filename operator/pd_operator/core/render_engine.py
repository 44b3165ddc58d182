"""One role's engine process: deployment + role + endpoint → argument list and environment.

The only place that spells vLLM arguments. The same output starts an engine in a pod, under `pdctl up` and by hand
after `pdctl render`, so what was tested in one place is what runs in the others. Addresses are data: in a pod the
side-channel host is the text `$(POD_IP)`, which Kubernetes fills in.

What is never rendered: a fixed `engine_id` (a restarted engine would be taken for the memory of the old one), a push
connector, and anything that depends on where a volume is mounted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.choices import Connector, Device, Download, LoadFailurePolicy, Retention, Role, Switch
from pd_operator.core.model import PDDeployment
from pd_operator.core.profiles import BACKEND_ENV, backend_of, profile_of
from pd_operator.core.spec_engine import EngineSpec, EnvVar
from pd_operator.core.spec_role import RoleSpec
from pd_operator.core.spec_transfer import Lease
from pd_wire import names

KV_DEVICES: Final = {Device.CUDA: "cuda", Device.CPU: "cpu"}
COMMON_ENV: Final = {
    # The only level at which NIXL says which provider it opened, and why a plugin did not load.
    "NIXL_LOG_LEVEL": "INFO",
}
"""PYTHONHASHSEED is left alone: vLLM seeds its block hashes with a constant of its own while they are cryptographic
(the default), and a known seed would let clients slow an engine down with JSON keys that collide."""


LEASE_API: Final = "pd_connector.shell.lease_api.LeaseApi"
"""What adds it to vLLM's API server, as an import path."""

NOT_BOUND: Final = "nobind"
"""vLLM's word for threads that the kernel places. Where engines share cores, its own choice is the same for each."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where one engine listens. Hosts may be texts that something else fills in later, such as `$(POD_IP)`.

    ``side_channel_host`` is bound and told to peers, so it must be an address that they reach. ``cpu_cores`` pins a CPU
    engine's threads, in vLLM's notation ("0", "0-3", `NOT_BOUND`).
    """

    http_host: str
    http_port: int
    side_channel_host: str
    side_channel_port: int
    cpu_cores: str | None = None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """What to start. ``argv[0]`` is `vllm` or `python`: the caller may put its own interpreter there."""

    argv: tuple[str, ...]
    env: dict[str, str]


def render_engine(deployment: PDDeployment, role: Role, endpoint: EngineEndpoint) -> EngineProcess:
    """The process of one engine. ``env`` holds what to add to the caller's environment.

    Variables with a `secretKeyRef` are not in ``env``: a pod gets them from the Secret, a local process has them from
    its caller.
    """
    spec = deployment.spec
    profile = profile_of(spec)
    settings = deployment.role(role)
    argv = (
        *profile.launcher,
        spec.model.name,
        *_model_flags(deployment),
        "--host",
        endpoint.http_host,
        "--port",
        str(endpoint.http_port),
        *_engine_flags(spec.engine, settings),
        *profile.flags,
        *_lease_flags(deployment, role),
        "--kv-transfer-config",
        json.dumps(kv_transfer_config(deployment, role), separators=(",", ":")),
        *spec.engine.extra_args,
        *settings.extra_args,
    )
    return EngineProcess(argv, _env(deployment, settings, endpoint))


def kv_transfer_config(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    """The value of `--kv-transfer-config`. Equal on both roles but for role and failed loads."""
    transfer = deployment.spec.kv_transfer
    config: dict[str, Any] = {"kv_connector": names.STOCK_CONNECTOR_CLASS}
    if transfer.connector is Connector.VERIFIED:
        config = {
            "kv_connector": names.CONNECTOR_CLASS,
            # With a module path a missing plugin stops the engine; it can't fall back to vLLM's own.
            "kv_connector_module_path": names.CONNECTOR_MODULE,
        }
    reuse = transfer.bidirectional is Switch.ENABLED
    # Prefill reads both in one way: a lease is between decode and the router.
    unpinned = transfer.retention_mode is not Retention.PINNED
    policy = transfer.load_failure_policy
    if unpinned and role is Role.PREFILL:
        # Blocks that were overwritten during the read are reported to vLLM as failed loads.
        policy = LoadFailurePolicy.RECOMPUTE
    extra: dict[str, Any] = {"backends": [backend_of(deployment.spec).value]}
    if reuse:
        # Nothing reads these without reuse, and an edit of them would restart every engine all the same.
        extra["kv_recompute_threshold"] = transfer.recompute_threshold_tokens
        extra["decoder_kv_blocks_ttl"] = transfer.decoder_blocks_ttl_seconds
        if unpinned:
            extra |= _retention(transfer.leases if role is Role.DECODE else None)
    extra |= {"bidirectional_kv_xfer": reuse, "kv_lease_duration": transfer.lease_duration_seconds}
    extra |= {entry.name: json.loads(entry.value) for entry in transfer.extra_config}
    return {
        **config,
        "kv_buffer_device": KV_DEVICES[profile_of(deployment.spec).device],
        "kv_role": names.KV_ROLES[role.value],
        "kv_load_failure_policy": policy.value.lower(),
        "kv_connector_extra_config": extra,
    }


def _retention(leases: Lease | None) -> dict[str, Any]:
    if leases is None:
        return {names.RETENTION_OPTION: Retention.UNPINNED.value}
    return {
        names.RETENTION_OPTION: Retention.LEASED.value,
        names.LEASE_SECONDS_OPTION: leases.seconds,
        names.LEASE_SHARE_OPTION: leases.share_percent / 100,
    }


def _lease_flags(deployment: PDDeployment, role: Role) -> list[str]:
    """The endpoint by which routers prolong and end leases. The user's own `--middleware` comes beside it."""
    transfer = deployment.spec.kv_transfer
    leases = transfer.leases if transfer.bidirectional is Switch.ENABLED and role is Role.DECODE else None
    return [] if leases is None else ["--middleware", LEASE_API]


def _model_flags(deployment: PDDeployment) -> list[str]:
    model = deployment.spec.model
    flags = ["--served-model-name", model.public_name]
    if model.revision is not None:
        flags += ["--revision", model.revision]
    if model.max_model_len is not None:
        flags += ["--max-model-len", str(model.max_model_len)]
    return [*flags, "--dtype", model.dtype.value]


def _engine_flags(engine: EngineSpec, role: RoleSpec) -> list[str]:
    max_num_seqs = engine.max_num_seqs if role.max_num_seqs is None else role.max_num_seqs
    flags = ["--tensor-parallel-size", str(role.tensor_parallel_size), "--max-num-seqs", str(max_num_seqs)]
    if engine.block_size is not None:
        flags += ["--block-size", str(engine.block_size)]
    if engine.gpu_memory_utilization_percent is not None:
        percent = engine.gpu_memory_utilization_percent
        flags += ["--gpu-memory-utilization", f"{percent // 100}.{percent % 100:02d}"]
    if not role.prefix_caching:
        flags.append("--no-enable-prefix-caching")
    # Without the details an answer does not say how many prompt tokens came from where.
    return [*flags, "--enable-prompt-tokens-details", "--shutdown-timeout", str(engine.shutdown_timeout_seconds)]


def _env(deployment: PDDeployment, role: RoleSpec, endpoint: EngineEndpoint) -> dict[str, str]:
    spec = deployment.spec
    env = {
        **COMMON_ENV,
        **profile_of(spec).env,
        **BACKEND_ENV[backend_of(spec)],
        "VLLM_ENGINE_READY_TIMEOUT_S": str(spec.engine.startup_timeout_seconds),
    }
    if spec.model.is_local or spec.model.source.download is Download.FORBIDDEN:
        env["HF_HUB_OFFLINE"] = "1"
    if endpoint.cpu_cores is not None and profile_of(spec).device is Device.CPU:
        env["VLLM_CPU_OMP_THREADS_BIND"] = endpoint.cpu_cores
    env |= {variable.name: variable.value for variable in merged_env(spec.engine, role) if variable.value is not None}
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = endpoint.side_channel_host
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(endpoint.side_channel_port)
    return env


def merged_env(engine: EngineSpec, role: RoleSpec) -> tuple[EnvVar, ...]:
    """The user's variables of one role: the engine's, with those of the role in place of equal names."""
    return tuple({variable.name: variable for variable in (*engine.env, *role.env)}.values())
