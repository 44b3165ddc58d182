"""Two statuses → the Events worth telling: one per condition whose verdict or reason changed.

Separate because Events are a courtesy (best effort, gone after an hour) and conditions are the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_operator.core.reasons import ConditionType
from pd_operator.core.status_model import Condition, ConditionStatus, PDDeploymentStatus
from pd_operator.core.status_verdict import is_blocking

EVENT_LIMIT = 1000
"""Most characters of an Event's message; the API server allows 1024."""

_TOLD = (
    ConditionType.READY,
    ConditionType.PROGRESSING,
    ConditionType.BIDIRECTIONAL_ACTIVE,
    ConditionType.TRANSFERS_FLOWING,
)
"""The roles' own conditions are part of Ready's message and would only repeat it."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One Event to post. `kind` is Normal or Warning."""

    kind: str
    reason: str
    message: str


def happenings(before: PDDeploymentStatus, after: PDDeploymentStatus) -> tuple[Happening, ...]:
    """What changed, in the order of the conditions; each reason once."""
    told: dict[str, Happening] = {}
    for kind in _TOLD:
        old, new = before.condition(kind), after.condition(kind)
        if new is None or (old is not None and (old.status, old.reason) == (new.status, new.reason)):
            continue
        if old is None and new.status is ConditionStatus.UNKNOWN:
            continue
        told.setdefault(new.reason, Happening(_kind(new), new.reason, _message(kind, new)))
    return tuple(told.values())


def _kind(condition: Condition) -> str:
    return "Warning" if is_blocking(condition.reason) else "Normal"


def _message(kind: ConditionType, condition: Condition) -> str:
    text = f"{kind.value} is {condition.status.value}: {condition.message}"
    return text if len(text) <= EVENT_LIMIT else f"{text[: EVENT_LIMIT - 1]}…"
