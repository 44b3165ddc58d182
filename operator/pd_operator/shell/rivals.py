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
    """Open questions by PDDeployment."""

    def __init__(self, identity: str, clock: Callable[[], float], metrics: Metrics) -> None:
        self._identity = identity
        self._clock = clock
        self._claims: dict[Key, Claim] = {}
        self._waits: dict[Key, float] = {}
        metrics.standing_back.set_function(
            lambda: sum(one.tries > 1 or one.answered_at is not None for one in self._claims.values())
        )

    def turn(self, todo: Plan, observed: Observed) -> tuple[Turn, tuple[Happening, ...]]:
        """Whose turn it is for one object, and what to tell about it."""
        key = Key(observed.namespace, observed.name)
        before = self._claims.get(key)
        turn = whose_turn(todo, observed, self._identity, before, self._clock())
        if turn.claim is None:
            self.forget(key)
        else:
            self._claims[key], self._waits[key] = turn.claim, turn.wait
        if turn.claim is None or turn.claim.answered_at is None or (before and before.answered_at is not None):
            return turn, ()
        message = (
            f"the operator {turn.rival} manages this object, so the operator {self._identity} does not; "
            "let only one of them watch this namespace"
        )
        logger.warning("%s: %s", key, message)
        return turn, (Happening("Warning", Reason.OTHER_OPERATOR, message),)

    def wait(self, key: Key) -> float:
        """Seconds until an object is worth another look."""
        return self._waits.get(key, 0.0)

    def forget(self, key: Key) -> None:
        """The object is gone, or is ours."""
        self._claims.pop(key, None)
        self._waits.pop(key, None)
