"""`pdctl model make`: write the tiny model that `demo` and the tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdctl.shell.model_maker import ModelMakerError, cached_tiny_model, make_tiny_model


def make(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="A new or empty folder. [default: the cache, where an embedded cluster's pods look for it]"
        ),
    ] = None,
) -> None:
    """Make the tiny model: a random Qwen3 whose replies survive the way through text. Takes about five seconds."""
    try:
        if directory is None:
            cached_tiny_model(typer.echo)
        else:
            make_tiny_model(directory, typer.echo)
    except ModelMakerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
