"""`pdctl simulate`: what each way of retaining finished turns would do to one decode engine, for a trace of turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from pdctl.core.coding_agents import DECODE_TOKENS_PER_S, Crowd
from pdctl.core.kv_trace import Client
from pdctl.core.retention_modes import LEASE_SECONDS, LEASE_SHARE, TOOL_HOLD_SECONDS, UNPINNED, leased, pinned
from pdctl.core.retention_report import Study, as_json, as_markdown, study_pool, study_pressures
from pdctl.core.retention_simulation import BLOCK_TOKENS, Engine, unhindered_end
from pdctl.shell.folders import FolderError, writable_folder
from pdctl.shell.numbers import finite
from pdctl.shell.trace_source import TraceFileError, made_up, read_trace, write_trace

PRESSURES: Final = (0.5, 1.0, 2.0)
TTLS: Final = (480.0, 60.0)
HOUR: Final = 3600.0


def simulate(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Turns to play (JSONL; docs/retention.md). Absent: made up.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=10_000, help="Made up: coding agents at a time.")] = 64,
    hours: Annotated[float, typer.Option(callback=finite, min=0.1, max=240, help="Made up: how long.")] = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="Made up: the same seed gives the same turns.")] = 1,
    max_context: Annotated[int, typer.Option(min=1024, help="Made up: tokens at which an agent compacts.")] = 131_072,
    singles: Annotated[
        float,
        typer.Option(
            "--singles-per-minute", callback=finite, min=0, max=100_000, help="Made up: turns that nobody continues."
        ),
    ] = 0.0,
    pressure: Annotated[
        list[float] | None,
        typer.Option(
            callback=finite,
            help="Memory that all conversations need, divided by the pool. Again for more; 0.5, 1 and 2.",
        ),
    ] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="The pool itself, as an engine's log says it, instead of pressures.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, max=65536, help="Tokens per KV block.")] = BLOCK_TOKENS,
    decode_speed: Annotated[
        float, typer.Option(callback=finite, min=0.1, help="Tokens per second of an answer.")
    ] = DECODE_TOKENS_PER_S,
    ttl: Annotated[
        list[float] | None, typer.Option(callback=finite, min=20, help="Pinned: seconds. Again for more; 480 and 60.")
    ] = None,
    lease: Annotated[
        float, typer.Option(callback=finite, min=1, max=3600, help="Leased: seconds without a sign of life.")
    ] = LEASE_SECONDS,
    lease_share: Annotated[
        float, typer.Option(callback=finite, min=0.01, max=1, help="Leased: most of the pool.")
    ] = LEASE_SHARE,
    lease_tool_hold: Annotated[
        float,
        typer.Option(
            callback=finite, min=0, max=86400, help="Leased: seconds for which it is prolonged while tools run."
        ),
    ] = TOOL_HOLD_SECONDS,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for retention.md, retention.json and retention.png.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    save_trace: Annotated[Path | None, typer.Option("--write-trace", help="File to write the turns to.")] = None,
) -> None:
    """Compare Pinned, Leased and Unpinned by simulation: tokens read back, memory held for it, turns that wait."""
    try:
        if out is not None:
            writable_folder(out)
        played: Sequence[Client]
        if trace is not None:
            played, seconds = (found := read_trace(trace)), unhindered_end(found, decode_speed)
        else:
            played, seconds = (
                made_up(Crowd(clients, hours * HOUR, max_context, singles_per_min=singles), seed),
                hours * HOUR,
            )
        if save_trace is not None:
            write_trace(save_trace, played)
        engine = Engine(seconds, block_tokens, decode_speed)
        modes = [*(pinned(one) for one in ttl or TTLS), leased(lease, lease_share, lease_tool_hold), UNPINNED]
        if pool_tokens is not None:
            study = study_pool(played, modes, pool_tokens // block_tokens, engine)
        else:
            if any(not 0 < one < 1000 for one in pressure or PRESSURES):
                raise ValueError("--pressure must be over 0 and below 1000")
            study = study_pressures(played, modes, pressure or PRESSURES, engine)
        if out is not None:
            _write(out, study)
    except (TraceFileError, FolderError, ValueError) as error:
        typer.echo(f"pdctl simulate: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"pdctl simulate: {error.filename}: cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    if json_output:
        typer.echo(json.dumps(as_json(study), indent=1))
    else:
        typer.echo(f"{describe(study)}\n\n{as_markdown(study)}")


def describe(study: Study) -> str:
    """What was played, in one line."""
    seconds = study.engine.seconds
    time = f"{seconds / HOUR:.1f} h" if seconds >= HOUR else f"{seconds:.0f} s"
    return (
        f"{study.turns:,} turns of {study.clients:,} clients in {time}; keeping every conversation "
        f"takes {study.working_set_blocks * study.engine.block_tokens:,.0f} tokens of KV"
    )


def _write(out: Path, study: Study) -> None:
    # Imported late: it takes a second, and only this needs it.
    from pdctl.shell.retention_plot import draw_study

    (out / "retention.md").write_text(as_markdown(study) + "\n", encoding="utf-8")
    (out / "retention.json").write_text(json.dumps(as_json(study), indent=1) + "\n", encoding="utf-8")
    draw_study(out / "retention.png", study, describe(study))
