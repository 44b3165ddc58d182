"""No word of a client or an engine becomes a label, and an engine that leaves takes its series along."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pd_router
from pd_router.core.placement import Loads
from pd_router.shell.discovery_metrics import BREAKER_STATES, TROUBLES, DiscoveryMetrics, FleetCollector
from pd_router.shell.exchange import Address
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.metrics import LEG_REASONS, OTHER, RESULTS, Bound, BoundPair, Metrics
from pd_router.shell.pod_api import Trouble


def series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def odd_values(count: int) -> list[str]:
    """Names as clients make them up: models, paths, keys, ids, other people's words."""
    chance = random.Random(7)
    pieces = ["gpt-4", "/v1/../etc", "sk-", "Ü🙂", '"', "\\", "\n", "{le=", "tenant:", " ", "\x00", "9" * 40]
    return [f"{chance.choice(pieces)}{number}{chance.choice(pieces)}" for number in range(count)]


def test_ten_thousand_odd_values_make_no_series() -> None:
    metrics = Metrics()
    discovery = DiscoveryMetrics(metrics)
    holders = [*vars(metrics).values(), *vars(discovery).values()]
    singles = [one for one in holders if isinstance(one, Bound)]
    pairs = [one for one in holders if isinstance(one, BoundPair)]
    assert len(singles) >= 9
    assert len(pairs) >= 3
    for one in singles:
        one[OTHER].inc(0)
    for pair in pairs:
        pair[OTHER, OTHER].inc(0)
        for value in pair._first:
            pair[value, OTHER].inc(0)
        for value in pair._second:
            pair[OTHER, value].inc(0)
    before = series(metrics)
    for value in odd_values(10_000):
        for one in singles:
            one[value].inc()
        for pair in pairs:
            pair[value, value].inc()
            pair[next(iter(pair._first)), value].inc()
            pair[value, next(iter(pair._second))].inc()
    assert series(metrics) == before
    assert metrics.drops["never heard of"].value == 10_000
    assert all(len(one) < 100 for one in (*singles, *pairs)), "what is looked up is kept"


def test_every_label_is_an_engine_or_of_a_closed_set() -> None:
    metrics = Metrics()
    DiscoveryMetrics(metrics)
    fleet = Fleet(metrics, frozenset(), lambda _key: 0, lambda _member: None)
    fleet.add(Member("d0", "decode", Address("h", 1), ""))
    metrics.register(FleetCollector(fleet, Loads(), metrics, lambda: 0.0))
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label in set(sample.labels) - {"engine", "role", "le", "version", "python"}:
                assert sample.labels[label] in metrics.closed[f"{family.name}.{label}"], sample


def test_series_with_a_closed_label_begin_at_zero() -> None:
    # Prometheus sees no increase in a series that appears with 1.
    found = series(Metrics())
    assert ("pd_router_reuse_stage_total", (("stage", "pulled"),)) in found
    assert ("pd_router_reuse_drop_total", (("reason", "refused_by_prefill"),)) in found


def test_the_words_of_failures_are_known() -> None:
    """A new reason must be listed, or it would be counted as `other`."""
    found: set[str] = set()
    for path in Path(pd_router.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LegFailed":
                found |= {one.value for one in ast.walk(node.args[1]) if isinstance(one, ast.Constant)}
    assert {"malformed_answer", "status_429", "no_engine"} <= found
    assert found <= set(LEG_REASONS)


def test_the_words_of_discovery_are_those_of_its_api() -> None:
    assert set(TROUBLES) == {trouble.value for trouble in Trouble}


def test_engines_that_come_and_go_leave_no_series() -> None:
    metrics = Metrics()
    fleet = Fleet(metrics, frozenset(), lambda _key: 0, lambda _member: None)
    metrics.register(FleetCollector(fleet, Loads(), metrics, lambda: 0.0))
    before = series(metrics)
    for number in range(100):
        key = f"qwen-decode-{number}"
        fleet.add(Member(key, "decode", Address("h", 1), ""))
        for result in RESULTS:
            metrics.leg_ended("decode", key, result)
        fleet.broken(key)
        assert len(series(metrics)) > len(before)
        fleet.remove(key)
        metrics.leg_ended("decode", key, "ok")  # a stream that outlives its engine's place in the fleet
    assert series(metrics) == before


def test_what_is_told_about_an_engine() -> None:
    metrics, loads = Metrics(), Loads()
    fleet = Fleet(metrics, frozenset(), lambda _key: 0, lambda _member: None)
    member = Member("p0", "prefill", Address("h", 1), "")
    fleet.add(member)
    metrics.register(FleetCollector(fleet, loads, metrics, lambda: 1.0))
    loads.open("p0", 500)
    for _ in range(3):
        member.breaker.failed(0.0)

    def value(name: str, **labels: str) -> Any:
        return metrics.registry.get_sample_value(f"pd_router_{name}", labels)

    assert value("engine_turns", role="prefill", engine="p0") == 1
    assert value("engine_prefill_tokens", role="prefill", engine="p0") == 500
    assert value("engine_breaker_state", role="prefill", engine="p0", state="open") == 1
    assert [value("engine_breaker_state", role="prefill", engine="p0", state=one) for one in BREAKER_STATES] == [
        0,
        0,
        1,
    ]
    assert value("engines", role="prefill", state="not_ready") == 1
