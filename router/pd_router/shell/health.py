"""What the outcome of a leg says about its engine, and about the pair that moved KV for it.

Separate from the turn, which only says how a leg ended, and from the leg, which only says what happened on the wire.
A failure that a transfer may have caused counts against the pair; against the engine it counts as one "with that
partner", see `Breaker`. Where no other partner could have been chosen the two can't be told apart, and the engine is
blamed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pd_router.core.pairs import Direction, Pair, Pairs
from pd_router.core.placement import Engine
from pd_router.core.sse import Ending
from pd_router.shell.exchange import Failure
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed

TRANSFER_FAILURES: Final = frozenset(
    {"status_5xx", Ending.ERROR_FINISH.value, Ending.ERROR_EVENT.value, Failure.TIMEOUT.value}
)
"""How an engine answers when it can't read its peer's KV: vLLM says 500 or ends with "error" (`kv_load_failure_policy:
fail`), and over LIBFABRIC nothing at all comes. A lost connection or a 503 has nothing to do with a peer."""


@dataclass(slots=True)
class LegWatch:
    """One leg that is planned or under way. The first verdict ends it."""

    member: Member
    pair: Pair | None
    partner: str
    pairs: Pairs
    now: Callable[[], float]
    trial: object | None = None
    """Of the engine, if this leg is the one that its half-open breaker allows."""
    probe: object | None = None
    """The same of the pair."""
    over: bool = False

    def succeeded(self, moved: bool = True) -> None:
        """The leg did what it was asked. `moved`: KV was moved, or there was no need to."""
        self.over = True
        self.member.breaker.succeeded()
        if self.pair is not None:
            if moved:
                self.pairs.succeeded(self.pair)
            else:
                self.pairs.failed(self.pair, self.now(), self.probe)

    def failed(self, failure: LegFailed) -> bool:
        """The leg failed before anything reached the client. Returns whether a transfer may have been the cause."""
        self.over = True
        moving = self.pair is not None and failure.reason in TRANSFER_FAILURES
        if failure.engine_fault:
            self.member.breaker.failed(self.now(), self.partner if moving else "", self.trial)
        if moving and self.pair is not None:
            self.pairs.failed(self.pair, self.now(), self.probe)
        self.let_go()
        return moving

    def broke_off(self) -> None:
        """The answer ended badly after its first content: the transfer was over by then."""
        self.over = True
        self.member.breaker.failed(self.now(), trial=self.trial)
        if self.pair is not None:
            self.pairs.succeeded(self.pair)

    def abandoned(self) -> None:
        """It ended without a verdict, unless there was one, or never began."""
        if not self.over:
            self.over = True
            self.let_go()

    def let_go(self) -> None:
        """It is the trial of nothing any more, though it may go on: another turn may be."""
        self.member.breaker.abandoned(self.trial)
        self.trial = None
        if self.pair is not None:
            self.pairs.abandoned(self.pair, self.probe)
            self.probe = None

    def moves_nothing(self) -> None:
        """The pair has nothing to move, as it turned out."""
        if self.pair is not None:
            self.pairs.abandoned(self.pair, self.probe)
            self.pair, self.probe, self.partner = None, None, ""


def watch(
    member: Member, pair: Pair | None, others: Sequence[Engine], pairs: Pairs, now: Callable[[], float]
) -> LegWatch:
    """A leg is planned: for an engine or a pair that is half-open it is the trial.

    Nothing may be awaited between the look at the breakers and this; if it never begins, `abandoned` has to follow.

    Args:
        pair: when KV is to be moved.
        others: prefill engines that could have been in the place of the pair's.
    """
    began = now()
    trial = member.breaker.sent(began)
    partner, probe = "", None
    if pair is not None:
        probe = pairs.sent(pair, began)
        if pair.direction is Direction.PULL:
            # Whether prefill can do without is shown by the retry, which goes without the handle.
            partner = pair.decode
        elif any(engine.takes_work and engine.key != pair.prefill for engine in others):
            partner = pair.prefill
    return LegWatch(member, pair, partner, pairs, now, trial, probe)
