"""The process ends when it is told to, and within a bound whatever hangs.

Needed because kopf can hang at its own end: once one of its watches has failed, it cancels the tasks that its other
watches wait for, and they swallow each cancellation. Nothing in the event loop can end that, nor does SIGTERM: as the
first process of a container nothing ends it that it does not handle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

LIMIT: Final = 20.0
"""Seconds; below the 30 that the chart's pod is given."""


class Ending:
    """The end of one process; `leave` ends it at once, with an exit status."""

    def __init__(self, limit: float = LIMIT, leave: Callable[[int], None] = os._exit) -> None:
        self._limit = limit
        self._leave = leave
        self._timer: threading.Timer | None = None

    def heed_signals(self, act: Callable[[], object]) -> None:
        """On SIGTERM and SIGINT begin to end, and call `act`; replaces what was set before."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told, act)

    def begin(self) -> None:
        """From now on the process has `limit` seconds. In a thread, since the event loop may be what hangs."""
        if self._timer is None:
            self._timer = threading.Timer(self._limit, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _told(self, act: Callable[[], object]) -> None:
        self.begin()
        act()

    def _give_up(self) -> None:
        logger.error("not ended within %.0f s; leaving what hangs", self._limit)
        self._leave(1)
