"""Which engines failed of late at an endpoint that passes, so that others are asked first.

Separate from the engines' own breakers: a client can make one endpoint fail by what it sends there, and that must take
no engine away from turns, nor from those who use the endpoint well. So an engine that fails is asked last, and is asked
all the same when there is no other.
"""

from __future__ import annotations

from typing import Final

from pd_router.core.breaker import Breaker
from pd_router.core.placement import Engine, Loads

_MOST: Final = 1024


class PassedHealth:
    """Failures in a row by engine, its process, and endpoint. Only those that fail are remembered."""

    def __init__(self) -> None:
        self._failing: dict[tuple[str, str, str], Breaker] = {}

    def choose(
        self, engines: tuple[Engine, ...], path: str, tried: frozenset[str], loads: Loads, now: float
    ) -> Engine | None:
        """The engine to ask: one that was not tried and does not fail, then the least loaded, then the one that was
        given work longest ago. None when no engine takes work."""
        ready = [engine for engine in engines if engine.takes_work]
        return min(ready, key=lambda engine: self._rank(engine, path, tried, loads, now), default=None)

    def _rank(
        self, engine: Engine, path: str, tried: frozenset[str], loads: Loads, now: float
    ) -> tuple[bool, bool, int, int]:
        breaker = self._failing.get((engine.key, engine.incarnation, path))
        failing = breaker is not None and not breaker.allows(now)
        return engine.key in tried, failing, loads.turns(engine.key), loads.opened(engine.key)

    def sent(self, engine: Engine, path: str, now: float) -> None:
        """It is being asked; where it failed before, this is its trial."""
        breaker = self._failing.get((engine.key, engine.incarnation, path))
        if breaker is not None:
            breaker.sent(now)

    def succeeded(self, engine: Engine, path: str) -> None:
        """It answered, if only with a refusal."""
        self._failing.pop((engine.key, engine.incarnation, path), None)

    def failed(self, engine: Engine, path: str, now: float) -> None:
        """It failed, or said that it can't now."""
        if len(self._failing) >= _MOST:
            self._failing.clear()  # processes that are gone by now; the others are soon known again
        breaker = self._failing.setdefault((engine.key, engine.incarnation, path), Breaker())
        breaker.failed(now, trial=breaker.trial)

    def abandoned(self, engine: Engine, path: str) -> None:
        """Nobody waited for the end."""
        breaker = self._failing.get((engine.key, engine.incarnation, path))
        if breaker is not None:
            breaker.abandoned(breaker.trial)
