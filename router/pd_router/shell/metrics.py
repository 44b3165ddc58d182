"""The router's Prometheus metrics, bound once so that the hot path increments plain objects.

Separate from the turn so that names, help texts and label values are in one place; every label value is from a closed
set.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

STAGES = ("eligible", "found", "live", "attached", "proven", "pulled")
"""Of the reuse funnel, in order."""

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Bound(dict[str, Counter]):
    """The children of a counter with one label, each looked up once: `labels()` costs more than the increment."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __missing__(self, value: str) -> Counter:
        child: Counter = self._counter.labels(value)
        self[value] = child
        return child


class Metrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", "api", "status")
        self.endings = Bound(self._counter("endings", "Decode legs by how they ended", "ending"))
        self.funnel = Bound(
            self._counter(
                "reuse_stage",
                f"Turns that reached a stage of reuse: {', '.join(STAGES)}",
                "stage",
            )
        )
        self.drops = Bound(self._counter("reuse_drop", "Turns that left the reuse funnel, by reason", "reason"))
        self.linked = Bound(self._counter("linked", "Handles found, by what linked the turns", "by"))
        self.pulled = self._counter(
            "pulled_tokens", "Tokens that prefill read back from decode, as prefill reports them"
        )
        self.proven = self._counter("proven_tokens", "Tokens of attached handles that the proof confirmed")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as decode reports them")
        self.retries = self._counter("retries", "Turns tried again, by what failed", "leg", "reason")
        self.leg_failures = self._counter("leg_failures", "Legs that failed", "leg", "reason")
        self.disconnects = Bound(
            self._counter("client_disconnects", "Clients that left before their answer was complete", "stage")
        )
        self.stored = self._counter("handles_stored", "Handles kept for a next turn")
        self.not_stored = Bound(
            self._counter("handles_not_stored", "Finished turns without a handle to keep, by reason", "reason")
        )
        self.queue_seconds = self._histogram("queue_seconds", "Waiting for admission")
        self.prefill_seconds = self._histogram("prefill_seconds", "Prefill leg, request to answer")
        self.handoff_seconds = self._histogram("handoff_seconds", "From prefill's answer to decode's first content")
        self.ttft_seconds = self._histogram("ttft_seconds", "From the request's arrival to the first content sent")
        self.turn_seconds = self._histogram("turn_seconds", "From the request's arrival to the end of the answer")
        self.inflight = Gauge("pd_router_inflight", "Turns being served", registry=self.registry)
        self.queued = Gauge("pd_router_queued", "Turns waiting for admission", registry=self.registry)
        self.engine_ready = Gauge(
            "pd_router_engine_ready", "1 when the engine takes work", ["role", "engine"], registry=self.registry
        )
        self.engine_breaks = self._counter(
            "engine_incarnations", "Times an engine's process was lost and its handles purged", "role", "engine"
        )

    def forget_engine(self, role: str, engine: str) -> None:
        """Drop the series of an engine that left, so that pods that come and go don't add up."""
        self.engine_ready.remove(role, engine)
        self.engine_breaks.remove(role, engine)

    def funnel_counts(self) -> dict[str, int]:
        """Turns per stage of reuse and tokens pulled since the start, for `/status`."""
        counts = {stage: _count(self.funnel[stage]) for stage in STAGES}
        return {**counts, "pulled_tokens": _count(self.pulled)}

    def register(self, collector: Collector) -> None:
        """Add figures that are read at scrape time."""
        self.registry.register(collector)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pd_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pd_router_{name}", f"{text}, in seconds", buckets=_LATENCY, registry=self.registry)


def _count(counter: Counter) -> int:
    return next(int(sample.value) for metric in counter.collect() for sample in metric.samples)
