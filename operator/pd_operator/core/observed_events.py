"""What Events say where no status does: why a StatefulSet's pods are not made, and why a pod's containers do not begin.

Events are kept for an hour, so one counts only while that very thing is lacking, and only if nothing better came after
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from pd_operator.core.observed import Observed, resource_version
from pd_operator.core.observed_pods import Pod, Trouble, one_line
from pd_operator.core.reasons import Reason

_UNKNOWN: Final = datetime.fromtimestamp(0, UTC)
REFUSED: Final = "FailedCreate"
MADE: Final = "SuccessfulCreate"

HINDERED: Final = frozenset({"FailedMount", "FailedMapVolume", "FailedAttachVolume", "FailedCreatePodSandBox"})
BEGUN: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
OFTEN: Final = 3
"""How often a hindrance must have been told: the first tries of a mount often fail for a second."""

LATELY: Final = 300.0
"""Seconds in which a kubelet tells what still fails once more; its longest pause is about two minutes."""

SHOWN: Final = 2
"""Most hindrances of a pod that are repeated."""

ASKED_PODS: Final = 3
"""Most pods of a role whose Events are asked for at a time, as many as a message names."""


def pods_refused(events: Iterable[Mapping[str, Any]]) -> str:
    """The controller's last words when the newest thing that it told is a refusal, else an empty text."""
    told = (event for event in events if event.get("reason") in (REFUSED, MADE))
    newest = max(told, key=resource_version, default=None)
    return one_line(newest.get("message")) if newest is not None and newest.get("reason") == REFUSED else ""


def hindrance(events: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """What keeps a pod's containers from beginning, in the words of the kubelet or of who attaches volumes.

    Several volumes may fail in turn, and the newest word would be another one at each look. So everything counts that
    was told again lately, in an order that stays.
    """
    told = sorted((event for event in events if event.get("reason") in HINDERED | BEGUN), key=resource_version)
    since = max((index + 1 for index, event in enumerate(told) if event.get("reason") in BEGUN), default=0)
    often = [event for event in told[since:] if _times(event) >= OFTEN]
    if not often:
        return None
    newest = max(map(_last, often))
    lately = {_words(event) for event in often if (newest - _last(event)).total_seconds() <= LATELY}
    return Trouble(Reason.CONTAINER_NOT_CREATED, "; ".join(sorted(lately)[:SHOWN]))


def pods_to_ask_about(observed: Observed) -> tuple[Pod, ...]:
    """Pods that have not begun and whose statuses say nothing about it, the first few of each role."""
    silent = [pod for pod in observed.pods if pod.not_begun and pod.trouble is None]
    roles = sorted({pod.role for pod in silent})
    return tuple(pod for role in roles for pod in [one for one in silent if one.role == role][:ASKED_PODS])


def with_hindrances(observed: Observed, found: Mapping[str, Trouble | None]) -> Observed:
    """What was seen, together with what Events told, by pod uid."""
    return replace(
        observed, pods=tuple(replace(pod, trouble=pod.trouble or found.get(pod.uid)) for pod in observed.pods)
    )


def _words(event: Mapping[str, Any]) -> str:
    return f"{event['reason']}: {one_line(event.get('message'))}"


def _times(event: Mapping[str, Any]) -> int:
    return int(event.get("count") or _series(event).get("count") or 1)


def _last(event: Mapping[str, Any]) -> datetime:
    """When it was told last; there are two forms of Events."""
    for text in (event.get("lastTimestamp"), _series(event).get("lastObservedTime"), event.get("eventTime")):
        if text:
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(str(text)).astimezone(UTC)
    return _UNKNOWN


def _series(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("series")
    return found if isinstance(found, Mapping) else {}
