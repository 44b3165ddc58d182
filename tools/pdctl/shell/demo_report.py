"""How a demo ends: a table, two pictures and a file with everything, or a clear statement of what went wrong.

Separate from the command because the demo is shown alike wherever the pair ran.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.core.dialogue import DialoguePlan
from pdctl.core.measurements import SHOWN_FINDINGS, Row, find_faults, summarise
from pdctl.core.table import format_seconds, format_table
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.console import Console
from pdctl.shell.demo_run import DemoRun, Ground
from pdctl.shell.engine_python import EnginePythonError
from pdctl.shell.folders import FolderError, writable_folder
from pdctl.shell.lifecycle import StartError
from pdctl.shell.model_maker import ModelMakerError, cached_tiny_model
from pdctl.shell.player import PlayError


@dataclass(frozen=True, slots=True)
class DemoOrder:
    """What to play, and where results go.

    ``where`` tells readers of the pictures where the pair ran; ``before`` are stages that came first, in seconds.
    """

    plan: DialoguePlan
    conversations: int
    out: Path
    where: str
    before: tuple[tuple[str, float], ...] = ()


async def measure_and_show(order: DemoOrder, make_ground: Callable[[Path], Ground], console: Console) -> int:
    """Play both legs on the ground that ``make_ground`` gives for the model's folder. Returns the exit code."""
    try:
        writable_folder(order.out)
    except FolderError as error:
        console.say(str(error))
        return 2
    # In a thread, so that Ctrl-C is answered meanwhile.
    try:
        model = await asyncio.to_thread(cached_tiny_model, console.say)
    except ModelMakerError as error:
        console.say(f"FAILED: {error}")
        return 1
    run = DemoRun(order.plan, order.conversations, make_ground(model), console)
    run.stages.extend(order.before)
    try:
        await run.both_legs(model)
    except (EnginePythonError, StartError, PlayError, ClusterError) as error:
        console.settle()
        console.say(f"FAILED: {error}")
        _save(order, run, [], [str(error)], console)
        return 1
    return _show(order, run, console)


def _show(order: DemoOrder, run: DemoRun, console: Console) -> int:
    faults = find_faults(run.records, order.conversations, order.plan.turns, order.plan.reply)
    rows: list[Row] = []
    if not faults:
        rows = summarise(run.records)
        with run.stage("pictures"):
            _draw(order, rows)
        console.block("")
        console.block(format_table(rows))
        console.block("")
        console.say(_verdict(rows[-1]))
    _save(order, run, rows, faults, console)
    if rows:
        console.say(f"pictures: {order.out / 'ttft.png'}, {order.out / 'prefill.png'}")
    console.block("")
    console.block(format_seconds(run.stages))
    if faults:
        console.say(f"FAILED: {len(faults)} faults, so there are no figures to show")
        for fault in faults[:SHOWN_FINDINGS]:
            console.say(f"  {fault}")
        return 1
    return 0


def _draw(order: DemoOrder, rows: list[Row]) -> None:
    # Imported late: it takes a second, and only a finished run needs it.
    from pdctl.core.charts import prefill_bars, ttft_lines
    from pdctl.shell.plots import draw_prefill, draw_ttft

    cores = len(os.sched_getaffinity(0))
    subtitle = (
        f"tiny random model, 1 prefill + 1 decode engine {order.where}, {cores} CPU cores, "
        f"prefix caching off on prefill, median of {order.conversations}"
    )
    off, on = ttft_lines(rows)
    draw_ttft(order.out / "ttft.png", off, on, subtitle)
    draw_prefill(order.out / "prefill.png", prefill_bars(rows), subtitle)


def _verdict(last: Row) -> str:
    return (
        f"at {last.prompt_tokens:,} tokens prefill is {last.prefill_ratio:.1f} times shorter with reuse "
        f"({last.off.prefill_ms:,.0f} ms -> {last.on.prefill_ms:,.0f} ms), TTFT {last.ttft_ratio:.1f} times; "
        f"P pulled {last.on.pulled_tokens:,.0f} tokens from D in {last.on.transfer_ms:.1f} ms"
    )


def _save(order: DemoOrder, run: DemoRun, rows: list[Row], faults: list[str], console: Console) -> None:
    content: dict[str, Any] = {
        "format": "pdctl-demo/1",
        "plan": run.describe(),
        "faults": faults,
        "rows": [row.as_json() for row in rows],
        "records": [record.as_json() for record in run.records],
        "decisions": run.decisions,
        "stages": [{"name": name, "seconds": round(seconds, 3)} for name, seconds in run.stages],
    }
    (order.out / "records.json").write_text(json.dumps(content, indent=1) + "\n")
    logs = order.out / "logs"
    told = [f"raw records: {order.out / 'records.json'}"] if run.records else []
    told += [f"logs: {logs}"] if logs.is_dir() else []
    if told:
        console.say(", ".join(told))
