"""Do the routers see which engines there are? Judged from what they say of themselves.

Separate because nothing else shows it: a router that can't list pods goes on with the engines that it knows, so it is
ready and answers, until those engines are replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pd_operator.core.names import ROUTER
from pd_operator.core.observed import Observed
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.status_model import ConditionStatus, PDDeploymentStatus
from pd_operator.core.status_verdict import Verdict

SHOWN: Final = 3
"""Most routers that a message names."""

_WAYS_OUT: Final = (
    ("401", "its token is refused: kubectl rollout restart deployment {name}"),
    ("403", "it may not list pods: look for what denies {name} that, its Role and RoleBinding are the operator's"),
    ("", "look at its log, its way to the API server, and the API server"),
)
"""What to do, by what the trouble's text holds; the first that fits."""


def blind_routers(observed: Observed, previous: PDDeploymentStatus) -> str:
    """Which ready routers can't list pods, what that means and what to do; empty when all can.

    Args:
        observed: what was seen.
        previous: the last status. Until a restarted operator has asked a router, what it says stays.
    """
    ready = [pod.name for pod in observed.pods if pod.role == ROUTER and pod.ready]
    if ready and not any(name in observed.routers for name in ready):
        old = previous.condition(ConditionType.PROGRESSING)
        return old.message if old is not None and old.reason == Reason.ROUTER_BLIND else ""
    answers = {name: observed.routers.get(name) for name in ready}
    blind = {name: answer.trouble for name, answer in answers.items() if answer is not None and answer.trouble}
    if not blind:
        return ""
    more = len(blind) - SHOWN
    shown = ", ".join(f"{name} ({trouble})" for name, trouble in list(blind.items())[:SHOWN])
    shown += f" and {more} more" if more > 0 else ""
    way_out = next(text for part, text in _WAYS_OUT for trouble in blind.values() if part in trouble)
    meaning = "can't list the engines, so new and replaced ones get no requests"
    return f"{shown} {meaning}; {way_out.format(name=_workload(observed))}"


def with_blindness(
    verdicts: dict[ConditionType, Verdict], blind: str, *, router_moves: bool
) -> dict[ConditionType, Verdict]:
    """The verdicts, with what `blind_routers` found.

    What serves goes on serving, so Ready stays true and its reason changes. `Progressing` is false, since no change
    would reach the routers; not while new routers come in, which is how most of this ends.
    """
    if not blind:
        return verdicts
    told = dict(verdicts)
    for kind in (ConditionType.READY, ConditionType.ROUTER_READY):
        if (one := verdicts[kind]).status is ConditionStatus.TRUE:
            own = "" if one.reason is Reason.ALL_READY else f"{one.message}; "
            told[kind] = replace(one, reason=Reason.ROUTER_BLIND, message=f"{own}{blind}")
    if not verdicts[ConditionType.PROGRESSING].blocks and not router_moves:
        told[ConditionType.PROGRESSING] = Verdict(ConditionStatus.FALSE, Reason.ROUTER_BLIND, blind)
    return told


def _workload(observed: Observed) -> str:
    mine = (child.ref.name for child in observed.mine() if child.role == ROUTER and child.ref.kind == "Deployment")
    return next(mine, f"{observed.name}-{ROUTER}")
