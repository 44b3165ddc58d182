"""Ctrl-C, SIGTERM and SIGHUP while clusters are started and ended: the first interrupts, cleaning up runs to its end.

Separate from `shell.interrupts`, which cancels a task of an event loop: a cluster is started by plain calls, and what
was started must be found and removed whatever arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_SECONDS: Final = 2.0
"""A second signal within this time is the first one again: `make` passes on what its group has got already."""


class Interrupted(BaseException):
    """Somebody wants this program to end. No `Exception`, so that nobody takes it for an error."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)

    @property
    def exit_code(self) -> int:
        """As shells count: 128 + signal."""
        return 128 + int(self.number)


class Interrupting:
    """While it is entered, a signal raises `Interrupted` in the main thread."""

    def __init__(self) -> None:
        self._raised_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupting:
        self._before = _replace_handlers(self._on_signal)
        return self

    @property
    def has_raised(self) -> bool:
        """Is the program on its way to its end?"""
        return self._raised_at is not None

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._raised_at is None or now - self._raised_at > PATIENCE_SECONDS:
            self._raised_at = now
            raise Interrupted(signal.Signals(number))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """For what must not be left half done and takes bounded time: a signal counts once it is over."""
    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's.
        yield
        return
    pending: list[int] = []
    before = _replace_handlers(lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in pending[:1]:
            # Whoever is on the way to the end for an earlier signal needs no other.
            owner = getattr(before[signal.Signals(late)], "__self__", None)
            if not (isinstance(owner, Interrupting) and owner.has_raised):
                signal.raise_signal(late)


def _replace_handlers(handler: Any) -> dict[signal.Signals, Any]:
    """Returns those of before. What is ignored (`nohup`, a job in the background) stays ignored."""
    found = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            found[number] = signal.signal(number, handler)
    return found
