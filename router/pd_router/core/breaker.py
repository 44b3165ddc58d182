"""Circuit breaker for one engine: stop sending work to what keeps failing, and try again one turn at a time.

Pure: time comes in. Separate from readiness, because an engine can answer `/health` and fail every request (EL-05).
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
MAX_OPEN_SECONDS = 60.0
TRIAL_SECONDS = 60.0
"""A trial without an outcome for so long is over: its turn may have ended in a way that nobody reported."""


@dataclass(slots=True)
class Breaker:
    """Closed: all work passes. Open: none, until `until`. Then one trial; its outcome closes or re-opens it, longer."""

    failures: int = 0
    until: float = 0.0
    trial: bool = False
    trial_ends: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether work may be sent. Does not change anything."""
        return self.failures < FAILURES_TO_OPEN or (now >= self.until and (not self.trial or now >= self.trial_ends))

    def sent(self, now: float) -> None:
        """Work is being sent; when the breaker is open this is its trial."""
        if self.failures >= FAILURES_TO_OPEN and now >= self.until:
            self.trial = True
            self.trial_ends = now + TRIAL_SECONDS

    def succeeded(self) -> None:
        """The engine did what it was asked."""
        self.failures = 0
        self.trial = False

    def failed(self, now: float) -> None:
        """The engine failed in a way that is its own fault."""
        self.failures += 1
        self.trial = False
        if self.failures >= FAILURES_TO_OPEN:
            self.until = now + min(OPEN_SECONDS * 2 ** (self.failures - FAILURES_TO_OPEN), MAX_OPEN_SECONDS)

    def abandoned(self) -> None:
        """The work ended without a verdict (the client left); a trial may be made again."""
        self.trial = False
