"""Which pairs of engines can't move KV between them although both serve others well (EL-04).

A NIXL connection can die between two engines while each of them answers its health check and works with its other
peers. The engines are then not to blame: the pair is, and it alone gets no transfers for a while. The two directions
are apart, because they are two agents' connections: a pair whose hand-offs work may have pulls that all fail.
Pure: time comes in. Only pairs with failures are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from pd_router.core.breaker import Breaker

LONGEST: Final = 20.0
"""Quarantine is doubled by each failed probe, up to so many times its first length."""


class Direction(StrEnum):
    """Who reads from whom; a metric label."""

    HANDOFF = "handoff"
    """Decode reads what prefill has computed."""
    PULL = "pull"
    """Prefill reads what decode kept of the last turn."""


class Pair(NamedTuple):
    """Keys of two engines and a direction."""

    prefill: str
    decode: str
    direction: Direction


@dataclass(slots=True)
class Pairs:
    """Health of all pairs of one router.

    Args:
        quarantine: seconds without transfers after failures. Longer than an engine's breaker is open: the probe of a
            pull costs a turn its pull timeout, and a broken connection heals by a restart.
    """

    quarantine: float
    _breakers: dict[Pair, Breaker] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any pair has failures; without them there is nothing to look at."""
        return bool(self._breakers)

    def sent(self, pair: Pair, now: float) -> object | None:
        """A transfer is about to begin; for a pair in quarantine it is the probe, which is returned."""
        breaker = self._breakers.get(pair)
        return None if breaker is None else breaker.sent(now)

    def succeeded(self, pair: Pair) -> None:
        """The transfer went well."""
        self._breakers.pop(pair, None)

    def failed(self, pair: Pair, now: float, probe: object | None = None) -> None:
        """The transfer failed. `probe`: what `sent` returned."""
        breaker = self._breakers.get(pair)
        if breaker is None:
            breaker = self._breakers[pair] = Breaker(self.quarantine, self.quarantine * LONGEST)
        breaker.failed(now, trial=probe)

    def abandoned(self, pair: Pair, probe: object | None) -> None:
        """The transfer ended without a verdict."""
        breaker = self._breakers.get(pair)
        if breaker is not None:
            breaker.abandoned(probe)

    def forget(self, key: str) -> None:
        """An engine's process is another one now, or gone: its connections are new."""
        for pair in [pair for pair in self._breakers if key in (pair.prefill, pair.decode)]:
            del self._breakers[pair]

    def blocked(self, direction: Direction, now: float) -> frozenset[tuple[str, str]]:
        """(prefill, decode) of the pairs that are in quarantine now."""
        return frozenset(
            (pair.prefill, pair.decode)
            for pair, breaker in self._breakers.items()
            if pair.direction is direction and not breaker.allows(now)
        )

    def tripped(self) -> Iterator[tuple[Pair, Breaker]]:
        """Pairs in quarantine, those whose probe is due or running included."""
        return ((pair, breaker) for pair, breaker in self._breakers.items() if breaker.tripped)
