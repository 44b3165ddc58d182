"""Our numbers on the way that vLLM's connector metrics take: scheduler, engine core, API server, `/metrics`.

On that way dictionaries of lists are joined key by key, and a key that one side lacks raises. So the class for all
sides has every key, vLLM's and ours.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from pd_connector.core.counts import NUMBERS
from pd_wire import names


class PDStats(NixlKVConnectorStats):  # type: ignore[misc]
    """What happened in a step or more: vLLM's transfers and our numbers."""

    def __post_init__(self) -> None:
        given = self.data
        self.reset()
        self.data.update(given)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        accept_ours(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return super().is_empty() and not any(self.data[key] for key in NUMBERS)


def accept_ours(data: dict[str, Any]) -> None:
    """Let numbers of ours be joined to statistics that a worker has made."""
    for key in NUMBERS:
        data.setdefault(key, [])


class PDPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's metrics of its connector, and on decode ours."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.pd_metrics: dict[str, Any] = {}
        if vllm_config.kv_transfer_config.kv_role != names.KV_ROLES[names.ROLE_DECODE]:
            return
        for key, number in NUMBERS.items():
            if number.total:
                metric = metric_types[Counter](name=number.name, documentation=number.meaning, labelnames=labelnames)
            else:
                metric = metric_types[Gauge](
                    name=number.name,
                    documentation=number.meaning,
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                )
            self.pd_metrics[key] = create_metric_per_engine(metric, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the numbers of a step."""
        super().observe(transfer_stats_data, engine_idx)
        for key, metric in self.pd_metrics.items():
            for value in transfer_stats_data.get(key, ()):
                if NUMBERS[key].total:
                    metric[engine_idx].inc(value)
                else:
                    metric[engine_idx].set(value)
