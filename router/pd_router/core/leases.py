"""Which of decode's promises to keep a turn's blocks are prolonged, by which right and until when, and which are ended.

Separate from what talks to engines: a table with a clock that is passed in. A promise is prolonged while a turn runs on
it, while its client is about to answer tool calls, or for as long as its client asked. Without such a right nothing is
done for it: it runs out by itself. It is ended where no next turn can want it, but never while a turn runs on it.

Each engine is sent one batch at a time, so that what is said last about a promise is also what it hears last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from pd_wire.lease import MAX_BATCH, Lease

DELAY: Final = 0.2
"""Seconds that what is new waits for more of its kind, so that an engine hears of all at once."""
MAX_ENDING: Final = 8 * MAX_BATCH
"""Ends that wait per engine; of more the oldest are left to run out."""
_REMEMBERED: Final = 8 * MAX_BATCH
"""Promises without a right of which it is known when they end, or that they were ended: handles still lead to them."""
_LEAST_BEAT: Final = 0.2
_RETRY: Final = 1.0
"""Seconds after the first batch that was not answered, doubled for each further one up to half a beat."""
_MAX_FAILURES: Final = 16
_END_TERMS: Final = 2
"""Of a lease, for which its end is told until the engine has heard it: whom it answers nothing for so long can't have
prolonged it either."""
_SLACK: Final = 1.0
"""Engines count whole seconds."""


class Why(StrEnum):
    """Why a promise is ended early; the value is a metric label."""

    SUPERSEDED = "superseded"
    """The next turn's handle was kept."""
    ENDED = "ended"
    """The client ended the conversation."""
    DECLINED = "declined"
    """The client wanted none beyond the turn."""
    EVICTED = "evicted"
    EXPIRED = "expired"
    NOT_KEPT = "not_kept"
    """The store did not take the handle, so no turn will find it."""


@dataclass(slots=True)
class _Kept:
    """A promise that somebody has a right to. Times are the router's clock."""

    seconds: int
    """What the engine promises at a time."""
    ends: float
    """It does not end before, as far as is known."""
    sure: bool
    """It is known not to have run out."""
    turns: int = 0
    """That run on it."""
    until: float = -math.inf
    exact: bool = False
    """It is to end at `until`: the client said so."""
    over: Why | None = None
    """It is to be ended once no turn runs on it."""
    spoken_for: bool = False
    """The engine has heard of the right. Where it has too little room it gives up first what nobody spoke for."""

    def term(self, now: float) -> int:
        """Seconds to ask for."""
        if self.turns or not self.exact:
            return self.seconds
        return max(1, min(self.seconds, math.ceil(self.until - now)))

    def due(self, last: float, beat: float, now: float) -> float:
        """When it should be prolonged: the first time at once, even where it holds long enough, so that the engine
        hears of the right; while a turn runs at its engine's next beat; then at one in the middle third, or at the end
        of that."""
        third = self.seconds / 3
        due = min(last + beat, self.ends - third)
        if self.spoken_for:
            due = max(self.ends - 2 * third, due)
        if not self.spoken_for and now < self.until:
            return -math.inf  # also while a turn runs: its lease would be the first to give way
        if self.turns:
            return due
        if self.exact and self.ends > max(self.until, now) + _SLACK:
            return -math.inf  # it is to end sooner
        if now >= self.until:
            return math.inf
        return math.inf if due >= self.until or (self.exact and self.ends >= self.until) else due


class _Known(NamedTuple):
    """What is known of a promise that nobody has a right to."""

    ends: float
    """Minus infinity: it was ended."""
    until: float = -math.inf
    exact: bool = False
    spoken_for: bool = False


_ENDED: Final = _Known(-math.inf)


class _Ending(NamedTuple):
    """A promise of which the engine is to hear that it is ended."""

    why: Why
    until: float
    """When the engine need not hear it any more."""


@dataclass(slots=True)
class _Engine:
    kept: dict[str, _Kept] = field(default_factory=dict)
    ending: dict[str, _Ending] = field(default_factory=dict)
    at: float = math.inf
    """When to look again; not later than anything is due."""
    last: float = -math.inf
    """When promises were last prolonged."""
    not_before: float = -math.inf
    failures: int = 0
    """Batches in a row that were not answered."""
    busy: bool = False
    """A batch is under way."""
    shortest: int = 0

    def look_at(self, when: float) -> None:
        self.at = min(self.at, max(when, self.not_before))


class Batch(NamedTuple):
    """What one engine is to be told: token and seconds, 0 to end it."""

    items: tuple[tuple[str, int], ...]
    sent: float
    engine: object


class Outcome(NamedTuple):
    """What became of a batch."""

    renewed: int = 0
    released: tuple[Why, ...] = ()
    gone: tuple[str, ...] = ()
    """Tokens of promises that the engine does not keep any more."""
    lost: tuple[str, ...] = ()
    """Those of them that should have held."""


class Leases:
    """The promises of all engines that this router has to do something for.

    Args:
        heartbeat: seconds between two batches of renewals for one engine; 0 is a third of the shortest promise there.
    """

    def __init__(self, heartbeat: float = 0.0) -> None:
        self._heartbeat = heartbeat
        self._engines: dict[str, _Engine] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """Promises that nobody has a right to, where it is not as their handle says."""

    def __len__(self) -> int:
        return sum(len(engine.kept) for engine in self._engines.values())

    # -- rights --------------------------------------------------------------------------------------
    def begin(self, holder: str, lease: Lease, ends: float, now: float, *, sure: bool = True) -> bool:
        """A turn runs on it from here on, unless it is over. Returns which.

        Args:
            ends: it holds at least until then.
            sure: nobody else can have prolonged or ended it.
        """
        kept = self._find(holder, lease, ends, now, sure=sure)
        if kept is None:
            return False
        kept.turns += 1
        self._look_at(holder, lease.token, kept, now)
        return True

    def end(self, holder: str, token: str, now: float) -> None:
        """A turn that ran on it is over."""
        engine = self._engines.get(holder)
        kept = None if engine is None else engine.kept.get(token)
        if engine is None or kept is None or not kept.turns:
            return
        kept.turns -= 1
        if kept.turns:
            return
        if kept.over is not None:
            self._end_early(holder, Lease(token, kept.seconds), kept.over, now)
        else:
            self._look_at(holder, token, kept, now)

    def hold(
        self, holder: str, lease: Lease, until: float, ends: float, now: float, *, exact: bool, sure: bool = True
    ) -> bool:
        """A turn has left it, or gone on from it, and it shall hold until then; with `exact` not longer. Returns
        whether it can: not what is over, or will be as soon as no turn runs on it. `ends` and `sure` as for `begin`."""
        kept = self._find(holder, lease, ends, now, sure=sure)
        if kept is None or kept.over is not None:
            return False
        kept.until, kept.exact = until, exact
        self._look_at(holder, lease.token, kept, now)
        return True

    def release(self, holder: str, lease: Lease, why: Why, now: float) -> None:
        """Nobody will want it any more; it is ended once no turn here runs on it."""
        engine = self._engines.get(holder)
        kept = None if engine is None else engine.kept.get(lease.token)
        if kept is not None and kept.turns:
            kept.over = kept.over or why
            kept.until = -math.inf
        else:
            self._end_early(holder, lease, why, now)

    def give_up(self, holder: str, token: str, now: float) -> bool:
        """Another has the right to it now. Returns whether it is kept all the same, for a turn that runs here."""
        engine = self._engines.get(holder)
        kept = None if engine is None else engine.kept.get(token)
        if kept is None:
            return False
        kept.until, kept.exact = -math.inf, False
        self._look_at(holder, token, kept, now)
        return kept.turns > 0

    def forget(self, holder: str) -> tuple[str, ...]:
        """The engine's process is gone, and its promises with it. Returns the tokens of those that were kept."""
        engine = self._engines.pop(holder, None)
        return () if engine is None else tuple(engine.kept)

    # -- batches -------------------------------------------------------------------------------------
    def next_at(self) -> float:
        """When something is to be done; infinity when there is nothing."""
        return min((engine.at for engine in self._engines.values() if not engine.busy), default=math.inf)

    def due(self, now: float) -> list[str]:
        """Engines that something is to be done for now."""
        return [holder for holder, engine in self._engines.items() if engine.at <= now and not engine.busy]

    def batch(self, holder: str, now: float) -> Batch | None:
        """What to tell an engine now, at most `MAX_BATCH` promises; `answered` must follow. None: nothing."""
        engine = self._engines[holder]
        beat = self._tidy(engine, now)
        items = [(token, 0) for token in list(engine.ending)[:MAX_BATCH]]
        waiting = sorted((kept.due(engine.last, beat, now), kept.ends, token) for token, kept in engine.kept.items())
        if waiting and waiting[0][0] <= now and len(items) < MAX_BATCH:
            # With what is due go those that would be due soon.
            soon = now + beat / 2
            chosen = [
                token
                for due, _, token in waiting[: MAX_BATCH - len(items)]
                if due <= soon or not engine.kept[token].spoken_for
            ]
            items += [(token, engine.kept[token].term(now)) for token in chosen]
            engine.last = now
        if not items:
            self._settle(holder, engine, beat, now)
            return None
        engine.busy = True
        return Batch(tuple(items), now, engine)

    def answered(self, holder: str, batch: Batch, left: Sequence[int] | None, now: float) -> Outcome:
        """The engine has answered with the seconds left of each, or, with None, it has not."""
        engine = self._engines.get(holder)
        if engine is None or engine is not batch.engine:
            return Outcome()
        engine.busy = False
        released: list[Why] = []
        gone: list[str] = []
        lost: list[str] = []
        renewed = 0
        for place, (token, asked) in enumerate(batch.items):
            kept = engine.kept.get(token)
            if asked == 0:
                if left is not None and token in engine.ending:
                    released.append(engine.ending.pop(token).why)
            elif kept is None:
                continue
            elif left is None:
                # Perhaps it has heard, and was to end it sooner.
                kept.sure = kept.sure and batch.sent + asked >= kept.ends
            elif left[place] < 1:
                gone.append(token)
                if kept.sure:
                    lost.append(token)
                del engine.kept[token]
                self._know(token, _ENDED)
            else:
                renewed += 1
                kept.ends, kept.sure, kept.spoken_for = batch.sent + min(left[place], asked), True, True
        beat = self._beat(engine)
        engine.failures = 0 if left is not None else min(engine.failures + 1, _MAX_FAILURES)
        # Without one an engine that promises less than it is asked for would be asked again at once.
        pause = min(_RETRY * 2 ** (engine.failures - 1), max(_RETRY, beat / 2)) if engine.failures else _LEAST_BEAT
        engine.not_before = now + pause
        self._settle(holder, engine, self._tidy(engine, now), now)
        return Outcome(renewed, tuple(released), tuple(gone), tuple(lost))

    # -- inside --------------------------------------------------------------------------------------
    def _engine(self, holder: str, seconds: int) -> _Engine:
        engine = self._engines.get(holder)
        if engine is None:
            engine = self._engines[holder] = _Engine(shortest=seconds)
        engine.shortest = min(engine.shortest, seconds)
        return engine

    def _find(self, holder: str, lease: Lease, ends: float, now: float, *, sure: bool) -> _Kept | None:
        """What is kept of a promise that somebody has a right to; None where it is over."""
        engine = self._engines.get(holder)
        kept = None if engine is None else engine.kept.get(lease.token)
        if kept is not None:
            return kept
        known = self._known.get(lease.token, _Known(ends))
        if known == _ENDED or (sure and known.ends <= now):
            self._know(lease.token, _ENDED)
            return None
        # Another may have prolonged it since; the engine will say so.
        kept = _Kept(lease.seconds, known.ends, sure, until=known.until, exact=known.exact, spoken_for=known.spoken_for)
        self._engine(holder, lease.seconds).kept[lease.token] = kept
        return kept

    def _beat(self, engine: _Engine) -> float:
        return self._heartbeat or max(engine.shortest / 3, _LEAST_BEAT)

    def _look_at(self, holder: str, token: str, kept: _Kept, now: float) -> None:
        """What is known of a promise has changed."""
        engine = self._engines[holder]
        due = kept.due(engine.last, self._beat(engine), now)
        if due == math.inf:
            self._let_go(engine, token)
            if not engine.kept and not engine.ending and not engine.busy:
                del self._engines[holder]
        else:
            engine.look_at(max(due, now + DELAY))

    def _let_go(self, engine: _Engine, token: str) -> None:
        """Nobody has a right to it any more."""
        kept = engine.kept.pop(token)
        self._know(token, _Known(kept.ends, kept.until, kept.exact, kept.spoken_for))

    def _know(self, token: str, known: _Known) -> None:
        self._known[token] = known
        self._known.move_to_end(token)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _end_early(self, holder: str, lease: Lease, why: Why, now: float) -> None:
        if (engine := self._engines.get(holder)) is not None:
            engine.kept.pop(lease.token, None)
        if self._known.get(lease.token) == _ENDED:
            return
        self._know(lease.token, _ENDED)
        engine = self._engine(holder, lease.seconds)
        engine.ending[lease.token] = _Ending(why, now + _END_TERMS * lease.seconds)
        if len(engine.ending) > MAX_ENDING:
            del engine.ending[next(iter(engine.ending))]
        engine.look_at(now + DELAY)

    def _tidy(self, engine: _Engine, now: float) -> float:
        """Let go of promises without a right. Returns the seconds between two batches of renewals."""
        for token, ending in list(engine.ending.items()):
            if ending.until <= now:
                del engine.ending[token]
        beat = self._beat(engine)
        for token, kept in list(engine.kept.items()):
            if kept.due(engine.last, beat, now) == math.inf:
                self._let_go(engine, token)
        engine.shortest = min((kept.seconds for kept in engine.kept.values()), default=engine.shortest)
        # By another beat others may be over.
        return beat if self._beat(engine) == beat else self._tidy(engine, now)

    def _settle(self, holder: str, engine: _Engine, beat: float, now: float) -> None:
        """Work out when to look again; an engine without promises is let go of."""
        if not engine.kept and not engine.ending:
            del self._engines[holder]
            return
        engine.at = math.inf
        if engine.ending:
            engine.look_at(now + DELAY)
        for kept in engine.kept.values():
            engine.look_at(kept.due(engine.last, beat, now))
