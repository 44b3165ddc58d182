"""Pairs of engines that get no transfers, read from the fleet when Prometheus asks.

Separate because a pair has a series only while it is in quarantine: as many as there are pairs would be the square of
the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pd_router.core.pairs import Pairs


class PairCollector(Collector):
    """Args: now: the router's monotonic clock, in seconds."""

    def __init__(self, pairs: Pairs, now: Callable[[], float]) -> None:
        self._pairs, self._now = pairs, now

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        found = GaugeMetricFamily(
            "pd_router_pair_quarantined",
            "1 while a pair of engines gets no transfers in this direction, 0.5 while its probe is due or running",
            labels=["prefill", "decode", "direction"],
        )
        for pair, breaker in self._pairs.tripped():
            labels = [pair.prefill, pair.decode, pair.direction.value]
            found.add_metric(labels, 1.0 if breaker.state(now) == "open" else 0.5)
        yield found
