"""Where a simulation's turns come from: a file, or the made-up crowd of coding agents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from pdctl.core.coding_agents import Crowd, make_trace
from pdctl.core.kv_trace import Client, TraceError, format_trace, parse_trace


class TraceFileError(Exception):
    """A file that is no trace or can't be written, in one sentence that names it."""


def read_trace(path: Path) -> Sequence[Client]:
    """The turns of a JSONL file.

    Raises:
        TraceFileError: see its name.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines)
    except TraceError as error:
        raise TraceFileError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise TraceFileError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def write_trace(path: Path, clients: Sequence[Client]) -> None:
    """Write what `read_trace` reads.

    Raises:
        TraceFileError: the file can't be written.
    """
    try:
        path.write_text("".join(f"{line}\n" for line in format_trace(clients)), encoding="utf-8")
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be written: {error.strerror or error}") from None


def made_up(crowd: Crowd, seed: int) -> Sequence[Client]:
    """The same turns for the same seed, on any machine."""
    return make_trace(crowd, random.Random(seed).random)
