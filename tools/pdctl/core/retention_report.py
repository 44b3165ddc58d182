"""The simulation's figures as a Markdown table, as JSON, and as the bars of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdctl.core.kv_trace import Client
from pdctl.core.retention_modes import Mode
from pdctl.core.retention_simulation import Engine, Outcome, largest_turn_blocks, simulate, working_set_blocks

FORMAT: Final = "pdctl-simulate/1"
_COLUMNS: Final = (
    "pressure",
    "retention",
    "turns done",
    "turns that read",
    "tokens read back",
    "held block-s per token",
    "pool held",
    "turns that waited",
    "wait p99",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. ``pressure``: what it takes to keep every conversation, in pools."""

    pressure: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Study:
    """All runs of one trace."""

    clients: int
    turns: int
    working_set_blocks: float
    engine: Engine
    cells: tuple[Cell, ...]


def study_pressures(
    clients: Sequence[Client], modes: Sequence[Mode], pressures: Sequence[float], engine: Engine
) -> Study:
    """Run every mode with a pool for each pressure: the working set divided by it.

    Raises:
        ValueError: a pool would be smaller than the largest turn.
    """
    needed, largest = working_set_blocks(clients, engine), largest_turn_blocks(clients, engine)
    for pressure in pressures:
        if needed / pressure < largest:
            raise ValueError(
                f"at pressure {pressure:g} the pool would have {needed / pressure:,.0f} blocks, "
                f"and the largest turn needs {largest:,}: use more clients or less pressure"
            )
    cells = tuple(
        Cell(pressure, simulate(clients, mode, int(needed / pressure), engine))
        for pressure in pressures
        for mode in modes
    )
    return Study(len(clients), sum(map(len, clients)), needed, engine, cells)


def study_pool(clients: Sequence[Client], modes: Sequence[Mode], pool_blocks: int, engine: Engine) -> Study:
    """Run every mode with one pool.

    Raises:
        ValueError: the pool is smaller than the largest turn.
    """
    needed = working_set_blocks(clients, engine)
    cells = tuple(Cell(needed / pool_blocks, simulate(clients, mode, pool_blocks, engine)) for mode in modes)
    return Study(len(clients), sum(map(len, clients)), needed, engine, cells)


def as_json(study: Study) -> dict[str, Any]:
    """For scripts: figures under the names of `Outcome`."""
    return {
        "format": FORMAT,
        "clients": study.clients,
        "turns": study.turns,
        "seconds": study.engine.seconds,
        "block_tokens": study.engine.block_tokens,
        "working_set_tokens": round(study.working_set_blocks * study.engine.block_tokens),
        "runs": [_run_json(cell, study.engine) for cell in study.cells],
    }


def as_markdown(study: Study) -> str:
    """One line per run."""
    lines = [_line(_COLUMNS), _line(["---:" if at != 1 else ":---" for at in range(len(_COLUMNS))])]
    return "\n".join([*lines, *(_line(_cells(cell)) for cell in study.cells)])


def percent(share: float | None) -> str:
    """`97.6 %`; a dash where there is nothing to divide by."""
    return "–" if share is None else f"{100 * share:.1f} %"


def _run_json(cell: Cell, engine: Engine) -> dict[str, Any]:
    out = cell.outcome
    return {
        "retention": out.mode,
        "pressure": round(cell.pressure, 4),
        "pool_tokens": out.pool_blocks * engine.block_tokens,
        "turns_arrived": out.arrived,
        "turns_finished": out.finished,
        "turn_hit_rate": out.turn_hit_rate,
        "token_hit_rate": out.token_hit_rate,
        "reusable_tokens": out.reusable_tokens,
        "reused_tokens": out.reused_tokens,
        "held_block_seconds": out.held_block_s,
        "held_block_seconds_per_reused_token": out.held_block_s_per_token,
        "held_share_of_pool": out.held_share,
        "turns_not_held_for_want_of_room": out.refused,
        "turns_partly_held_for_want_of_room": out.partly,
        "turns_that_waited": out.waited,
        "wait_p99_seconds": out.wait_p99_s,
    }


def _cells(cell: Cell) -> list[str]:
    out = cell.outcome
    held = out.held_block_s_per_token
    return [
        f"{cell.pressure:.2g}",
        out.mode,
        f"{out.finished:,}",
        percent(out.turn_hit_rate),
        percent(out.token_hit_rate),
        "–" if held is None else f"{held:.2f}",
        percent(out.held_share),
        f"{out.waited:,}",
        f"{out.wait_p99_s:,.1f} s",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
