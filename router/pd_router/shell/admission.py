"""How many turns run at one time, and how many may wait.

A bounded first-in-first-out queue in front of the engines. Separate because it is the only place where a client waits
for the router itself; everything else waits for an engine.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pd_router.core.errors import ApiError, queue_full
from pd_router.shell.metrics import Metrics

RETRY_AFTER_SECONDS = 1


class Admission:
    """`enter` before a turn, `leave` after it, exactly once each."""

    def __init__(self, max_inflight: int, max_queue: int, timeout: float, metrics: Metrics) -> None:
        self._max_inflight = max_inflight
        self._max_queue = max_queue
        self._timeout = timeout
        self._metrics = metrics
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.inflight = 0

    async def enter(self) -> None:
        """Take a place, waiting for one if need be. Raises ApiError 429 when the queue is full or the wait too long."""
        if self.inflight < self._max_inflight:
            self._set(self.inflight + 1)
            return
        if len(self._waiting) >= self._max_queue:
            raise self._full()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._metrics.queued.set(len(self._waiting))
        try:
            async with asyncio.timeout(self._timeout):
                await place
        except TimeoutError:
            raise self._full() from None
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # the place was handed over just as the turn was cancelled
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            self._metrics.queued.set(len(self._waiting))

    def leave(self) -> None:
        """Give the place to whoever waits longest."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._set(self.inflight - 1)

    def _set(self, inflight: int) -> None:
        self.inflight = inflight
        self._metrics.inflight.set(inflight)

    def _full(self) -> ApiError:
        return queue_full(self._max_inflight + self._max_queue, RETRY_AFTER_SECONDS)
