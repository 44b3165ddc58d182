"""What pdctl shows: process output with a prefix and a colour, progress while waiting, its own remarks.

On a terminal there is one moving status line; in a pipe or a CI log the same facts come as plain lines, a few per
minute. When the reader goes away (`pdctl up | head`), `on_closed` is called once and everything after that is dropped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import rich.console
from rich.status import Status
from rich.text import Text

from pdctl.shell.lifecycle import Started, Starting

OWN_NAME: Final = "pdctl"
NAME_WIDTH: Final = 10
PLAIN_INTERVAL: Final = 10.0
"""Seconds between two progress lines when there is no terminal."""
LAST_LINE_SHOWN: Final = 70
COLOURS: Final = {"prefill": "cyan", "decode": "green", "router": "magenta", OWN_NAME: "bold"}


class _Output(rich.console.Console):
    """A rich console that reports a closed pipe instead of leaving the program in the middle of something."""

    on_closed: Callable[[], None] = staticmethod(lambda: None)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self.on_closed()


class Console:
    """A `Listener` that prints. ``show_lines`` is whether the processes' own output is shown."""

    def __init__(self, *, show_lines: bool) -> None:
        self._show_lines = show_lines
        self._output = _Output(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._status: Status | None = None
        self._next_plain = 0.0

    def on_closed(self, call: Callable[[], None]) -> None:
        """What to do when nobody reads the output any more."""
        self._output.on_closed = call

    def say(self, text: str) -> None:
        """A remark of pdctl's own; each line gets the prefix."""
        for line in text.splitlines():
            self._print(OWN_NAME, line)

    def block(self, text: str) -> None:
        """Text without a prefix: a table."""
        self._output.print(Text(text))

    def line(self, name: str, text: str) -> None:
        """A process wrote a line."""
        if self._show_lines:
            self._print(name, text)

    def starting(self, waiting: Sequence[Starting]) -> None:
        """Progress while processes start."""
        seconds = max(one.seconds for one in waiting)
        names = ", ".join(one.name for one in waiting)
        if self._show_lines:
            self.progress(f"waiting for {names}: {seconds:.0f} s")
        else:
            last = " ".join(waiting[0].last_line.split())
            shown = last if len(last) <= LAST_LINE_SHOWN else f"{last[: LAST_LINE_SHOWN - 1]}…"
            self.progress(f"waiting for {names}: {seconds:.0f} s" + (f"   ({shown})" if shown else ""))

    def started(self, process: Started) -> None:
        """A process is ready."""
        self.say(f"{process.name} is ready after {process.seconds:.0f} s: {process.url}")

    def progress(self, text: str) -> None:
        """Something that changes often: replaces the status line, or is printed now and then."""
        if self._output.is_terminal:
            if self._status is None:
                self._status = self._output.status(Text(text))
                self._status.start()
            else:
                self._status.update(Text(text))
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_INTERVAL
            self.say(text)

    def settle(self) -> None:
        """Take the status line away; the next progress is shown at once."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._next_plain = time.monotonic() + PLAIN_INTERVAL

    def _print(self, name: str, text: str) -> None:
        colour = COLOURS.get(name.partition("-")[0], "white")
        self._output.print(Text(f"{name:<{NAME_WIDTH}}| ", style=colour), Text(text), sep="")
