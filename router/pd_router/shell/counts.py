"""Counters and histograms that are plain numbers until Prometheus asks.

Separate because the client library's own take a lock, checks and several calls for each step, and a turn takes some
twenty. Here only the loop's thread counts, so a number is enough; names, labels and samples are those of the library.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Count:
    """One series of a counter."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.value = 0
        self.created = time.time()

    def inc(self, amount: int = 1) -> None:
        """Count on; `amount` must not be negative."""
        self.value += amount


class Counter(Collector):
    """A counter with labels; a series is there from when it is first asked for."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, text, tuple(labels)
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The series with these values, in the order of the labels."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._about[2]):
                raise ValueError(f"{self._about[0]} has the labels {self._about[2]}, got {values}")
            found = self._series[values] = Count()
        return found

    def remove(self, *values: str) -> None:
        """Drop a series."""
        self._series.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        found = CounterMetricFamily(name, text, labels=labels)
        for values, count in self._series.items():
            found.add_metric(values, count.value, created=count.created)
        yield found


class Histogram(Collector):
    """A histogram of seconds, without labels. `bounds`: upper ends of the buckets, ascending; the last is infinite."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._about = name, text
        self._bounds = tuple(bounds)
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        ends = (*map(repr, self._bounds), "+Inf")
        name, text = self._about
        buckets = list(zip(ends, accumulate(self._buckets), strict=True))
        found = HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)
        found.add_sample(f"{name}_created", {}, self._created)
        yield found
