"""The metrics page of a router with several workers, put together from the pages of its processes.

prometheus_client's own way for several processes keeps each value in a file: it needs a place for them, knows no
collectors that look at scrape time and none of the process's own figures, and makes each increment dearer. Pages are
read and added when Prometheus asks instead. A worker that ended takes along what it counted since the last look; what
was shown before is kept, so that a counter never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pd_router.core.merging import CUMULATIVE, Rule, combine, rule_of
from pd_router.shell.metrics import STAGES

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Sample name and labels."""


class MergedMetrics:
    """Merges pages; not for two threads at one time."""

    def __init__(self) -> None:
        self._last: dict[int, list[Metric]] = {}
        """By process, what it showed last."""
        self._ended: dict[Key, float] = {}
        """What is missing from the pages of those that run, since others counted it."""

    def merge(self, own: bytes, pages: Mapping[int, bytes], alive: frozenset[int]) -> list[Metric]:
        """The metrics as of now.

        Args:
            own: the supervisor's page.
            pages: of the workers that answered, by a number that no other process gets.
            alive: the workers that run. One that did not answer counts with what it showed last.
        """
        for number in [number for number in self._last if number not in alive]:
            self._retire(self._last.pop(number))
        for number, page in pages.items():
            if number in alive:
                self._last[number] = _parse(page)
        return list(self._merged([_parse(own), *self._last.values()]))

    def _retire(self, page: Sequence[Metric]) -> None:
        for metric in page:
            if metric.type not in CUMULATIVE:
                continue
            for sample in metric.samples:
                key = _key(sample)
                missing = sample.value
                if rule_of(metric.name, metric.type, sample.labels) is Rule.MOST:
                    missing = max(0.0, sample.value - max(self._shown(metric.name, key), default=0.0))
                self._ended[key] = self._ended.get(key, 0.0) + missing

    def _shown(self, name: str, key: Key) -> Iterator[float]:
        """One series on the pages of those that run."""
        for page in self._last.values():
            for metric in page:
                if metric.name == name:
                    yield from (sample.value for sample in metric.samples if _key(sample) == key)

    def _merged(self, pages: Sequence[Sequence[Metric]]) -> Iterator[Metric]:
        heads: dict[str, Metric] = {}
        found: dict[str, dict[Key, list[float]]] = {}
        for page in pages:
            for metric in page:
                heads.setdefault(metric.name, metric)
                series = found.setdefault(metric.name, {})
                for sample in metric.samples:
                    series.setdefault(_key(sample), []).append(sample.value)
        # An engine that left takes its series along; should its name come back, it begins anew.
        live = {key for series in found.values() for key in series}
        self._ended = {key: value for key, value in self._ended.items() if key in live or "engine" not in dict(key[1])}
        ended = dict(self._ended)
        for name, series in found.items():
            head = heads[name]
            merged = Metric(name, head.documentation, head.type)
            for (full, labels), values in series.items():
                rule = rule_of(name, head.type, dict(labels))
                merged.add_sample(full, dict(labels), combine(rule, values) + ended.pop((full, labels), 0.0))
            if head.type in CUMULATIVE:
                self._add_ended(merged, ended)
            yield merged

    @staticmethod
    def _add_ended(merged: Metric, ended: Mapping[Key, float]) -> None:
        """Series that only ended workers had."""
        names = {f"{merged.name}{suffix}" for suffix in ("", "_total", "_count", "_sum", "_bucket")}
        for (sample, labels), value in ended.items():
            if sample in names:
                merged.add_sample(sample, dict(labels), value)


class Given(Collector):
    """Metrics that were worked out before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def page_of(metrics: Sequence[Metric]) -> bytes:
    """As Prometheus reads it."""
    return generate_latest(Given(metrics))


_TOKENS: Final = {f"pd_router_{name}_total": name for name in ("pulled_tokens", "gone_tokens")}


def funnel_of(metrics: Sequence[Metric]) -> dict[str, int]:
    """`Metrics.funnel_counts`, of the whole router."""
    counts = dict.fromkeys((*STAGES, *_TOKENS.values()), 0)
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == "pd_router_reuse_stage_total" and sample.labels["stage"] in counts:
                counts[sample.labels["stage"]] = int(sample.value)
            elif sample.name in _TOKENS:
                counts[_TOKENS[sample.name]] = int(sample.value)
    return counts


def _parse(page: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(page.decode()))


def _key(sample: Sample) -> Key:
    return sample.name, tuple(sample.labels.items())
