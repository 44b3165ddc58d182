"""How many turns may be tried again: a share of all turns, so that retries don't make an outage worse (RP-16).

An engine that fails because it has too much to do would get up to twice as much when every turn is tried again. A full
budget lets a burst pass, as when one engine fails all that it had; a lasting failure is retried at the share's rate.
Retries that put no load on an engine that answers (it is gone, or the handle is what failed) are not asked for here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

BURST: Final = 50.0
"""Retries that a full budget allows at once."""


@dataclass(slots=True)
class RetryBudget:
    """Args: share: retries per turn in the long run, 0 to 1; 0 allows none."""

    share: float
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = BURST if self.share else 0.0

    @property
    def left(self) -> float:
        """Retries that are allowed now."""
        return self._left

    def turn(self) -> None:
        """A turn begins."""
        if self._left < BURST:
            self._left = min(BURST, self._left + self.share)

    def take(self) -> bool:
        """Whether one more retry is allowed; it is counted then."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
