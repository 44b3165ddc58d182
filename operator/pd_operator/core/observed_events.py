"""What Events say where no status does: why a StatefulSet's pods are not made, and why a pod's containers do not begin.

Events are kept for an hour, so one counts only while that very thing is lacking, and only if nothing better came after
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from pd_operator.core.observed import Observed, resource_version
from pd_operator.core.observed_pods import Pod, Trouble, one_line
from pd_operator.core.reasons import Reason

REFUSED: Final = "FailedCreate"
MADE: Final = "SuccessfulCreate"

HINDERED: Final = frozenset({"FailedMount", "FailedMapVolume", "FailedAttachVolume", "FailedCreatePodSandBox"})
BEGUN: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
OFTEN: Final = 3
"""How often a hindrance must have been told: the first tries of a mount often fail for a second."""

ASKED_PODS: Final = 3
"""Most pods of a role whose Events are asked for at a time, as many as a message names."""


def pods_refused(events: Iterable[Mapping[str, Any]]) -> str:
    """The controller's last words when the newest thing that it told is a refusal, else an empty text."""
    newest = _newest(events, {REFUSED, MADE})
    return one_line(newest.get("message")) if newest is not None and newest.get("reason") == REFUSED else ""


def hindrance(events: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """What keeps a pod's containers from beginning, in the words of the kubelet or of who attaches volumes."""
    newest = _newest(events, HINDERED | BEGUN)
    if newest is None or newest.get("reason") in BEGUN or _times(newest) < OFTEN:
        return None
    return Trouble(Reason.CONTAINER_NOT_CREATED, f"{newest['reason']}: {one_line(newest.get('message'))}")


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


def _newest(events: Iterable[Mapping[str, Any]], reasons: frozenset[str] | set[str]) -> Mapping[str, Any] | None:
    return max((event for event in events if event.get("reason") in reasons), key=resource_version, default=None)


def _times(event: Mapping[str, Any]) -> int:
    series = event.get("series") or {}
    return int(event.get("count") or series.get("count") or 1)
