"""What discovery does, and the engines as they are now, for Prometheus.

Separate from the turn's metrics: nothing here is touched by a turn, and what is told about engines is read from the
fleet when Prometheus asks.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pd_router.core.placement import Loads
from pd_router.shell.counts import Counter
from pd_router.shell.fleet import Fleet
from pd_router.shell.metrics import RESULTS, Bound, Metrics
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

STATES: Final = ("ready", "not_ready", "draining")
BREAKER_STATES: Final = ("closed", "half_open", "open")
ROLES: Final = (ROLE_PREFILL, ROLE_DECODE)
TROUBLES: Final = (
    *("done", "expired", "stalled", "lost", "refused", "throttled", "server_error", "malformed", "credentials"),
)
"""How talking to the API server ends; `pod_api.Trouble` isn't imported: it brings the Kubernetes client along."""
EVENTS: Final = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")


class DiscoveryMetrics:
    """Metrics of the Kubernetes discovery."""

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry

        def counter(name: str, text: str, label: str, values: tuple[str, ...]) -> Bound:
            metrics.closed[f"pd_router_discovery_{name}.{label}"] = values
            return Bound(Counter(f"pd_router_discovery_{name}", text, [label], registry), values)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pd_router_discovery_{name}", text, registry=registry)

        self.lists = counter("lists", "Lists of all pods, by outcome", "outcome", ("ok", "failed"))
        self.watch_ends = counter(
            "watch_ends", "Watches that ended, by reason; a list follows each", "reason", TROUBLES
        )
        self.events = counter("events", "Events of the watch, by type", "type", EVENTS)
        self.connected = gauge("connected", "1 when the last list of pods succeeded and watches don't keep failing")
        self.event_age = gauge("event_age_seconds", "Since the last list, event or bookmark; NaN before the first list")
        self.list_age = gauge("list_age_seconds", "Since the last list of all pods; NaN before the first one")


class FleetCollector(Collector):
    """Engines by role and state; of each engine its breaker and its load."""

    def __init__(self, fleet: Fleet, loads: Loads, metrics: Metrics, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._loads = loads
        self._metrics = metrics
        self._now = now
        metrics.closed |= {
            "pd_router_engine_legs.result": RESULTS,
            "pd_router_engines.role": ROLES,
            "pd_router_engines.state": STATES,
            "pd_router_engine_breaker_state.state": BREAKER_STATES,
        }

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        found = GaugeMetricFamily("pd_router_engines", "Engines, by role and state", labels=["role", "state"])
        breakers = GaugeMetricFamily(
            "pd_router_engine_breaker_state",
            "1 for the state of the engine's circuit breaker: an open one takes no turn, a half-open one a trial",
            labels=["role", "engine", "state"],
        )
        turns = GaugeMetricFamily(
            "pd_router_engine_turns",
            "Turns that have a place on the engine; decode's is taken before prefill begins",
            labels=["role", "engine"],
        )
        tokens = GaugeMetricFamily(
            "pd_router_engine_prefill_tokens",
            "Prompt tokens, estimated, that the engine was asked to prefill and has not answered for",
            labels=["role", "engine"],
        )
        for role in ROLES:
            members = self._fleet.of_role(role)
            count = Tally(
                "draining" if member.draining else "ready" if member.ready else "not_ready" for member in members
            )
            for state in STATES:
                found.add_metric([role, state], count[state])
            for member in members:
                key = [role, member.key]
                state = member.breaker.state(now)
                for one in BREAKER_STATES:
                    breakers.add_metric([*key, one], float(one == state))
                turns.add_metric(key, self._loads.turns(member.key))
                tokens.add_metric(key, self._loads.tokens(member.key))
        legs = CounterMetricFamily(
            "pd_router_engine_legs", "Legs that ended, by engine and result", labels=["role", "engine", "result"]
        )
        for (role, engine), results in self._metrics.engine_legs.items():
            for result, ended in results.items():
                legs.add_metric([role, engine, result], ended)
        yield from (found, breakers, turns, tokens, legs)
