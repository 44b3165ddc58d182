"""The handle store's figures, read when Prometheus asks, so that the hot path pays nothing for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pd_router.core.store import HandleStore


class StoreCollector(Collector):
    """Entries, bytes and the fate of handles; outstanding tokens per holder are an estimate of what D has pinned."""

    def __init__(self, store: HandleStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now

    def collect(self) -> Iterator[Metric]:
        stats = self._store.stats(self._now())
        if stats.entries is not None and stats.bytes is not None:
            yield GaugeMetricFamily("pd_router_handles", "Handles that can be used", value=stats.entries)
            yield GaugeMetricFamily("pd_router_handle_bytes", "Memory that handles take", value=stats.bytes)
        fates = CounterMetricFamily("pd_router_handle_fates", "Handles by how they left the store", labels=["fate"])
        for fate, count in stats.fates.items():
            fates.add_metric([fate], count)
        yield fates
        pinned = GaugeMetricFamily(
            "pd_router_pinned_tokens",
            "Tokens that a decode engine still holds for handed-out handles",
            labels=["engine"],
        )
        for holder, tokens in stats.pinned_tokens.items():
            pinned.add_metric([holder], tokens)
        yield pinned
