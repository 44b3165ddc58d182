"""The connector class that vLLM instantiates: it checks the start and puts our scheduler side in.

The worker side is vLLM's own but for what blocks that nobody keeps need: reads, notifications and leases stay.
"""

from __future__ import annotations

import os
from typing import Any, Final

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform

from pd_connector import compat
from pd_connector.core.counts import Changes
from pd_connector.core.startup import Configuration, ConfigurationRefused, HandleInStream, configuration_faults
from pd_connector.shell import cpu, stream, worker
from pd_connector.shell.scheduler import PDPullScheduler
from pd_connector.shell.stats import PDPromMetrics, PDStats, accept_ours

logger = init_logger("vllm.pd_connector")
_RUST_FRONTEND: Final = "VLLM_USE_RUST_FRONTEND"


class PDConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector with proofs, guards and reports."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Refuse impossible configurations.

        Raises:
            ConfigurationRefused: naming everything that must change.
        """
        version = compat.require_supported(compat.installed_version())
        in_scheduler = role == KVConnectorRole.SCHEDULER
        seen = _observe_stream(vllm_config, version) if in_scheduler else HandleInStream.UNKNOWN
        faults = configuration_faults(read_configuration(vllm_config, seen))
        if faults:
            raise ConfigurationRefused("pd_connector refuses to start: " + "; ".join(faults))
        if current_platform.device_type == "cpu":
            cpu.rest_between_steps()
            cpu.rest_between_polls()
            with cpu.on_own_cores():
                super().__init__(vllm_config, role, kv_cache_config)
        else:
            super().__init__(vllm_config, role, kv_cache_config)
        if not in_scheduler:
            worker.adopt(self.connector_worker)
        if in_scheduler:
            self._changes = Changes()
            self.connector_scheduler = PDPullScheduler(vllm_config, self.engine_id, kv_cache_config)
            logger.info("pd_connector is active: vLLM %s, handle in streams: %s", compat.installed_version(), seen)
            if seen is HandleInStream.UNKNOWN:
                logger.warning("Whether the API server sends KV handles in streams can't be seen from this engine core")
            elif seen is HandleInStream.NOT_IN_MESSAGES:
                logger.warning(
                    "Streamed messages (/v1/messages) get no reuse: the API server has not loaded the plugin"
                )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's scheduler shows its block pool."""
        super().bind_gpu_block_pool(gpu_block_pool)
        # The manager that owns the pool is there by now, in each release that calls this.
        watermark = getattr(getattr(self, "_kv_cache_manager", None), "watermark_blocks", 0)
        self.connector_scheduler.bind_block_pool(gpu_block_pool, watermark)

    def update_connector_output(self, connector_output: Any) -> None:
        """A step is over. Its workers' statistics will be joined with ours."""
        super().update_connector_output(connector_output)
        if connector_output.kv_connector_stats is not None:
            accept_ours(connector_output.kv_connector_stats.data)

    def has_pending_block_frees(self) -> bool:
        """vLLM asks before it preempts a request; if so, the request is tried again in the next step."""
        return self.connector_scheduler.relieve()

    def get_kv_connector_stats(self) -> Any:
        """In the scheduler, what has changed about finished turns' blocks; in a worker, its transfers."""
        if self.connector_worker is not None:
            return super().get_kv_connector_stats()
        changed = self._changes.of(self.connector_scheduler.counts())
        return PDStats(data=changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Where `/metrics` is served: the statistics of a step."""
        return PDStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Where `/metrics` is served: its metrics."""
        return PDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """vLLM resets its KV cache, for a sleep or new weights."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.forget_blocks()
        return True


def read_configuration(vllm_config: Any, seen: HandleInStream) -> Configuration:
    """What of vLLM's configuration decides about a start."""
    transfer = vllm_config.kv_transfer_config
    return Configuration(
        connector=transfer.kv_connector,
        role=transfer.kv_role,
        engine_id=transfer.engine_id,
        buffer_device=transfer.kv_buffer_device,
        device=current_platform.device_type,
        extra=transfer.kv_connector_extra_config,
        side_channel_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        stream=seen,
        rust_frontend=_is_set(os.environ.get(_RUST_FRONTEND)),
    )


def _observe_stream(vllm_config: Any, version: tuple[int, int]) -> HandleInStream:
    parallel = vllm_config.parallel_config
    elsewhere = getattr(parallel, "data_parallel_backend", "mp") == "ray"
    seen = stream.observe(version, os.environ, started_elsewhere=elsewhere)
    if seen is HandleInStream.NATIVE and _is_set(os.environ.get(_RUST_FRONTEND)):
        return HandleInStream.NOT_IN_MESSAGES
    return seen


def _is_set(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on")
