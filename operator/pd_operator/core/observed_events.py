"""What the controllers' Events say of a StatefulSet: why its pods are not made. It has no condition for that.

Events are kept for an hour, so one counts only while pods are lacking, and only if no creation came after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pd_operator.core.observed import resource_version
from pd_operator.core.observed_pods import one_line

REFUSED: Final = "FailedCreate"
MADE: Final = "SuccessfulCreate"


def pods_refused(events: Iterable[Mapping[str, Any]]) -> str:
    """The controller's last words when the newest thing that it told is a refusal, else an empty text."""
    told = [event for event in events if event.get("reason") in (REFUSED, MADE)]
    newest = max(told, key=resource_version, default=None)
    return one_line(newest.get("message")) if newest is not None and newest.get("reason") == REFUSED else ""
