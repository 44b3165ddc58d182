"""`pdctl cluster demo`: the product as a platform engineer meets it, from `helm install` to the plots, in a cluster of
its own.

Two processes: the outer one starts the cluster and always takes it down; the inner one runs in the cluster's network,
where the router's Service and the pods have their addresses. Where no cluster can be started, the local demo is played
instead, and the reason is told.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import SpecError
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.demo_ground import ClusterGround
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import Interrupted, uninterrupted
from pdctl.shell.cluster.told import describe
from pdctl.shell.console import Console
from pdctl.shell.demo_command import (
    Conversations,
    Longest,
    Out,
    ReplyTokens,
    Step,
    Turns,
    plan_or_exit,
    run_local_demo,
)
from pdctl.shell.demo_report import DemoOrder, measure_and_show
from pdctl.shell.files import FileError, read_document
from pdctl.shell.folders import FolderError, writable_folder
from pdctl.shell.interrupts import Interrupts
from pdctl.shell.model_maker import ModelMakerError, cached_tiny_model

NAME: Final = "demo"
Chart = Annotated[Path, typer.Option(help="The operator's Helm chart.", exists=True, file_okay=False)]
Example = Annotated[Path, typer.Option(help="The PDDeployment to apply.", exists=True, dir_okay=False)]
LEAVE_SECONDS: Final = 10.0
"""What the inner process gets for stopping in its own way; then the cluster's end is its end."""
WHERE: Final = "in pods of an embedded Kubernetes"


def demo(
    out: Out = Path("out/demo"),
    conversations: Conversations = 3,
    turns: Turns = 7,
    longest: Longest = 8600,
    step: Step = 640,
    reply: ReplyTokens = 64,
    chart: Chart = Path("charts/pd-operator"),
    example: Example = Path("examples/cpu-tiny.yaml"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up afterwards.")] = False,
) -> None:
    """Start a cluster, install the operator, apply an example, play with reuse ON and OFF, tear everything down."""
    order = DemoOrder(plan_or_exit(turns, longest, step, reply), conversations, out, "as processes of one machine")
    deployment = example_or_exit(example)
    limit = deployment.spec.model.max_model_len
    if limit is not None and longest + reply > limit:
        fail(f"--longest {longest}: prompt and reply must fit into {example}'s spec.model.maxModelLen, {limit}")
    try:
        writable_folder(out)
    except FolderError as error:
        fail(f"--out {error}")
    console = Console(show_lines=False)
    try:
        cluster = EmbeddedCluster(NAME, say=console.say, progress=console.progress)
        # For the whole run: another demo would take the cluster away.
        cluster.claim()
    except ClusterError as error:
        fail(str(error))
    begun = time.monotonic()
    try:
        # The pods see the cache of models as it is when they start.
        cached_tiny_model(console.say)
    except (ModelMakerError, OSError) as error:
        fail(f"the tiny model can't be made: {_told(error)}")
    code, obstacle = 1, ""
    try:
        try:
            cluster.up(replace=True)
        except (ClusterError, OSError) as error:
            obstacle = _told(error)
        else:
            console.settle()
            seconds = f"{time.monotonic() - begun:.1f}"
            words = [
                *("--out", str(out), "--chart", str(chart), "--example", str(example), "--up-seconds", seconds),
                *("--conversations", str(conversations), "--turns", str(turns), "--longest", str(longest)),
                *("--step", str(step), "--reply", str(reply)),
            ]
            code = _in_cluster(cluster, words, console)
    finally:
        try:
            console.settle()
        finally:
            # Also where the terminal has gone away, and writing to it fails.
            if not obstacle:
                _finish(cluster, console, keep=keep)
    if obstacle:
        cluster.disclaim()
        console.say(f"no cluster can be started here: {obstacle}\nplaying the local demo instead")
        code = asyncio.run(run_local_demo(order))
    raise typer.Exit(code)


def _told(error: Exception) -> str:
    return describe(error) if isinstance(error, OSError) else str(error)


def example_or_exit(example: Path) -> PDDeployment:
    """The file as a PDDeployment; ends the program with 2 when it is none."""
    try:
        return parse_deployment(read_document(example))
    except (FileError, SpecError) as error:
        fail(f"{example}: {error}" if isinstance(error, SpecError) else str(error))


def fail(text: str) -> NoReturn:
    """End with 2: nothing was started."""
    typer.echo(text, err=True)
    raise typer.Exit(2)


def _in_cluster(cluster: EmbeddedCluster, words: list[str], console: Console) -> int:
    inner = cluster.inside([sys.executable, "-m", "pdctl", "cluster", "demo-inside", *words])
    process = None
    try:
        process = subprocess.Popen(inner, env=cluster.environment())
        code = process.wait()
    except Interrupted as interrupted:
        console.say(f"{interrupted}: stopping and taking the cluster down; further signals wait until that is done")
        # A terminal's Ctrl-C reaches it as well; a signal to this process alone doesn't.
        if process is not None:
            _stop(process)
        return interrupted.exit_code
    if code < 0:
        console.say(f"FAILED: the part that runs in the cluster was ended by {signal.Signals(-code).name}")
        return 1
    return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    with uninterrupted():
        process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _finish(cluster: EmbeddedCluster, console: Console, *, keep: bool) -> None:
    if keep and cluster.is_up:
        console.say(f"the cluster stays: pdctl cluster kubectl --name {NAME} get pdd; pdctl cluster down --name {NAME}")
        return
    begun = time.monotonic()
    try:
        cluster.down()
    except ClusterError as error:
        raise ClusterError(f"{error}\ntry again: pdctl cluster down --name {NAME}") from error
    console.say(f"the cluster is down after {time.monotonic() - begun:.1f} s, nothing is left")


def demo_inside(
    out: Out,
    conversations: Conversations,
    turns: Turns,
    longest: Longest,
    step: Step,
    reply: ReplyTokens,
    chart: Chart,
    example: Example,
    up_seconds: Annotated[float, typer.Option(help="What starting the cluster took.")] = 0.0,
) -> None:
    """The part of the demo that runs in a cluster's network, with kubectl and helm on the PATH."""
    plan = plan_or_exit(turns, longest, step, reply)
    deployment = example_or_exit(example)
    console = Console(show_lines=False)
    name, served = deployment.metadata.name, deployment.spec.model.public_name
    ground = ClusterGround(chart, example, name, served, out / "logs", console)

    async def play() -> int:
        begun = time.monotonic()
        try:
            await ground.install()
            installed = ("helm install", time.monotonic() - begun)
            order = DemoOrder(plan, conversations, out, WHERE, (("cluster: up", up_seconds), installed))
            code = await measure_and_show(order, lambda _model: ground, console)
            console.block("")
            console.block(await ground.show())
        except ClusterError as error:
            console.settle()
            console.say(f"FAILED: {error}")
            return 1
        return code

    raise typer.Exit(asyncio.run(_inner(play(), console)))


async def _inner(work: Coroutine[Any, Any, int], console: Console) -> int:
    # The outer process tells about signals.
    interrupts = Interrupts(lambda _text: None)
    console.on_closed(interrupts.output_closed)
    code = await interrupts.run(work)
    return interrupts.exit_code if code is None else code
