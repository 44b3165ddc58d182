"""From single runs to the table and the JSON file. Pure: values in, text and values out.

Ratios are taken within a round and then their median, so that a machine that slows down over the minutes of a run moves
both sides of each ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run of one router."""

    contender: str
    mode: str
    round: int
    cpu_ms_per_turn: float
    kernel_ms_per_turn: float
    """Of it, the part spent in system calls."""
    turns: int
    turns_per_s: float
    p50_ms: float
    p99_ms: float
    attached_share: float
    """Share of the prefills that carried a decode engine's handle."""
    foreign_share: float
    """Share of the router's core that others used meanwhile: above some per cent the run is not quiet."""
    load_average: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One router in one mode."""

    contender: str
    mode: str
    cpu_ms_per_turn: Spread
    kernel_ms_per_turn: float
    ratios: dict[str, Spread]
    """To each baseline, paired by round."""
    turns_per_s: Spread
    p50_ms: float
    p99_ms: float
    attached_share: float
    foreign_share: float


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value."""
    return Spread(median(values), min(values), max(values))


def summarise(samples: Sequence[Sample], baselines: Sequence[str]) -> list[Row]:
    """One row per router and mode, in the order in which they first ran."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.mode, sample.contender), []).append(sample)
    rows = []
    for (mode, contender), group in groups.items():
        ratios = {}
        for baseline in baselines:
            by_round = {sample.round: sample.cpu_ms_per_turn for sample in groups.get((mode, baseline), [])}
            pairs = [s.cpu_ms_per_turn / by_round[s.round] for s in group if s.round in by_round]
            if pairs:
                ratios[baseline] = spread(pairs)
        rows.append(
            Row(
                contender=contender,
                mode=mode,
                cpu_ms_per_turn=spread([s.cpu_ms_per_turn for s in group]),
                kernel_ms_per_turn=median(s.kernel_ms_per_turn for s in group),
                ratios=ratios,
                turns_per_s=spread([s.turns_per_s for s in group]),
                p50_ms=median(s.p50_ms for s in group),
                p99_ms=median(s.p99_ms for s in group),
                attached_share=median(s.attached_share for s in group),
                foreign_share=max(s.foreign_share for s in group),
            )
        )
    return rows


def as_table(rows: Sequence[Row], titles: dict[str, str], baselines: Sequence[str]) -> str:
    """The table that is printed, one block per mode."""
    heads = ["", "CPU ms/turn", "(min – max)", "in kernel", *(f"× {name}" for name in baselines)]
    heads += ["turns/s", "p50 ms", "p99 ms", "handles", "others"]
    blocks = []
    for mode in dict.fromkeys(row.mode for row in rows):
        lines = [heads]
        for row in (row for row in rows if row.mode == mode):
            cpu = row.cpu_ms_per_turn
            lines.append(
                [titles[row.contender], f"{cpu.median:.3f}", f"({cpu.low:.3f} – {cpu.high:.3f})"]
                + [f"{row.kernel_ms_per_turn:.3f}"]
                + [f"{row.ratios[name].median:.2f}" if name in row.ratios else "–" for name in baselines]
                + [f"{row.turns_per_s.median:.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}"]
                + [f"{row.attached_share:.0%}", f"{row.foreign_share:.0%}"]
            )
        blocks.append(f"{mode}\n{_aligned(lines)}")
    return "\n\n".join(blocks)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  "
        + line[0].ljust(widths[0])
        + "".join("  " + cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def as_json(samples: Sequence[Sample], rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """What goes into the file: the conditions, the rows of the table and every single run."""
    return {"about": about, "rows": [asdict(row) for row in rows], "samples": [asdict(sample) for sample in samples]}
