"""Draw the simulation's picture as a PNG file: three figures, a group of bars per memory pressure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import StrMethodFormatter

from pdctl.core.retention_report import Study
from pdctl.core.retention_simulation import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#8a8f98", "#c5c9d0", "#ff9f40", "#1f77b4", "#2ca02c", "#9467bd")
SIZE: Final = (13.0, 4.0)
DPI: Final = 100
GROUP_WIDTH: Final = 0.84
HEADROOM: Final = 1.15
PANELS: Final[tuple[tuple[str, str, Callable[[Study, Outcome], float]], ...]] = (
    ("Turns done", "% of the trace", lambda study, out: 100 * out.finished / study.turns),
    ("Tokens computed again", "% of what earlier turns computed", lambda _, out: 100 * (1 - (out.token_hit_rate or 0))),
    ("Wait for memory", "seconds, p99 of all turns", lambda _, out: out.wait_p99_s),
    ("Memory held idle", "block-seconds per token read back", lambda _, out: out.held_block_s_per_token or 0),
)


def draw_study(path: Path, study: Study, subtitle: str) -> None:
    """Write the file.

    Raises:
        OSError: it can't be written.
    """
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=SIZE, dpi=DPI)
    try:
        for axes, (title, unit, value) in zip(panels, PANELS, strict=True):
            _draw_panel(axes, study, value)
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
            axes.set_ylabel(unit, fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="lower center", ncols=len(labels), fontsize=9)
        figure.suptitle(subtitle, x=0.01, ha="left", fontsize=9, color="#555555")
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        # Without the version of the library in it, equal figures give equal files for longer.
        figure.savefig(path, metadata={"Software": None})
    finally:
        pyplot.close(figure)


def _draw_panel(axes: Axes, study: Study, value: Callable[[Study, Outcome], float]) -> None:
    pressures = list(dict.fromkeys(cell.pressure for cell in study.cells))
    names = list(dict.fromkeys(cell.outcome.mode for cell in study.cells))
    width = GROUP_WIDTH / len(names)
    for at, name in enumerate(names):
        heights = [value(study, cell.outcome) for cell in study.cells if cell.outcome.mode == name]
        places = [place + (at - (len(names) - 1) / 2) * width for place in range(len(pressures))]
        bars = axes.bar(places, heights, width * 0.94, color=COLOURS[at % len(COLOURS)], label=name)
        axes.bar_label(bars, [_short(height) for height in heights], fontsize=7, padding=2)
    axes.set_xticks(range(len(pressures)), [f"{pressure:.2g}" for pressure in pressures])
    axes.set_xlabel("pressure: working set / pool")
    axes.set_ylim(0, max(axes.dataLim.ymax, 1e-9) * HEADROOM)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.grid(axis="y", color="#e3e3e3")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(value: float) -> str:
    """Three digits at most, so that labels of neighbours don't meet."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")
