"""One role's condition: does it serve, and what is missing until it is as the spec wants it.

Ready means that the role has a ready pod. What is missing beyond that, more pods or newer ones, is in the message and
in `Progressing`: a deployment that is scaled up or rolled out does not stop to be ready, and neither does one of which
a child is refused or stands in somebody else's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pd_operator.core.names import ROUTER
from pd_operator.core.observed import Child, Observed, Workload
from pd_operator.core.observed_pods import Pod
from pd_operator.core.plan import Refusal, role_of
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.status_model import ConditionStatus
from pd_operator.core.status_verdict import Verdict
from pd_wire import names

ROLES: Final = {
    names.ROLE_PREFILL: ConditionType.PREFILL_READY,
    names.ROLE_DECODE: ConditionType.DECODE_READY,
    ROUTER: ConditionType.ROUTER_READY,
}
WORKLOAD_KINDS: Final = ("StatefulSet", "Deployment")
SERVICE: Final = "Service"
SHOWN_PODS: Final = 3
"""Most pods that a message names."""


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """What is known about one role.

    Attributes:
        wanted: replicas asked for.
        workload: the live counts, None when the workload doesn't exist or isn't ours.
        refusals: children of this role (or of all roles) that are not as wanted.
        troubled: pods that something keeps from running, worst first.
        held: what a rollout keeps back for now, as the end of a sentence; empty when nothing is.
        ending: names of engines that end in their own time, whose successors come after them.
        pods_refused: why pods are not made, in the words of their controller; empty when they are.
    """

    role: str
    wanted: int
    workload: Workload | None
    refusals: tuple[Refusal, ...]
    troubled: tuple[Pod, ...]
    selector: str
    ending: tuple[str, ...] = ()
    held: str = ""
    pods_refused: str = ""

    @property
    def ready(self) -> int:
        """Pods that are ready."""
        return self.workload.ready if self.workload else 0

    @property
    def moving(self) -> Reason | None:
        """How far a change has come, or None when nothing moves."""
        workload = self.workload
        if workload is None or not workload.begun:
            return Reason.CREATING
        if not workload.current:
            # Its counts are about an earlier spec, and whether its template differs is not known here.
            return Reason.SCALING if workload.replicas != workload.wanted else Reason.ROLLING_OUT
        # A StatefulSet counts no ending pod as updated: without another template that is no rollout.
        if (self.replaced or self.role == ROUTER) and workload.updated < min(workload.replicas, self.wanted):
            return Reason.ROLLING_OUT
        if workload.replicas != self.wanted:
            return Reason.SCALING
        return Reason.STARTING if workload.ready < self.wanted else None

    @property
    def replaced(self) -> bool:
        """Does a new template come in?"""
        workload = self.workload
        return workload is not None and workload.update_revision != workload.current_revision

    @property
    def stuck_pods(self) -> tuple[Pod, ...]:
        """Pods in trouble while others still run an earlier template: the rollout waits for them."""
        workload = self.workload
        if workload is None or not self.replaced:
            return ()
        return self.troubled if workload.updated < workload.replicas else ()

    @property
    def stuck(self) -> bool:
        """Does a rollout wait for something that waiting does not bring?"""
        return bool(self.stuck_pods) or (self.workload is not None and self.workload.deadline_passed)

    @property
    def stuck_message(self) -> str:
        """Which pod holds the rollout up, and the way out."""
        workload = self.workload
        for pod in self.stuck_pods:
            what = _pod_text(pod)
            if pod.deleting:
                return f"{what}. The rollout waits for it"
            if workload is not None and pod.revision != workload.update_revision:
                return (
                    f"{what}. It runs an earlier template and the rollout may wait for it for ever: "
                    f"delete it (kubectl delete pod {pod.name})"
                )
            return f"{what}. It runs the newest template; the other pods keep the previous one"
        why = f": {self.pods_refused}" if self.pods_refused else ""
        return f"the rollout has passed its deadline{why}"


def role_facts(
    manifests: Iterable[Mapping[str, Any]], observed: Observed, refusals: tuple[Refusal, ...]
) -> dict[str, RoleFacts]:
    """The facts per role. Without manifests (a bad spec) the live workload's own wish counts."""
    wanted = {role_of(one): one for one in manifests if one["kind"] in WORKLOAD_KINDS}
    live = {child.role: child for child in observed.mine() if child.ref.kind in WORKLOAD_KINDS}
    return {role: _facts(role, wanted.get(role), live.get(role), observed, refusals) for role in ROLES}


def _facts(
    role: str,
    manifest: Mapping[str, Any] | None,
    child: Child | None,
    observed: Observed,
    refusals: tuple[Refusal, ...],
) -> RoleFacts:
    workload = child.workload if child else None
    replicas = manifest["spec"].get("replicas") if manifest else None
    if replicas is None:
        replicas = workload.wanted if workload else 1 if manifest else 0
    troubled = sorted(
        (pod for pod in observed.pods if pod.role == role and pod.trouble is not None),
        key=lambda pod: (list(Reason).index(pod.trouble.reason) if pod.trouble else 0, pod.name),
    )
    labels = {names.LABEL_DEPLOYMENT: observed.name, names.LABEL_ROLE: role}
    return RoleFacts(
        role=role,
        wanted=int(replicas),
        workload=workload,
        refusals=tuple(one for one in refusals if one.role in (role, "")),
        troubled=tuple(troubled),
        ending=tuple(pod.name for pod in observed.pods if role == pod.role and pod.deleting and pod.trouble is None),
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        pods_refused=_pods_refused(child, observed),
    )


def _pods_refused(child: Child | None, observed: Observed) -> str:
    if child is None or child.workload is None:
        return ""
    return child.workload.pods_refused or observed.pods_refused.get(child.ref, "")


def judge_role(facts: RoleFacts) -> Verdict:
    """The role's condition."""
    missing = shortfall(facts)
    if missing is None:
        return Verdict(ConditionStatus.TRUE, Reason.ALL_READY, f"{facts.wanted} of {facts.wanted} ready")
    if facts.wanted and facts.ready:
        count = f"{facts.ready} of {facts.wanted} ready; " if facts.refusals else ""
        return Verdict(ConditionStatus.TRUE, Reason.SERVING, f"{count}{missing.message}")
    rest = _lacking(facts)
    if rest is None or facts.workload is None or any(_carries(one, facts.role) for one in facts.refusals):
        return missing
    # A budget or a policy that is refused keeps no pod from running: its own trouble is why it is not ready.
    return replace(rest, message="; ".join([rest.message, *(one.message for one in facts.refusals)]))


def _carries(refusal: Refusal, role: str) -> bool:
    """Is the refused child the role's workload or its Service?"""
    return refusal.role == role and refusal.ref.kind in (*WORKLOAD_KINDS, SERVICE)


def shortfall(facts: RoleFacts) -> Verdict | None:
    """What keeps the role from being as the spec wants it, None when nothing does. Refusals speak first."""
    rest = _lacking(facts)
    if not facts.refusals:
        return rest
    texts = [one.message for one in facts.refusals]
    texts += [rest.message] if rest is not None and rest.blocks else []
    return Verdict(ConditionStatus.FALSE, facts.refusals[0].reason, "; ".join(texts))


def _lacking(facts: RoleFacts) -> Verdict | None:
    """What its workload and pods lack."""
    false = ConditionStatus.FALSE
    moving = facts.moving
    if moving is None:
        none = Verdict(false, Reason.SCALED_TO_ZERO, "no replica is wanted; requests get a 503")
        return none if facts.wanted == 0 else None
    count = f"{facts.ready} of {facts.wanted} ready"
    if facts.pods_refused:
        return Verdict(false, Reason.PODS_REFUSED, f"{count}; pods are refused: {facts.pods_refused}")
    if facts.stuck:
        return Verdict(false, Reason.ROLLOUT_STUCK, f"{count}; {facts.stuck_message}")
    if facts.troubled:
        first = facts.troubled[0]
        more = len(facts.troubled) - SHOWN_PODS
        text = "; ".join(_pod_text(pod) for pod in facts.troubled[:SHOWN_PODS])
        text += f"; and {more} more" if more > 0 else ""
        assert first.trouble is not None
        return Verdict(false, first.trouble.reason, f"{count}; {text}")
    held = f"; {facts.held}" if facts.held else ""
    return Verdict(false, moving, f"{count}; {_moving_text(moving, facts)}{held}")


def _moving_text(moving: Reason, facts: RoleFacts) -> str:
    workload = facts.workload
    if workload is None:
        return "not created yet"
    if moving is Reason.CREATING:
        return "just created"
    if moving is Reason.ROLLING_OUT:
        return f"{workload.updated} of {workload.replicas} run the newest template" if workload.current else "updating"
    if moving is Reason.SCALING:
        return f"{workload.replicas} exist"
    if facts.ending and facts.role != ROUTER:
        return f"{', '.join(facts.ending[:SHOWN_PODS])} must end before another starts"
    return "starting"


def _pod_text(pod: Pod) -> str:
    assert pod.trouble is not None
    return f"pod {pod.name}: {pod.trouble.reason.value}: {pod.trouble.message}"
