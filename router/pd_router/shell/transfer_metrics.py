"""Transfers between engines, read from the fleet when Prometheus asks: pairs that get none, and what became of handles.

Separate because a pair has a series only while it is in quarantine: as many as there are pairs would be the square of
the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pd_router.core.pairs import Direction
from pd_router.core.pulls import Pull
from pd_router.shell.fleet import Fleet
from pd_router.shell.metrics import Metrics
from pd_wire.names import ROLE_PREFILL


class TransferCollector(Collector):
    """Args: now: the router's monotonic clock, in seconds."""

    def __init__(self, fleet: Fleet, metrics: Metrics, now: Callable[[], float]) -> None:
        self._fleet, self._now = fleet, now
        metrics.closed |= {
            "pd_router_pair_quarantined.direction": tuple(direction.value for direction in Direction),
            "pd_router_engine_pulls.outcome": tuple(pull.value for pull in Pull),
        }

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        found = GaugeMetricFamily(
            "pd_router_pair_quarantined",
            "1 while a pair of engines gets no transfers in this direction, 0.5 while its probe is due or running",
            labels=["prefill", "decode", "direction"],
        )
        for pair, breaker in self._fleet.pairs.tripped():
            labels = [pair.prefill, pair.decode, pair.direction.value]
            found.add_metric(labels, 1.0 if breaker.state(now) == "open" else 0.5)
        pulls = CounterMetricFamily(
            "pd_router_engine_pulls",
            "Handles that a prefill engine was sent, by what became of them; an engine that never pulls has a fault",
            labels=["engine", "outcome"],
        )
        for member in self._fleet.of_role(ROLE_PREFILL):
            for pull, count in member.pulls.items():
                pulls.add_metric([member.key, pull.value], count)
        yield from (found, pulls)
