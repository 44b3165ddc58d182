"""What the two pictures show, as numbers; drawing them is the shell's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdctl.core.measurements import Figures, Row


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the TTFT picture: x in tokens, y in milliseconds, and the span between conversations."""

    label: str
    prompt_tokens: tuple[int, ...]
    middle: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    ticks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BarPair:
    """One prompt length in the prefill picture, in milliseconds. The ON bar is compute with transfer on top."""

    tick: str
    off: float
    on_compute: float
    on_transfer: float

    @property
    def on(self) -> float:
        """Height of the ON bar."""
        return self.on_compute + self.on_transfer


def ttft_lines(rows: Sequence[Row]) -> tuple[Line, Line]:
    """The OFF line and the ON line."""
    return _line("reuse OFF", rows, [row.off for row in rows]), _line("reuse ON", rows, [row.on for row in rows])


def prefill_bars(rows: Sequence[Row]) -> tuple[BarPair, ...]:
    """A pair of bars per turn."""
    return tuple(
        BarPair(
            _tick(row),
            row.off.prefill_ms,
            row.on.compute_ms,
            min(row.on.transfer_ms, row.on.prefill_ms),
        )
        for row in rows
    )


def _line(label: str, rows: Sequence[Row], figures: Sequence[Figures]) -> Line:
    return Line(
        label,
        tuple(row.prompt_tokens for row in rows),
        tuple(one.ttft_ms for one in figures),
        tuple(one.ttft_span[0] for one in figures),
        tuple(one.ttft_span[1] for one in figures),
        tuple(_tick(row) for row in rows),
    )


def _tick(row: Row) -> str:
    return f"{row.prompt_tokens:,}\nturn {row.turn}" + (" (cold)" if row.turn == 1 else "")
