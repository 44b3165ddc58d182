"""Which objects wait for a reconcile: each at most once, none by two workers at the same time.

Level-triggered: a wake-up says "look again", never what happened, so any number of them during one reconcile make one
more. A failure comes back with growing delay; a server's Retry-After is a floor that no event undercuts.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from typing import Final, NamedTuple

FIRST_DELAY: Final = 1.0
LONGEST_DELAY: Final = 30.0
"""Seconds. Whoever lifts a policy, raises a quota or renames an object wakes nobody here, so this is how late it is
noticed, and with refused children it may be how long an outage lasts. Thirty objects that fail for ever cost one look
per second; a server that has too much to do asks for more time by Retry-After.
"""


class Key(NamedTuple):
    """Namespace and name of a PDDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Wakeups:
    """The queue between events and workers. For one event loop."""

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._floor: dict[Key, float] = {}
        self._changed = asyncio.Event()

    def wake(self, key: Key, delay: float = 0.0) -> None:
        """Ask for a reconcile no later than `delay` seconds from now."""
        if key in self._running:
            self._again.add(key)
            return
        self._schedule(key, self._clock() + delay)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._due.pop(key, None)
        self._again.discard(key)
        self._failures.pop(key, None)
        self._floor.pop(key, None)

    async def next(self) -> Key:
        """Wait for the next object and hold it until `done` or `failed`."""
        while True:
            self._changed.clear()
            wait = self._wait()
            if wait == 0.0:
                _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._running.add(key)
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """The reconcile went through."""
        self._failures.pop(key, None)
        self._floor.pop(key, None)
        self._release(key)

    def failed(self, key: Key, retry_after: float | None = None, *, progress: bool = False) -> float:
        """The reconcile must be repeated; after `progress` as if for the first time. Returns the delay in seconds."""
        count = 0 if progress else self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(count, 16)) * (0.9 + 0.2 * self._jitter())
        if key in self._again:
            # Something has changed meanwhile, so it may work now; still not at once, or a failing object spins.
            delay = min(delay, FIRST_DELAY)
            self._again.discard(key)
        if retry_after is not None:
            delay = max(delay, retry_after)
            self._floor[key] = self._clock() + retry_after
        self._release(key)
        self._schedule(key, self._clock() + delay)
        return delay

    def __len__(self) -> int:
        return len(self._due) + len(self._running)

    def overdue(self) -> float:
        """Seconds for which the object that waits longest could have been looked at; 0 when none is due."""
        return max(0.0, self._clock() - min(self._due.values(), default=self._clock()))

    def _release(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._schedule(key, self._clock())

    def _schedule(self, key: Key, at: float) -> None:
        at = max(at, self._floor.get(key, at))
        known = self._due.get(key)
        if known is not None and known <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        self._changed.set()

    def _wait(self) -> float | None:
        """Seconds until the next object is due, 0 when one is, None when there is none. Drops outdated entries."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        return max(0.0, self._heap[0][0] - self._clock())
