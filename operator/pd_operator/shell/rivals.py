"""What this process has asked other operators, and telling people about it.

Kept apart from the reconcile because it is the one thing that is remembered between two of them. Losing it is harmless:
the question is asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_operator.core.observed import Observed
from pd_operator.core.plan import Plan
from pd_operator.core.reasons import Reason
from pd_operator.core.rivals import Claim, Turn, whose_turn
from pd_operator.core.status_events import Happening
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.wakeups import Key

logger = logging.getLogger(__name__)


class Rivals:
    """Open questions by PDDeployment, and the refused specs that another operator judges."""

    def __init__(self, identity: str, clock: Callable[[], float], metrics: Metrics) -> None:
        self._identity = identity
        self._clock = clock
        self._claims: dict[Key, Claim] = {}
        self._left: set[Key] = set()
        self._waits: dict[Key, float] = {}
        self._metrics = metrics
        metrics.standing_back.set_function(
            lambda: len(self._left) + sum(one.tries > 1 or one.answered_at is not None for one in self._claims.values())
        )

    def turn(self, todo: Plan | None, observed: Observed) -> tuple[Turn, tuple[Happening, ...]]:
        """Whose turn it is for one object, and what to tell about it. `todo` is None when the spec is refused.

        A question that the turn's plan asks is remembered by `asked`, since only one that was written can be answered.
        """
        key = Key(observed.namespace, observed.name)
        before = self._claims.get(key)
        turn = whose_turn(todo, observed, self._identity, before, self._clock())
        if turn.rival and turn.claim is None:
            return turn, self._leave(key, turn)
        self._left.discard(key)
        if not turn.rival:
            self.forget(key)
            if turn.former:
                logger.warning("%s: the operator %s gives no answer; this one manages the object now", key, turn.former)
                self._metrics.takeovers.inc()
            return turn, ()
        if turn.plan.actions:
            return turn, ()
        self.asked(key, turn)
        if turn.claim is None or turn.claim.answered_at is None or (before and before.answered_at is not None):
            return turn, ()
        return turn, self._tell(key, turn, "this object, so the operator {} does not")

    def asked(self, key: Key, turn: Turn) -> None:
        """A turn was carried out: from now on its question may be answered."""
        if turn.claim is not None:
            before = self._claims.get(key)
            if turn.claim.suspected and (before is None or turn.claim.suspected != before.suspected):
                logger.warning(
                    "%s: the operator %s has not judged generation %d of the spec; asking whether it is alive",
                    key,
                    turn.rival,
                    turn.claim.suspected,
                )
            self._claims[key], self._waits[key] = turn.claim, turn.wait

    def _leave(self, key: Key, turn: Turn) -> tuple[Happening, ...]:
        self._claims.pop(key, None)
        self._waits[key] = turn.wait
        if key in self._left:
            return ()
        self._left.add(key)
        return self._tell(key, turn, "this object; the operator {} refuses its spec and leaves its status alone")

    def _tell(self, key: Key, turn: Turn, what: str) -> tuple[Happening, ...]:
        message = (
            f"the operator {turn.rival} manages {what.format(self._identity)}; "
            "let only one of them watch this namespace"
        )
        logger.warning("%s: %s", key, message)
        return (Happening("Warning", Reason.OTHER_OPERATOR, message),)

    def wait(self, key: Key) -> float:
        """Seconds until an object is worth another look."""
        return self._waits.get(key, 0.0)

    def forget(self, key: Key) -> None:
        """The object is gone, or is ours."""
        self._claims.pop(key, None)
        self._left.discard(key)
        self._waits.pop(key, None)
