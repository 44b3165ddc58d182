"""The router's Prometheus metrics, bound once so that the hot path increments plain objects.

Separate from the turn so that names, help texts and label values are in one place. Every label value is from a closed
set, and what is in none is counted as `other`: no word of a client or of an engine can become a series. The names of
engines are the one exception; there are as many as the fleet has, and one that leaves takes its series along.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.registry import Collector

from pd_router.core.fields import Api
from pd_router.core.linking import HISTORY
from pd_router.core.passed import PASSED
from pd_router.core.policy import Drop, NotStored
from pd_router.core.sse import Ending
from pd_router.core.store import Fate
from pd_router.shell.counts import Count, Counter, Histogram
from pd_router.shell.exchange import Failure
from pd_wire.names import ID_FIELDS, ROLE_DECODE, ROLE_PREFILL

STAGES: Final = ("eligible", "found", "live", "attached", "proven", "pulled")
"""Of the reuse funnel, in order."""
LEGS: Final = (ROLE_PREFILL, ROLE_DECODE)
APIS: Final = (*(api.value for api in Api), *PASSED)
"""APIs of turns, and paths of the endpoints that one engine serves."""
STATUSES: Final = tuple(
    str(code)
    for code in (
        *(200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 417, 421, 422, 426, 429, 431, 499),
        *(500, 501, 502, 503, 504),
    )
)
"""499: the client left before its answer."""
LEG_REASONS: Final = tuple(
    dict.fromkeys(
        (
            *(failure.value for failure in Failure),
            *(ending.value for ending in Ending if ending is not Ending.CLEAN),
            *("malformed_answer", "malformed_handle", "foreign_host", "no_engine"),
            *("refused", "status_429", "status_503", "status_5xx"),
        )
    )
)
"""Of `LegFailed`."""
RESULTS: Final = ("ok", "refused", "failed", "abandoned")
"""Of a leg. `refused`: the engine's answer to this one request; `abandoned`: nobody waited for the end."""
LEFT_AT: Final = ("prefill", "decode", "stream")
OTHER: Final = "other"
UNKNOWN: Final = "unknown"

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Bound(dict[str, Count]):
    """The series of a counter with one label, each looked up once.

    All of them exist from the start, since Prometheus sees no increase in a series that begins at 1.
    """

    def __init__(self, counter: Counter, values: Iterable[str]) -> None:
        super().__init__({str(value): counter.labels(str(value)) for value in values})
        self._counter = counter

    def __missing__(self, value: str) -> Count:
        return self._counter.labels(OTHER)


class BoundPair(dict[tuple[str, str], Count]):
    """The same for two labels, of which not every pair occurs; a series is made when it is first asked for."""

    def __init__(self, counter: Counter, first: Iterable[str], second: Iterable[str]) -> None:
        super().__init__()
        self._counter = counter
        self._first, self._second = frozenset(first), frozenset(second)

    def __missing__(self, pair: tuple[str, str]) -> Count:
        first, second = pair
        known = first in self._first, second in self._second
        series = self._counter.labels(first if known[0] else OTHER, second if known[1] else OTHER)
        if all(known):
            self[pair] = series
        return series


class Metrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.closed: dict[str, tuple[str, ...]] = {}
        """Metric and label, as `pd_router_retries.leg`, to the values that it may have besides `other`."""
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "pd_router_build_info", "1; the labels say what runs", ["version", "python"], registry=self.registry
        )
        build.labels(version_here(), platform.python_version()).set(1)
        self.requests = self._pair(
            "requests", "Requests answered, refusals included, health checks not", api=APIS, status=STATUSES
        )
        for api in _values(Api):
            self.requests[api, "200"].inc(0)  # see `Bound`: the first turns would be no increase
        self.endings = self._bound("endings", "Decode legs by how they ended", ending=_values(Ending))
        self.funnel = self._bound(
            "reuse_stage", f"Turns that reached a stage of reuse, in order: {', '.join(STAGES)}", stage=STAGES
        )
        self.drops = self._bound("reuse_drop", "Turns that left the reuse funnel, by reason", reason=_values(Drop))
        self.linked = self._bound("linked", "Handles attached, by what linked the turns", by=(HISTORY, *ID_FIELDS))
        self.pulled = self._single(
            "pulled_tokens", "Prompt tokens that prefill read back from decode, as prefill reports them"
        )
        self.gone = self._single(
            "gone_tokens", "Proven tokens that could not be read back: decode had reused their blocks"
        )
        self.wasted = self._single(
            "wasted_tokens", "Tokens that prefill read back in vain: decode reused their blocks meanwhile"
        )
        self.proven = self._single("proven_tokens", "Tokens of attached handles that the proof confirmed")
        self.prompt_tokens = self._single("prompt_tokens", "Prompt tokens, as prefill reports them")
        self.cached_tokens = self._single(
            "cached_tokens", "Prompt tokens that prefill did not compute, read back or cached there, as it reports them"
        )
        self.retries = self._pair("retries", "Turns tried again, by what failed", leg=LEGS, reason=LEG_REASONS)
        self.retries_refused = self._single(
            "retries_refused", "Turns that ended with their failure because the retry budget was used up"
        )
        self.leg_failures = self._pair("leg_failures", "Legs that failed", leg=LEGS, reason=LEG_REASONS)
        self.disconnects = self._bound(
            "client_disconnects", "Clients that left before their answer was complete, by where the turn was",
            stage=LEFT_AT,
        )  # fmt: skip
        self.stored = self._single("handles_stored", "Handles kept for a next turn")
        self.lost = self._bound(
            "handles_lost", "Handles that were spent on a turn which an engine refused, by the leg it refused", leg=LEGS
        )
        self.not_stored = self._bound(
            "handles_not_stored", "Finished turns without a handle to keep, by reason", reason=_values(NotStored)
        )
        self.queue_seconds = self._histogram("queue_seconds", "Waiting for admission")
        self.prefill_seconds = self._histogram("prefill_seconds", "Prefill leg, request to answer")
        self.handoff_seconds = self._histogram(
            "handoff_seconds", "Streamed answers: from prefill's answer to the head of decode's"
        )
        self.first_token_seconds = self._histogram(
            "first_token_seconds",
            "Streamed answers: from the head of decode's answer to its first content; decode's read of prefill's KV "
            "is in it",
        )
        self.ttft_seconds = self._histogram(
            "ttft_seconds", "Streamed answers: from the request's arrival to the first content sent"
        )
        self.turn_seconds = self._histogram("turn_seconds", "From the request's arrival to the end of the answer")
        Gauge("pd_router_workers", "Processes that serve clients", registry=self.registry).set(1)
        worker_restarts(self.registry)
        self.inflight = Gauge("pd_router_inflight", "Requests being served", registry=self.registry)
        self.queued = Gauge("pd_router_queued", "Requests waiting for admission", registry=self.registry)
        self.legs = dict.fromkeys(LEGS, 0)
        legs = Gauge("pd_router_leg_inflight", "Legs being served by an engine", ["leg"], registry=self.registry)
        for leg in LEGS:
            legs.labels(leg).set_function(functools.partial(self.legs.__getitem__, leg))
        self.closed["pd_router_leg_inflight.leg"] = LEGS
        self.engine_ready = Gauge(
            "pd_router_engine_ready", "1 when the engine takes work", ["role", "engine"], registry=self.registry
        )
        self.engine_breaks = self._counter(
            "engine_incarnations", "Times an engine's process was lost and its handles purged", "role", "engine"
        )
        self.closed["pd_router_handle_fates.fate"] = _values(Fate)
        self.engine_legs: dict[tuple[str, str], dict[str, int]] = {}
        """Legs that ended, by role, engine and result: one of `RESULTS`."""

    def add_engine(self, role: str, engine: str) -> None:
        """A new engine, not ready yet; its series begin at 0."""
        self.engine_ready.labels(role, engine).set(0)
        self.engine_breaks.labels(role, engine)
        self.engine_legs[role, engine] = dict.fromkeys(RESULTS, 0)

    def leg_ended(self, role: str, engine: str, result: str) -> None:
        """A leg is over, with one of `RESULTS`. One of an engine that has left meanwhile is not counted."""
        counts = self.engine_legs.get((role, engine))
        if counts is not None:
            counts[result] += 1

    def forget_engine(self, role: str, engine: str) -> None:
        """Drop the series of an engine that left, so that pods that come and go don't add up."""
        self.engine_ready.remove(role, engine)
        self.engine_breaks.remove(role, engine)
        self.engine_legs.pop((role, engine), None)

    def funnel_counts(self) -> dict[str, int]:
        """Turns per stage of reuse and tokens pulled since the start, for `/status`."""
        counts = {stage: self.funnel[stage].value for stage in STAGES}
        return {**counts, "pulled_tokens": self.pulled.value, "gone_tokens": self.gone.value}

    def register(self, collector: Collector) -> None:
        """Add figures that are read at scrape time."""
        self.registry.register(collector)

    def _bound(self, name: str, text: str, **label: tuple[str, ...]) -> Bound:
        [(key, values)] = label.items()
        self.closed[f"pd_router_{name}.{key}"] = values
        return Bound(self._counter(name, text, key), values)

    def _pair(self, name: str, text: str, **labels: tuple[str, ...]) -> BoundPair:
        self.closed |= {f"pd_router_{name}.{key}": values for key, values in labels.items()}
        return BoundPair(self._counter(name, text, *labels), *labels.values())

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pd_router_{name}", text, labels, self.registry)

    def _single(self, name: str, text: str) -> Count:
        return self._counter(name, text).labels()

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pd_router_{name}", f"{text}, in seconds", _LATENCY, self.registry)


def worker_restarts(registry: CollectorRegistry) -> Count:
    """Stays 0 in a process that serves clients; a supervisor counts."""
    text = "Workers that ended by themselves and were replaced"
    return Counter("pd_router_worker_restarts", text, (), registry).labels()


def _values(kind: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(value) for value in kind)


def version_here() -> str:
    """Of this program."""
    try:
        return version("pd-operator")
    except PackageNotFoundError:  # run from the sources
        return UNKNOWN
