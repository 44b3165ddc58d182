"""The figures as a plain table: the same text on a terminal, in a log and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdctl.core.measurements import Row

_GROUPS: Final = (("", 1), ("prompt", 1), ("TTFT ms", 3), ("prefill ms", 3), ("pulled", 1), ("transfer", 1))
"""Titles of the upper head line, and how many columns each stands over."""
_COLUMNS: Final = ("turn", "tokens", "OFF", "ON", "ratio", "OFF", "ON", "ratio", "tokens", "ms")


def format_table(rows: Sequence[Row]) -> str:
    """One line per turn, right-aligned. Turn 1 has nothing to reuse and stands apart."""
    body = [_cells(row) for row in rows]
    widths = [max(len(line[at]) for line in (_COLUMNS, *body)) for at in range(len(_COLUMNS))]
    at = 0
    for title, span in _GROUPS:
        widths[at] = max(widths[at], len(title)) if span == 1 else widths[at]
        at += span
    lines = [_group_line(widths), _line(_COLUMNS, widths)]
    rule = "-" * len(lines[-1])
    lines.append(rule)
    for row, cells in zip(rows, body, strict=True):
        lines.append(_line(cells, widths) + ("   cold: nothing to reuse yet" if row.turn == 1 else ""))
        if row.turn == 1:
            lines.append(rule)
    return "\n".join(lines)


def format_seconds(stages: Sequence[tuple[str, float]]) -> str:
    """How long each stage took, and all of them."""
    width = max(len(name) for name, _ in (*stages, ("total", 0.0)))
    lines = [f"{name:<{width}}  {seconds:7.1f} s" for name, seconds in stages]
    total = sum(seconds for _, seconds in stages)
    return "\n".join([*lines, f"{'total':<{width}}  {total:7.1f} s"])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.turn),
        f"{row.prompt_tokens:,}",
        f"{row.off.ttft_ms:,.0f}",
        f"{row.on.ttft_ms:,.0f}",
        f"{row.ttft_ratio:.1f}x",
        f"{row.off.prefill_ms:,.0f}",
        f"{row.on.prefill_ms:,.0f}",
        f"{row.prefill_ratio:.1f}x",
        f"{row.on.pulled_tokens:,.0f}",
        f"{row.on.transfer_ms:,.1f}",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _group_line(widths: Sequence[int]) -> str:
    """The upper head line: a title over each group of columns."""
    parts, at = [], 0
    for title, span in _GROUPS:
        width = sum(widths[at : at + span]) + 2 * (span - 1)
        parts.append(title.center(width) if span > 1 else title.rjust(width))
        at += span
    return "  ".join(parts).rstrip()
