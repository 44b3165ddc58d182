"""`pdctl demo`: what reuse is worth, on this machine, in a few minutes, with a model that it makes itself."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdctl.core.demo_spec import check_fits
from pdctl.core.dialogue import DialoguePlan
from pdctl.shell.console import Console
from pdctl.shell.demo_local import LocalGround
from pdctl.shell.demo_report import DemoOrder, measure_and_show
from pdctl.shell.demo_run import Ground
from pdctl.shell.interrupts import Interrupts

Out = Annotated[Path, typer.Option(help="Folder for pictures, records and logs.")]
Conversations = Annotated[int, typer.Option(min=1, help="Conversations per leg.")]
Turns = Annotated[int, typer.Option(min=2, help="Turns per conversation.")]
Longest = Annotated[int, typer.Option(help="Prompt of the last turn, in tokens.")]
Step = Annotated[int, typer.Option(help="Tokens that each turn adds: reply and next question.")]
ReplyTokens = Annotated[int, typer.Option(min=2, help="Tokens per reply.")]


def demo(
    out: Out = Path("out/demo"),
    conversations: Conversations = 3,
    turns: Turns = 7,
    longest: Longest = 8600,
    step: Step = 640,
    reply: ReplyTokens = 64,
    engine_python: Annotated[str, typer.Option(help="The Python that has vLLM.")] = sys.executable,
) -> None:
    """Run a real pair with reuse OFF, then ON; print a table and save two pictures."""
    order = DemoOrder(plan_or_exit(turns, longest, step, reply), conversations, out, "as processes of one machine")
    raise typer.Exit(asyncio.run(run_local_demo(order, engine_python)))


def plan_or_exit(turns: int, longest: int, step: int, reply: int) -> DialoguePlan:
    """The plan; ends the program with 2 when the numbers don't go together."""
    plan = DialoguePlan(turns, longest, step, reply)
    try:
        plan.question_tokens()
        check_fits(longest, reply)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    return plan


async def run_local_demo(order: DemoOrder, engine_python: str = sys.executable) -> int:
    """Both legs as local processes. Returns the exit code."""
    console = Console(show_lines=False)
    interrupts = Interrupts(console.say)
    console.on_closed(interrupts.output_closed)

    def ground(model: Path) -> Ground:
        return LocalGround(order.plan, model, order.out, engine_python, console)

    code = await interrupts.run(measure_and_show(order, ground, console))
    if code is None:
        console.settle()
        console.say("everything is stopped")
        return interrupts.exit_code
    return code
