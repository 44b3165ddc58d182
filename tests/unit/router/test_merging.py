"""One router's pages from those of its workers: sums where a sum means something, and counters that never go back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_router.core.merged_status import merge_decisions, merge_fleets, merge_status
from pd_router.core.merging import GAUGES, Rule, combine, rule_of
from pd_router.shell.merged_metrics import MergedMetrics, funnel_of, page_of
from pd_router.shell.metrics import Metrics

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^\| `([a-z_]+)` \| gauge ", PAGE.partition("## Operator")[0], re.MULTILINE))
NOTHING = b""


def test_every_gauge_has_a_rule_and_every_rule_a_gauge() -> None:
    assert set(GAUGES) == LISTED


@pytest.mark.parametrize(
    ("name", "kind", "labels", "rule"),
    [
        ("pd_router_requests", "counter", {}, Rule.SUM),
        ("pd_router_ttft_seconds", "histogram", {}, Rule.SUM),
        ("pd_router_requests_created", "gauge", {}, Rule.LEAST),
        ("pd_router_engine_ready", "gauge", {"engine": "d1"}, Rule.LEAST),
        ("pd_router_engines", "gauge", {"state": "ready"}, Rule.LEAST),
        ("pd_router_engines", "gauge", {"state": "not_ready"}, Rule.MOST),
        ("pd_router_engine_breaker_state", "gauge", {"state": "closed"}, Rule.LEAST),
        ("pd_router_engine_breaker_state", "gauge", {"state": "open"}, Rule.MOST),
        ("pd_router_inflight", "gauge", {}, Rule.SUM),
    ],
)
def test_rules(name: str, kind: str, labels: dict[str, str], rule: Rule) -> None:
    assert rule_of(name, kind, labels) is rule


@pytest.mark.parametrize(
    ("rule", "values", "one"),
    [(Rule.SUM, [1, 2, 3], 6), (Rule.LEAST, [1, 0, 1], 0), (Rule.MOST, [1, 0, 1], 1), (Rule.MOST, [5], 5)],
)
def test_combine(rule: Rule, values: list[float], one: float) -> None:
    assert combine(rule, values) == one


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_what_one_does_not_know_is_not_known(rule: Rule, values: list[float]) -> None:
    assert math.isnan(combine(rule, values))


# -- pages -------------------------------------------------------------------------------------------
class Process:
    """A worker's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.count = Counter("pd_router_requests", "Requests", ["api", "status"], registry=self.registry)
        self.legs = Counter("pd_router_engine_legs", "Legs", ["engine"], registry=self.registry)
        self.breaks = Counter("pd_router_engine_incarnations", "Breaks", ["engine"], registry=self.registry)
        self.time = Histogram("pd_router_ttft_seconds", "Time", buckets=(0.1, 1.0), registry=self.registry)
        self.busy = Gauge("pd_router_inflight", "Turns", registry=self.registry)
        self.ready = Gauge("pd_router_engine_ready", "1", ["engine"], registry=self.registry)

    @property
    def page(self) -> bytes:
        return generate_latest(self.registry)


def shown(metrics: Any) -> dict[str, float]:
    lines = page_of(metrics).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_page_of_the_same_shape_with_the_sums() -> None:
    one, other = Process(), Process()
    for process, count in ((one, 2), (other, 3)):
        process.count.labels("chat", "200").inc(count)
        process.time.observe(0.05 * count)
        process.busy.set(count)
        process.ready.labels("d1").set(1)
    other.count.labels("chat", "503").inc()
    other.ready.labels("d1").set(0)
    metrics = MergedMetrics().merge(NOTHING, {0: one.page, 1: other.page}, frozenset({0, 1}))
    found = shown(metrics)
    assert found['pd_router_requests_total{api="chat",status="200"}'] == 5
    assert found['pd_router_requests_total{api="chat",status="503"}'] == 1
    assert found['pd_router_ttft_seconds_bucket{le="0.1"}'] == 1
    assert found["pd_router_ttft_seconds_count"] == 2
    assert found["pd_router_ttft_seconds_sum"] == pytest.approx(0.25)
    assert found["pd_router_inflight"] == 5
    assert found['pd_router_engine_ready{engine="d1"}'] == 0
    heads = [line for line in page_of(metrics).decode().splitlines() if line.startswith("#")]
    assert set(heads) == {line for line in other.page.decode().splitlines() if line.startswith("#")}


def test_a_counter_does_not_go_back_when_a_worker_ends() -> None:
    merged, one, other = MergedMetrics(), Process(), Process()
    one.count.labels("chat", "200").inc(10)
    one.count.labels("chat", "502").inc(4)
    one.legs.labels("gone").inc(7)
    one.time.observe(0.5)
    one.busy.set(9)
    other.count.labels("chat", "200").inc(1)
    merged.merge(NOTHING, {0: one.page, 1: other.page}, frozenset({0, 1}))
    # It counted on after the last look, and is gone with that; its successor begins at 0.
    one.count.labels("chat", "200").inc(5)
    successor = Process()
    for _ in range(2):
        found = shown(merged.merge(NOTHING, {1: other.page, 2: successor.page}, frozenset({1, 2})))
        assert found['pd_router_requests_total{api="chat",status="200"}'] == 11
        assert found['pd_router_requests_total{api="chat",status="502"}'] == 4
        assert found["pd_router_ttft_seconds_count"] == 1
        # A gauge is of what is, and an engine that left takes its series along.
        assert found["pd_router_inflight"] == 0
        assert 'pd_router_engine_legs_total{engine="gone"}' not in found
    successor.count.labels("chat", "200").inc(2)
    found = shown(merged.merge(NOTHING, {2: successor.page}, frozenset({2})))
    assert found['pd_router_requests_total{api="chat",status="200"}'] == 13


def test_what_every_worker_sees_happen_once_happened_once() -> None:
    merged, numbers = MergedMetrics(), iter(range(9))
    workers = {next(numbers): Process() for _ in range(2)}

    def seen_by_all() -> float:
        for worker in workers.values():
            worker.breaks.labels("d1").inc()
        return shown_now()

    def shown_now() -> float:
        pages = {number: worker.page for number, worker in workers.items()}
        found = shown(merged.merge(NOTHING, pages, frozenset(workers)))
        return found['pd_router_engine_incarnations_total{engine="d1"}']

    assert [seen_by_all() for _ in range(5)] == [1, 2, 3, 4, 5]
    for total in (6, 7, 8):
        # One after the other is replaced, and begins at 0.
        del workers[min(workers)]
        workers[next(numbers)] = Process()
        assert shown_now() == total - 1
        assert seen_by_all() == total


def test_an_engine_that_comes_back_begins_anew() -> None:
    merged, one = MergedMetrics(), Process()
    one.legs.labels("d1").inc(7)
    merged.merge(NOTHING, {0: one.page}, frozenset({0}))
    merged.merge(NOTHING, {1: Process().page}, frozenset({1}))
    back = Process()
    back.legs.labels("d1").inc()
    found = shown(merged.merge(NOTHING, {2: back.page}, frozenset({2})))
    assert found['pd_router_engine_legs_total{engine="d1"}'] == 1


def test_a_worker_that_does_not_answer_counts_with_what_it_showed_last() -> None:
    merged, one, other = MergedMetrics(), Process(), Process()
    one.count.labels("chat", "200").inc(10)
    other.count.labels("chat", "200").inc(1)
    both = frozenset({0, 1})
    merged.merge(NOTHING, {0: one.page, 1: other.page}, both)
    found = shown(merged.merge(NOTHING, {1: other.page}, both))
    assert found['pd_router_requests_total{api="chat",status="200"}'] == 11


def test_the_funnel_is_what_the_metrics_say() -> None:
    workers = [Metrics(), Metrics()]
    for count, worker in enumerate(workers, 1):
        worker.funnel["eligible"].inc(2 * count)
        worker.funnel["pulled"].inc(count)
        worker.pulled.inc(100 * count)
    pages = {number: generate_latest(worker.registry) for number, worker in enumerate(workers)}
    merged = MergedMetrics().merge(NOTHING, pages, frozenset(pages))
    assert funnel_of(merged) == {
        **{stage: sum(worker.funnel_counts()[stage] for worker in workers) for stage in workers[0].funnel_counts()}
    }
    assert funnel_of(merged)["pulled_tokens"] == 300


# -- status ------------------------------------------------------------------------------------------
def engine(
    name: str, ready: bool = True, draining: bool = False, retention: str = "", fallback: str = ""
) -> dict[str, Any]:
    about = {"engine": name, "role": "decode", "generation": "g", "ready": ready, "draining": draining}
    return {**about, "retention": retention, "fallback": fallback}


def status(*engines: dict[str, Any], **discovery: Any) -> dict[str, Any]:
    leases = {"kept": 2, "renewed": 7}
    page: dict[str, Any] = {"reuse": "on", "started": 5.0, "engines": list(engines), "funnel": {}, "leases": leases}
    return {**page, "discovery": discovery} if discovery else page


def test_how_long_an_engine_keeps_blocks_is_what_any_worker_knows() -> None:
    pages = [status(engine("d1")), status(engine("d1", retention="Pinned", fallback="no hook")), status(engine("d1"))]
    [merged] = merge_status(True, 1.0, pages, {})["engines"]
    assert (merged["retention"], merged["fallback"]) == ("Pinned", "no hook")


def test_an_engine_is_ready_when_every_worker_says_so() -> None:
    pages = [status(engine("d1"), engine("d2"), engine("d3")), status(engine("d1"), engine("d2", ready=False))]
    merged = merge_status(True, 1.0, pages, {"found": 3})
    assert [(one["engine"], one["ready"]) for one in merged["engines"]] == [("d1", True), ("d2", False), ("d3", False)]
    assert (merged["reuse"], merged["started"], merged["funnel"], merged["workers"]) == ("on", 1.0, {"found": 3}, 2)
    assert merged["leases"] == {"kept": 4, "renewed": 14}
    assert "discovery" not in merged
    assert merge_status(False, 1.0, [status(engine("d1", draining=True)), status(engine("d1"))], {})["engines"] == [
        engine("d1", draining=True)
    ]


def test_the_discovery_that_is_shown_is_the_one_that_knows_least() -> None:
    well = {"listed": True, "trouble": None, "list_age": 1.0}
    old = {**well, "list_age": 60.0}
    troubled = {**well, "trouble": "lost"}
    new = {"listed": False, "trouble": None, "list_age": None}
    for others, worst in (([well], old), ([well, old], troubled), ([well, old, troubled], new)):
        pages = [status(**one) for one in (*others, worst)]
        assert merge_status(True, 1.0, pages, {})["discovery"] == worst
        assert merge_status(True, 1.0, pages[::-1], {})["discovery"] == worst


def test_without_an_answer_there_are_no_engines() -> None:
    assert merge_status(True, 1.0, [], {})["engines"] == []


def test_decisions_in_order_of_time_and_no_more_than_one_process_keeps() -> None:
    pages = {
        0: [{"request_id": "a", "ended_at": 1.0}, {"request_id": "c", "ended_at": 3.0}],
        1: [{"request_id": "b", "ended_at": 2.0}],
    }
    found = merge_decisions(pages, 2)
    assert [(one["request_id"], one["worker"]) for one in found] == [("b", 1), ("c", 0)]


def test_fleets_side_by_side() -> None:
    assert merge_fleets({0: [{"engine": "d1"}], 1: [{"engine": "d1"}]}) == [
        {"engine": "d1", "worker": 0},
        {"engine": "d1", "worker": 1},
    ]
