"""How many turns run at one time, and how many may wait.

A bounded first-in-first-out queue in front of the engines. Separate because it is the only place where a client waits
for the router itself; everything else waits for an engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pd_router.core.errors import RATE_LIMIT, ApiError, queue_full
from pd_router.core.linking import ANONYMOUS
from pd_router.core.tenant_limits import queue_refusal
from pd_router.shell.metrics import Metrics

RETRY_AFTER_SECONDS = 1


class Withdrawn(Exception):
    """The client left while its turn waited."""


class Admission:
    """`enter` before a turn, `leave` after it, exactly once each; `withdraw` when the client is gone."""

    def __init__(
        self,
        max_inflight: int,
        max_queue: int,
        timeout: float,
        metrics: Metrics,
        tenant_share: float = 1.0,
        on_tenant_full: Callable[[], None] = lambda: None,
    ) -> None:
        """``tenant_share``: of the queue, for one tenant's turns; ``on_tenant_full`` is called for one too many."""
        self._on_tenant_full = on_tenant_full
        self._tenant_places = max(1, int(max_queue * tenant_share))
        self._tenants: dict[object, str] = {}
        self._places_of: Counter[str] = Counter()
        self._max_inflight = max_inflight
        self._max_queue = max_queue
        self._timeout = timeout
        self._waiting: dict[object, asyncio.Future[None]] = {}
        """By turn, in order of arrival."""
        self.inflight = 0
        metrics.inflight.set_function(lambda: self.inflight)
        metrics.queued.set_function(lambda: len(self._waiting))

    async def enter(self, turn: object, tenant: str | None = None) -> None:
        """Take a place, waiting for one if need be.

        Raises ApiError 429 when the queue, or the tenant's share of it, is full or the wait too long, Withdrawn when
        `withdraw` was called.
        """
        if self.inflight < self._max_inflight:
            self.inflight += 1
            return
        if len(self._waiting) >= self._max_queue:
            raise queue_full(self._max_inflight + self._max_queue, RETRY_AFTER_SECONDS)
        name = tenant or ANONYMOUS
        if self._places_of[name] >= self._tenant_places:
            self._on_tenant_full()
            raise queue_refusal(self._tenant_places)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = place
        self._tenants[turn] = name
        self._places_of[name] += 1
        try:
            async with asyncio.timeout(self._timeout):
                await place
        except TimeoutError:
            if _granted(place):
                self.leave()
            raise self._too_long() from None
        except asyncio.CancelledError:
            if _granted(place):
                self.leave()  # the place was handed over just as the turn was cancelled
            raise
        finally:
            self._forget(turn)

    def withdraw(self, turn: object) -> None:
        """Give up the place in the queue, if the turn has one."""
        place = self._waiting.get(turn)
        self._forget(turn)
        if place is not None and not place.done():
            place.set_exception(Withdrawn())

    def leave(self) -> None:
        """Give the place to whoever waits longest."""
        while self._waiting:
            turn = next(iter(self._waiting))
            place = self._waiting[turn]
            self._forget(turn)
            if not place.done():
                place.set_result(None)
                return
        self.inflight -= 1

    def _forget(self, turn: object) -> None:
        if self._waiting.pop(turn, None) is not None:
            name = self._tenants.pop(turn)
            self._places_of[name] -= 1
            if not self._places_of[name]:
                del self._places_of[name]

    def _too_long(self) -> ApiError:
        text = f"No place came free within {self._timeout:g} s. Try again in {RETRY_AFTER_SECONDS} s"
        return ApiError(429, text, RATE_LIMIT, "queue_timeout", retry_after=RETRY_AFTER_SECONDS)


def _granted(place: asyncio.Future[None]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None
