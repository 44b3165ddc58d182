"""Engines that were told to end and have not: a finalizer that nobody takes away, or a node that is gone.

A StatefulSet makes no successor until the pod is gone, so a rollout, a drain or a smaller number waits for it and
nothing in its counts says why. Routers are left out: their Deployment does not wait. Separate from `observed_pods`
because this takes the time, and a pod's own object does not change when its time is up.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

from pd_operator.core.choices import Role
from pd_operator.core.observed import Observed
from pd_operator.core.observed_pods import Pod, Trouble
from pd_operator.core.reasons import Reason

MARGIN: Final = 60.0
"""Seconds past the end of a pod's grace period: volumes are unmounted after it, and clocks differ."""

ENGINES: Final = frozenset(role.value for role in Role)


def with_overdue_endings(observed: Observed, now: str) -> Observed:
    """What was seen, with a trouble for each engine that should be gone.

    Args:
        observed: what was seen.
        now: RFC 3339 time.
    """
    if not any(_overdue(pod, now) for pod in observed.pods):
        return observed
    pods = (replace(pod, trouble=_trouble(pod)) if _overdue(pod, now) else pod for pod in observed.pods)
    return replace(observed, pods=tuple(pods))


def ends_soon(observed: Observed, now: str) -> bool:
    """Is an engine ending that may come to be overdue? No event will tell of that."""
    return any(pod.role in ENGINES and _left(pod, now) is not None and not _overdue(pod, now) for pod in observed.pods)


def _overdue(pod: Pod, now: str) -> bool:
    left = _left(pod, now) if pod.role in ENGINES else None
    return left is not None and left <= 0


def _left(pod: Pod, now: str) -> float | None:
    """Seconds until it is overdue; None for a pod that is not ending, or says no time that can be read."""
    if not pod.deleting:
        return None
    try:
        return (datetime.fromisoformat(pod.ends_by) - datetime.fromisoformat(now)).total_seconds() + MARGIN
    except (ValueError, TypeError):
        return None


def _trouble(pod: Pod) -> Trouble:
    """No age in it, or each look would write another status."""
    text = f"it had to end by {pod.ends_by} and is still there"
    if pod.finalizers:
        return Trouble(Reason.TERMINATION_STUCK, f"{text}, kept by the finalizers {', '.join(pod.finalizers)}")
    where = f"node {pod.node}" if pod.node else "its node"
    way_out = f"kubectl delete pod {pod.name} --force, once nothing runs there any more"
    return Trouble(Reason.TERMINATION_STUCK, f"{text}; is {where} alive? If it is not: {way_out}")
