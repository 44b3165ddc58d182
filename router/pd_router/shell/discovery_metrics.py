"""What discovery does, and how many engines there are by role and state, for Prometheus.

Separate from the turn's metrics: nothing here is touched by a turn, and the counts of engines are read from the fleet
when Prometheus asks.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from pd_router.shell.fleet import Fleet
from pd_router.shell.metrics import Bound
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

STATES = ("ready", "not_ready", "draining")


class DiscoveryMetrics:
    """Metrics of the Kubernetes discovery."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, label: str) -> Bound:
            return Bound(Counter(f"pd_router_discovery_{name}", text, [label], registry=registry))

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pd_router_discovery_{name}", text, registry=registry)

        self.lists = counter("lists", "Lists of all pods, by outcome: ok, failed", "outcome")
        self.watch_ends = counter("watch_ends", "Watches that ended, by reason; a list follows each", "reason")
        self.events = counter("events", "Events of the watch, by type", "type")
        self.connected = gauge("connected", "1 when the last list of pods succeeded and watches don't keep failing")
        self.event_age = gauge("event_age_seconds", "Since the last list, event or bookmark; NaN before the first list")
        self.list_age = gauge("list_age_seconds", "Since the last list of all pods; NaN before the first one")


class FleetCollector(Collector):
    """Engines by role and state."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        found = GaugeMetricFamily("pd_router_engines", "Engines, by role and state", labels=["role", "state"])
        for role in (ROLE_PREFILL, ROLE_DECODE):
            count = Count(
                "draining" if member.draining else "ready" if member.ready else "not_ready"
                for member in self._fleet.of_role(role)
            )
            for state in STATES:
                found.add_metric([role, state], count[state])
        yield found
