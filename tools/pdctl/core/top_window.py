"""Counters and histograms between two looks at routers: what was gained, and quantiles of it.

Separate from the figures because this is arithmetic on Prometheus samples, whatever they mean. Counters that fell back
began again, as Prometheus takes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Labels = frozenset[tuple[str, str]]
Samples = Mapping[str, Mapping[Labels, float]]


@dataclass(frozen=True, slots=True)
class Look:
    """All samples of one router at one time, in monotonic seconds."""

    at: float
    samples: Samples


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two looks; without an earlier one, since each router's start."""

    before: Look | None
    after: Look

    @property
    def seconds(self) -> float | None:
        """Length; None without an earlier look."""
        return None if self.before is None else self.after.at - self.before.at

    def now(self, name: str, **labels: str) -> list[float]:
        """Values of a gauge's series that have these labels."""
        return [value for _, value in _matching(self.after.samples, name, labels)]

    def by(self, name: str, label: str, **labels: str) -> dict[str, list[float]]:
        """Values of a gauge, by the value of one label."""
        found: dict[str, list[float]] = {}
        for key, value in _matching(self.after.samples, name, labels):
            found.setdefault(dict(key).get(label, ""), []).append(value)
        return found

    def gains(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Increase of a counter, by the value of one label."""
        earlier = self.before.samples.get(name, {}) if self.before is not None else {}
        found: dict[str, float] = {}
        for key, value in _matching(self.after.samples, name, labels):
            past = earlier.get(key, 0.0)
            kind = dict(key).get(label, "")
            found[kind] = found.get(kind, 0.0) + (value - past if value >= past else value)
        return found

    def gain(self, name: str, **labels: str) -> float:
        """Increase of a counter, all its series together."""
        return sum(self.gains(name, "", **labels).values())

    def quantiles(self, histogram: str, wanted: Sequence[float]) -> list[float | None]:
        """Estimates as Prometheus' `histogram_quantile` makes them; None where nothing was observed."""
        gained = self.gains(f"{histogram}_bucket", "le")
        buckets = sorted((math.inf if bound == "+Inf" else float(bound), count) for bound, count in gained.items())
        return [quantile(buckets, one) for one in wanted]


def merged(windows: Sequence[Window]) -> Window:
    """Several routers as one: each series keeps its router, so that a restart of one doesn't hide what others did."""
    befores = [window.before for window in windows]
    known = [before for before in befores if before is not None]
    before = None
    if len(known) == len(befores) and known:
        before = Look(min(one.at for one in known), _joined(one.samples for one in known))
    after = Look(max(window.after.at for window in windows), _joined(window.after.samples for window in windows))
    return Window(before, after)


def quantile(buckets: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Of cumulative buckets, by upper bound. Beyond the last finite bound the answer is that bound."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank = wanted * total
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


def _matching(samples: Samples, name: str, labels: Mapping[str, str]) -> Iterable[tuple[Labels, float]]:
    wanted = set(labels.items())
    return [(key, value) for key, value in samples.get(name, {}).items() if wanted <= key]


def _joined(all_samples: Iterable[Samples]) -> Samples:
    found: dict[str, dict[Labels, float]] = {}
    for number, samples in enumerate(all_samples):
        for name, series in samples.items():
            into = found.setdefault(name, {})
            for key, value in series.items():
                into[key | {("", str(number))}] = value
    return found
