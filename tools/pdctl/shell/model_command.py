"""`pdctl model make`: write the tiny model that `demo` and the tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.shell.model_maker import ModelMakerError, make_tiny_model


def make(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")]) -> None:
    """Make the tiny model: a random Qwen3 whose replies survive the way through text. Takes about five seconds."""
    try:
        make_tiny_model(directory, typer.echo)
    except ModelMakerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
