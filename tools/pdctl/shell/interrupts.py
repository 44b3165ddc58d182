"""Ctrl-C, SIGTERM and SIGHUP as a cancelled task: the first asks for an orderly end, the second for a quick one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Runs one coroutine so that a signal cancels it. ``received`` is the first signal, or None."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self.closed = False
        self._say = say
        self._task: asyncio.Task[int] | None = None

    @property
    def exit_code(self) -> int:
        """Of a program that was ended this way, as shells count: 128 + signal; a closed output is a SIGPIPE."""
        return 128 + int(self.received or signal.SIGPIPE)

    async def run(self, work: Coroutine[Any, Any, int]) -> int | None:
        """The coroutine's result, or None when it was cancelled by a signal or by `output_closed`."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(work)
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self.received is None and not self.closed:
                raise
            return None
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def output_closed(self) -> None:
        """Nobody reads the output any more: the same as a signal."""
        if not self.closed and self._task is not None:
            self.closed = True
            self._task.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self._say(f"{number.name}: stopping; once more to stop at once")
        else:
            self._say(f"{number.name}: stopping at once")
        if self._task is not None:
            self._task.cancel()
