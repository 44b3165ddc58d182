"""The handle store's figures: those of its contents, read when Prometheus asks, so that the hot path pays nothing for
them; and how a store that is reached over the network behaves, all of it labelled from closed sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pd_router.core.store import HandleStore
from pd_router.core.store_settings import FailureKind
from pd_router.shell.counts import Counter
from pd_router.shell.metrics import Bound, BoundPair, Metrics

OPERATIONS = ("open", "put", "forget", "end")
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


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
        handles = GaugeMetricFamily(
            "pd_router_pinned_handles",
            "Handles that a decode engine gave out and still holds blocks for",
            labels=["engine"],
        )
        for holder, count in stats.pinned_handles.items():
            handles.add_metric([holder], count)
        yield handles


class SharedStoreMetrics:
    """Of the connection to a shared store. A router with a store of its own has them, too: at rest, and up."""

    def __init__(self, metrics: Metrics) -> None:
        self.up = Gauge(
            "pd_router_handle_store_up",
            "1 when the handle store can be used; always so for the one in memory",
            registry=metrics.registry,
        )
        seconds = Histogram(
            "pd_router_handle_store_seconds",
            "Operations of a shared handle store, in seconds, failed ones included",
            ["operation"],
            buckets=_SECONDS,
            registry=metrics.registry,
        )
        self.seconds = {operation: seconds.labels(operation) for operation in OPERATIONS}
        failures = Counter(
            "pd_router_handle_store_failures",
            "Operations of a shared handle store that failed; the turn went on without",
            ["operation", "kind"],
            metrics.registry,
        )
        kinds = tuple(kind.value for kind in FailureKind)
        self.failures = BoundPair(failures, OPERATIONS, kinds)
        skipped = Counter(
            "pd_router_handle_store_skipped",
            "Operations that were not tried because a shared handle store was down",
            ["operation"],
            metrics.registry,
        )
        self.skipped = Bound(skipped, OPERATIONS)
        metrics.closed |= {
            "pd_router_handle_store_seconds.operation": OPERATIONS,
            "pd_router_handle_store_failures.operation": OPERATIONS,
            "pd_router_handle_store_failures.kind": kinds,
            "pd_router_handle_store_skipped.operation": OPERATIONS,
        }
