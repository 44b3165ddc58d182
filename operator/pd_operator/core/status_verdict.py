"""One verdict: a condition before it gets its time. Separate because three modules judge and one writes them down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pd_operator.core.reasons import Reason
from pd_operator.core.status_model import ConditionStatus

_BLOCKING: Final = (
    Reason.INVALID_SPEC,
    Reason.FOREIGN_OBJECT,
    Reason.IMMUTABLE_FIELD,
    Reason.APPLY_REFUSED,
    Reason.WAITING_FOR_CLEANUP,
    Reason.PODS_REFUSED,
    Reason.ROLLOUT_STUCK,
    Reason.IMAGE_PULL_FAILED,
    Reason.CRASH_LOOPING,
    Reason.CONTAINER_NOT_CREATED,
    Reason.POD_FAILED,
    Reason.TERMINATION_STUCK,
    Reason.UNSCHEDULABLE,
    Reason.ROUTER_BLIND,
    Reason.NOTHING_PULLED,
    Reason.BLOCKS_REUSED,
)
"""Reasons that do not go away by waiting, worst first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition will say."""

    status: ConditionStatus
    reason: Reason
    message: str

    @property
    def blocks(self) -> bool:
        """Does somebody have to do something?"""
        return self.reason in _BLOCKING

    @property
    def severity(self) -> int:
        """Order among verdicts that are not true: smaller is worse."""
        if self.reason in _BLOCKING:
            return _BLOCKING.index(self.reason)
        return len(_BLOCKING) + list(Reason).index(self.reason)


def is_blocking(reason: str) -> bool:
    """Is that the word of a reason for which somebody has to do something?"""
    return reason in {one.value for one in _BLOCKING}
