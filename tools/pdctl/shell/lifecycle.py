"""What a local deployment reports: processes that start, are ready, or are gone, and who wants to know.

Separate from `local` so that consoles and tests can use the values without the machinery.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdctl.core.exits import Exit, exit_report


@dataclass(frozen=True, slots=True)
class Started:
    """A process that answers its health check, ``seconds`` after its start. ``pid`` leads its session and group."""

    name: str
    pid: int
    url: str
    seconds: float
    log: Path


@dataclass(frozen=True, slots=True)
class Stopped:
    """A process that is gone, with everything that it had started."""

    name: str
    exit: Exit
    tail: tuple[str, ...]
    log: Path

    def report(self) -> str:
        """For a person: who, how, why, and the last lines of its log."""
        return exit_report(self.name, str(self.exit), self.tail, str(self.log))


@dataclass(frozen=True, slots=True)
class Starting:
    """A process that doesn't answer yet: since how many seconds, and what it last wrote."""

    name: str
    seconds: float
    last_line: str


class StartError(RuntimeError):
    """A process died before it was ready, or wasn't ready in time. Everything else has been stopped."""

    def __init__(self, stopped: Stopped, what: str) -> None:
        self.stopped = stopped
        super().__init__(exit_report(stopped.name, what, stopped.tail, str(stopped.log)))


class Listener(Protocol):
    """Who wants to know. Called in the event loop; must return quickly and not raise."""

    def line(self, name: str, text: str) -> None:
        """A process wrote a line."""

    def starting(self, waiting: Sequence[Starting]) -> None:
        """About twice a second while something isn't ready."""

    def started(self, process: Started) -> None:
        """A process is ready."""


class Silent:
    """A listener that drops everything; the logs are in the files all the same."""

    def line(self, name: str, text: str) -> None:
        """Nothing."""

    def starting(self, waiting: Sequence[Starting]) -> None:
        """Nothing."""

    def started(self, process: Started) -> None:
        """Nothing."""
