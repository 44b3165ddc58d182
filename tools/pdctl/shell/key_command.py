"""`pdctl key make`: an API key for a tenant, and the line that routers know it by.

Separate from anything that stores keys: the key is shown once and kept nowhere, its hash goes into a Secret.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
PREFIX = "sk-pd-"
RANDOM_BYTES = 32


def make(
    name: Annotated[str, typer.Argument(help="The tenant's name; may have several keys.")],
    append: Annotated[
        Path | None, typer.Option("--append", help="A keys file to add the line to; made if need be.")
    ] = None,
) -> None:
    """Make a key. Prints the key to stdout, and to stderr the line for the keys file, unless --append takes it."""
    if not NAME.fullmatch(name):
        typer.echo(f"NAME: {name!r} must be a letter or digit, then up to 63 letters, digits and . _ @ -", err=True)
        raise typer.Exit(2)
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    line = f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"
    if append is None:
        typer.echo(line, err=True)
    else:
        try:
            _append(append, line)
        except OSError as error:
            typer.echo(f"--append: {append}: {error.strerror or error}", err=True)
            raise typer.Exit(2) from None
    typer.echo(key)


def _append(path: Path, line: str) -> None:
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            # A last line without its end would swallow the new one.
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode() + b"\n")
