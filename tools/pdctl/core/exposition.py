"""Read single figures out of a Prometheus text page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_SAMPLE: Final = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def sum_samples(page: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """The sum of all samples with this exact name and at least these labels; None when there is none."""
    wanted = dict(labels or {})
    found = None
    for line in page.splitlines():
        if not line.startswith(name):
            continue
        match = _SAMPLE.match(line)
        if match is None or match["name"] != name:
            continue
        has = dict(_LABEL.findall(match["labels"] or ""))
        if all(has.get(key) == value for key, value in wanted.items()):
            found = (found or 0.0) + float(match["value"])
    return found


def first_labels(page: str, name: str) -> dict[str, str]:
    """The labels of the first sample with this exact name; empty when there is none."""
    for line in page.splitlines():
        match = _SAMPLE.match(line) if line.startswith(name) else None
        if match is not None and match["name"] == name:
            return dict(_LABEL.findall(match["labels"] or ""))
    return {}
