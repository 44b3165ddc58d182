"""`pdctl up`: a PDDeployment file as local processes, until told to stop or until one of them dies."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import SpecError
from pdctl.core.commands import LOOPBACK, Urls
from pdctl.core.overrides import OverrideError, apply_overrides
from pdctl.core.placement import PlacementError
from pdctl.core.ports import PortError, PortWishes
from pdctl.shell.console import Console
from pdctl.shell.engine_python import EnginePythonError
from pdctl.shell.files import FileError, check_model_folder, read_document
from pdctl.shell.folders import FolderError, writable_folder
from pdctl.shell.interrupts import Interrupts
from pdctl.shell.lifecycle import StartError
from pdctl.shell.local import LocalDeployment, LocalOptions


def up(
    file: Annotated[Path, typer.Option("--file", "-f", help="PDDeployment file (YAML).")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change one field: spec.path=value (YAML). Repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where the router listens. Engines stay on loopback.")] = LOOPBACK,
    router_port: Annotated[int | None, typer.Option(help="Router's port. Default: a free one from 8000.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Router's admin port. Default: a free one from 9000.")] = None,
    base_port: Annotated[
        int | None,
        typer.Option(help="Engines' ports: prefill from here, decode from +100, side channels from +200."),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Full logs, one per process. Default: a new folder.")] = None,
    engine_python: Annotated[str, typer.Option(help="The Python that has vLLM.")] = sys.executable,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds an engine may take. Default: spec.engine.startupTimeoutSeconds.")
    ] = None,
    stop_grace: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Don't show the processes' output.")] = False,
) -> None:
    """Run a PDDeployment file on this machine: its engines and the router. Ctrl-C stops everything."""
    console = Console(show_lines=not quiet)
    options = LocalOptions(
        host=host,
        ports=PortWishes(router_port, admin_port, base_port),
        log_dir=log_dir,
        engine_python=engine_python,
        stop_grace=stop_grace,
        start_timeout=start_timeout,
    )
    try:
        deployment = load_changed(file, settings or [])
        check_model_folder(deployment, file)
        local = LocalDeployment(deployment, options, console)
    except (FileError, OverrideError, PlacementError, PortError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except SpecError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(asyncio.run(_run(local, console)))


def load_changed(file: Path, settings: list[str]) -> PDDeployment:
    """A file with `--set` applied. A relative model folder is resolved against the file's folder.

    Raises:
        FileError, OverrideError, SpecError: as their names say.
    """
    deployment = parse_deployment(apply_overrides(read_document(file), settings))
    name = deployment.spec.model.name
    if deployment.spec.model.is_local and not Path(name).is_absolute():
        return deployment.with_model_name(str((file.parent / name).resolve()))
    return deployment


async def _run(local: LocalDeployment, console: Console) -> int:
    interrupts = Interrupts(console.say)
    console.on_closed(interrupts.output_closed)
    ready = asyncio.Event()
    code = await interrupts.run(_serve(local, console, ready))
    if code is not None:
        return code
    console.say("everything is stopped")
    # Stopping what serves is how `up` normally ends; stopping what never served is not.
    return 0 if ready.is_set() else interrupts.exit_code


async def _serve(local: LocalDeployment, console: Console, ready: asyncio.Event) -> int:
    try:
        await local.check()
        console.say(f"logs: {writable_folder(local.log_dir)}")
        await local.start()
        console.settle()
        ready.set()
        console.say(_invitation(local.urls))
        dead = await local.wait_failure()
    except (EnginePythonError, FolderError) as error:
        console.say(str(error))
        return 2
    except StartError as error:
        console.settle()
        console.say(str(error))
        console.say("everything is stopped")
        return 1
    finally:
        console.settle()
        await local.stop()
    console.say(dead.report())
    console.say("everything is stopped")
    return 1


def _invitation(urls: Urls) -> str:
    return (
        f"serving {urls.model} at {urls.router}/v1 (metrics and decisions: {urls.admin}/metrics, /debug/explain)\n"
        f"try: curl {urls.router}/v1/chat/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{urls.model}", "messages": [{{"role": "user", "content": "hello"}}]}}\'\n'
        f"stop with Ctrl-C"
    )
