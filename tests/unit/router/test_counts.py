"""Our counters and histograms show what those of Prometheus's client library show."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pd_router.shell.counts import Counter, Histogram

BOUNDS = (0.005, 0.25, 1.0, 30.0, 300.0)
LABELS = [("a", "x"), ("b", 'quoted "y"')]


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_counter_looks_like_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Counter("pd_things", "Things", ["one", "two"], ours)
    other = prometheus_client.Counter("pd_things", "Things", ["one", "two"], registry=theirs)
    for values in LABELS:
        mine.labels(*values).inc()
        mine.labels(*values).inc(6)
        other.labels(*values).inc(7)
    mine.labels("c", "gone").inc()
    mine.remove("c", "gone")
    assert page(ours) == page(theirs)


def test_a_counter_without_labels_begins_at_zero() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Counter("pd_things", "Things", (), ours).labels()
    prometheus_client.Counter("pd_things", "Things", registry=theirs)
    assert page(ours) == page(theirs)


def test_a_series_must_have_all_labels() -> None:
    with pytest.raises(ValueError, match="labels"):
        Counter("pd_things", "Things", ["one", "two"], CollectorRegistry()).labels("a")


@pytest.mark.parametrize("value", [0.0, 0.005, 0.0051, 0.25, 1.0, 299.9, 300.0, 301.0])
def test_a_histogram_looks_like_the_librarys(value: float) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("pd_seconds", "Time", BOUNDS, ours)
    other = prometheus_client.Histogram("pd_seconds", "Time", buckets=BOUNDS, registry=theirs)
    for one in (mine, other):
        one.observe(value)
        one.observe(0.25)
    assert page(ours) == page(theirs)


def test_the_time_of_creation_is_shown_as_the_library_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Histogram("pd_seconds", "Time", BOUNDS, ours)
    Counter("pd_things", "Things", (), ours).labels()
    prometheus_client.Histogram("pd_seconds", "Time", buckets=BOUNDS, registry=theirs)
    prometheus_client.Counter("pd_things", "Things", registry=theirs)
    created = [
        [line.partition(" ")[0] if line[0] != "#" else line for line in generate_latest(one).decode().splitlines()]
        for one in (ours, theirs)
    ]
    assert created[0] == created[1]
    assert sum("_created" in line for line in created[0]) == 6
