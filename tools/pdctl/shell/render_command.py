"""`pdctl render`: print the commands of a deployment's processes, offline."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pd_operator.core.problems import SpecError
from pdctl.core.render import render_json, render_shell
from pdctl.shell.files import FileError, load_deployment


class Output(StrEnum):
    """What to print."""

    SHELL = "shell"
    JSON = "json"


def render(
    file: Annotated[Path, typer.Option("--file", "-f", help="PDDeployment file (YAML).")],
    output: Annotated[Output, typer.Option("--output", "-o", help="Commands for bash, or JSON.")] = Output.SHELL,
) -> None:
    """Print the engine and router commands of a PDDeployment file, without starting anything."""
    try:
        deployment = load_deployment(file)
    except FileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except SpecError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(render_json(deployment) if output is Output.JSON else render_shell(deployment), nl=False)
