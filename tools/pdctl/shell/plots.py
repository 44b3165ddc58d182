"""Draw the two pictures as PNG files. No screen is needed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import StrMethodFormatter

from pdctl.core.charts import BarPair, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OFF_COLOUR: Final = "#8a8f98"
ON_COLOUR: Final = "#1f77b4"
TRANSFER_COLOUR: Final = "#ff9f40"
SIZE: Final = (8.4, 5.0)
DPI: Final = 130
BAR_WIDTH: Final = 0.38
SUBTITLE_WIDTH: Final = 96
"""Characters of a line that fits over the axes."""
LEGEND_HEIGHT: Final = 1.11
HEADROOM: Final = 1.12
"""Room above the highest point for its label."""


def draw_ttft(path: Path, off: Line, on: Line, subtitle: str) -> None:
    """Two lines over the prompt length; the band is the span between conversations."""
    figure, axes = _figure("Time to first token", subtitle)
    for line, colour, marker in ((off, OFF_COLOUR, "s"), (on, ON_COLOUR, "o")):
        axes.fill_between(line.prompt_tokens, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(line.prompt_tokens, line.middle, color=colour, marker=marker, linewidth=2, label=line.label)
        axes.annotate(
            f"{line.middle[-1]:,.0f} ms",
            (line.prompt_tokens[-1], line.middle[-1]),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            color=colour,
            fontweight="bold",
        )
    axes.set_xticks(off.prompt_tokens, off.ticks)
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token at the client (ms)")
    _finish(figure, axes, path)


def draw_prefill(path: Path, bars: Sequence[BarPair], subtitle: str) -> None:
    """A pair of bars per turn; the ON bar is compute with the transfer on top."""
    figure, axes = _figure("Prefill duration", subtitle)
    places = range(len(bars))
    left = [place - BAR_WIDTH / 2 - 0.01 for place in places]
    right = [place + BAR_WIDTH / 2 + 0.01 for place in places]
    compute = [bar.on_compute for bar in bars]
    axes.bar(left, [bar.off for bar in bars], BAR_WIDTH, color=OFF_COLOUR, label="OFF: compute")
    axes.bar(right, compute, BAR_WIDTH, color=ON_COLOUR, label="ON: compute")
    axes.bar(
        right,
        [bar.on_transfer for bar in bars],
        BAR_WIDTH,
        bottom=compute,
        color=TRANSFER_COLOUR,
        label="ON: KV transfer",
    )
    for at, bar in zip(left, bars, strict=True):
        _above(axes, at, bar.off, f"{bar.off:,.0f}")
    for at, bar in zip(right, bars, strict=True):
        _above(axes, at, bar.on, f"{bar.on:,.0f}" + (f"\nKV {bar.on_transfer:,.0f}" if bar.on_transfer else ""))
    axes.set_xticks(list(places), [bar.tick for bar in bars])
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("prefill duration at the router (ms)")
    _finish(figure, axes, path)


def _figure(title: str, subtitle: str) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=SIZE, dpi=DPI)
    lines = textwrap.wrap(subtitle, SUBTITLE_WIDTH)
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=14 + 12 * len(lines))
    axes.text(0, 1.025, "\n".join(lines), transform=axes.transAxes, fontsize=9, color="#555555")
    return figure, axes


def _above(axes: Axes, at: float, height: float, text: str) -> None:
    axes.annotate(text, (at, height), textcoords="offset points", xytext=(0, 3), ha="center", fontsize=8)


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    axes.set_ylim(0, axes.dataLim.ymax * HEADROOM)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y", color="#e3e3e3")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Beside the title, where no bar or line can reach it.
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, LEGEND_HEIGHT), ncols=3, borderaxespad=0)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
