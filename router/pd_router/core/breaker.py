"""Circuit breaker: stop sending work to what keeps failing, and try again with one turn at a time.

Pure: time comes in. Separate from readiness, because an engine can answer `/health` and fail every request (EL-05).
One kind serves engines and pairs of engines (`core/pairs.py`), which differ in how long they stay open.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
MAX_OPEN_SECONDS = 60.0
TRIAL_SECONDS = 60.0
"""A trial without an outcome for so long is over: its turn may have ended in a way that nobody reported."""


@dataclass(slots=True)
class Breaker:
    """Closed: all work passes. Open: none, until `until`. Then one trial; its outcome closes or re-opens it, longer.

    Failures count in a row. Those that could be the fault of one partner (a transfer between two engines) open it only
    once they happened with two partners: what fails with one of them is a broken pair, and no broken engine (EL-04).
    """

    open_seconds: float = OPEN_SECONDS
    max_open_seconds: float = MAX_OPEN_SECONDS
    failures: int = 0
    until: float = 0.0
    trial: object | None = None
    """The one that runs. What it is stands for nothing; that it is this one and no other tells who may end it."""
    trial_ends: float = 0.0
    _partners: set[str] = field(default_factory=set)
    """With whom the failures of this row happened; "" is for the engine's own."""
    _openings: int = 0

    @property
    def tripped(self) -> bool:
        """Whether there were too many failures in a row: it is open, or half-open."""
        return self.failures >= FAILURES_TO_OPEN and (len(self._partners) > 1 or "" in self._partners)

    def allows(self, now: float) -> bool:
        """Whether work may be sent. Does not change anything."""
        return not self.tripped or (now >= self.until and (self.trial is None or now >= self.trial_ends))

    def state(self, now: float) -> str:
        """`closed`, `open`, or `half_open` when its time is over and a trial is due or running."""
        if not self.tripped:
            return "closed"
        return "half_open" if now >= self.until else "open"

    def sent(self, now: float) -> object | None:
        """Work is about to be sent. Returns the trial, when it is the one that a half-open breaker allows.

        To be called in the moment in which `allows` was asked, however long the work takes to get there: what else
        would be sent meanwhile would be trials as well.
        """
        if not self.tripped or not self.allows(now):
            return None
        self.trial = object()
        self.trial_ends = now + TRIAL_SECONDS
        return self.trial

    def succeeded(self) -> None:
        """It did what it was asked."""
        if self.failures:
            self.failures = self._openings = 0
            self._partners.clear()
        self.trial = None

    def failed(self, now: float, partner: str = "", trial: object | None = None) -> None:
        """It failed.

        Args:
            partner: the other engine of a transfer, where another one could have taken its place.
            trial: what `sent` returned.
        """
        self.failures += 1
        self._partners.add(partner)
        self.abandoned(trial)
        # What was sent before it opened may fail afterwards: many failures at one moment are no worse than three.
        if self.tripped and now >= self.until:
            self.until = now + min(self.open_seconds * 2.0**self._openings, self.max_open_seconds)
            self._openings += 1

    def abandoned(self, trial: object | None) -> None:
        """The work ended without a verdict (the client left); if it was the trial, one may be made again at once."""
        if trial is not None and trial is self.trial:
            self.trial = None
