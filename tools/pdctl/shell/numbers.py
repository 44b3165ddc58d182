"""Numbers on a command line. Ranges don't keep out what is no number, and a simulation with it never ends."""

from __future__ import annotations

import math
from typing import TypeVar

import typer

Value = TypeVar("Value", float, list[float], None)


def finite(value: Value) -> Value:
    """For an option's `callback`: refuses `nan` and `inf`."""
    if not all(map(math.isfinite, value if isinstance(value, list) else [value or 0.0])):
        raise typer.BadParameter("must be a finite number")
    return value
