"""`pdctl demo`: what reuse is worth, on this machine, in a few minutes, with a model that it makes itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pdctl.core.dialogue import DialoguePlan
from pdctl.core.measurements import SHOWN_FINDINGS, Row, find_faults, summarise
from pdctl.core.table import format_seconds, format_table
from pdctl.shell.console import Console
from pdctl.shell.demo_run import DemoRun
from pdctl.shell.engine_python import EnginePythonError
from pdctl.shell.interrupts import Interrupts
from pdctl.shell.lifecycle import StartError
from pdctl.shell.model_maker import ModelMakerError, cached_tiny_model
from pdctl.shell.player import PlayError


def demo(
    out: Annotated[Path, typer.Option(help="Folder for pictures, records and logs.")] = Path("out/demo"),
    conversations: Annotated[int, typer.Option(min=1, help="Conversations per leg.")] = 3,
    turns: Annotated[int, typer.Option(min=2, help="Turns per conversation.")] = 7,
    longest: Annotated[int, typer.Option(help="Prompt of the last turn, in tokens.")] = 8600,
    step: Annotated[int, typer.Option(help="Tokens that each turn adds: reply and next question.")] = 640,
    reply: Annotated[int, typer.Option(min=2, help="Tokens per reply.")] = 64,
    engine_python: Annotated[str, typer.Option(help="The Python that has vLLM.")] = sys.executable,
) -> None:
    """Run a real pair with reuse OFF, then ON; print a table and save two pictures."""
    plan = DialoguePlan(turns, longest, step, reply)
    try:
        plan.question_tokens()
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    out.mkdir(parents=True, exist_ok=True)
    raise typer.Exit(asyncio.run(_demo(plan, conversations, out, engine_python)))


async def _demo(plan: DialoguePlan, conversations: int, out: Path, engine_python: str) -> int:
    console = Console(show_lines=False)
    interrupts = Interrupts(console.say)
    console.on_closed(interrupts.output_closed)
    code = await interrupts.run(_measure_and_show(plan, conversations, out, engine_python, console))
    if code is None:
        console.settle()
        console.say("everything is stopped")
        return 128 + int(interrupts.received or 13)
    return code


async def _measure_and_show(
    plan: DialoguePlan, conversations: int, out: Path, engine_python: str, console: Console
) -> int:
    run = DemoRun(plan, conversations, out, engine_python, console)
    try:
        with run.stage("tiny model"):
            # In a thread, so that Ctrl-C is answered meanwhile.
            model = await asyncio.to_thread(cached_tiny_model, console.say)
        await run.both_legs(model)
    except (ModelMakerError, EnginePythonError, StartError, PlayError) as error:
        console.settle()
        console.say(f"FAILED: {error}")
        _save(out, run, [], [str(error)], console)
        return 1
    faults = find_faults(run.records, conversations, plan.turns, plan.reply)
    rows: list[Row] = []
    if not faults:
        rows = summarise(run.records)
        with run.stage("pictures"):
            _draw(rows, conversations, out)
        console.block("")
        console.block(format_table(rows))
        console.block("")
        console.say(_verdict(rows[-1]))
    _save(out, run, rows, faults, console)
    if rows:
        console.say(f"pictures: {out / 'ttft.png'}, {out / 'prefill.png'}")
    console.block("")
    console.block(format_seconds(run.stages))
    if faults:
        console.say(f"FAILED: {len(faults)} faults, so there are no figures to show")
        for fault in faults[:SHOWN_FINDINGS]:
            console.say(f"  {fault}")
        return 1
    return 0


def _draw(rows: list[Row], conversations: int, out: Path) -> None:
    # Imported late: it takes a second, and only a finished run needs it.
    from pdctl.core.charts import prefill_bars, ttft_lines
    from pdctl.shell.plots import draw_prefill, draw_ttft

    cores = len(os.sched_getaffinity(0))
    subtitle = (
        f"tiny random model, 1 prefill + 1 decode engine on {cores} CPU cores, prefix caching off on prefill, "
        f"median of {conversations}"
    )
    off, on = ttft_lines(rows)
    draw_ttft(out / "ttft.png", off, on, subtitle)
    draw_prefill(out / "prefill.png", prefill_bars(rows), subtitle)


def _verdict(last: Row) -> str:
    return (
        f"at {last.prompt_tokens:,} tokens prefill is {last.prefill_ratio:.1f} times shorter with reuse "
        f"({last.off.prefill_ms:,.0f} ms -> {last.on.prefill_ms:,.0f} ms), TTFT {last.ttft_ratio:.1f} times; "
        f"P pulled {last.on.pulled_tokens:,.0f} tokens from D in {last.on.transfer_ms:.1f} ms"
    )


def _save(out: Path, run: DemoRun, rows: list[Row], faults: list[str], console: Console) -> None:
    content: dict[str, Any] = {
        "format": "pdctl-demo/1",
        "plan": run.describe(),
        "faults": faults,
        "rows": [row.as_json() for row in rows],
        "records": [record.as_json() for record in run.records],
        "decisions": run.decisions,
        "stages": [{"name": name, "seconds": round(seconds, 3)} for name, seconds in run.stages],
    }
    (out / "records.json").write_text(json.dumps(content, indent=1) + "\n")
    console.say(f"raw records: {out / 'records.json'}, logs: {out / 'logs'}")
