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
SEES_NO_PAIR: Final = (
    ": a router is ready while it sees a ready prefill and a ready decode engine of one generation; /readyz on its "
    "admin port tells what it lacks"
)
ENGINE_UNWELL: Final = ": the readiness probe fails"
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
        name: the workload's.
        running: names of pods that have started and are not ready, when no unready pod is still on its way to that.
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
    name: str = ""
    running: tuple[str, ...] = ()

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
        if workload.ready < self.wanted:
            return Reason.NOT_READY if self.running else Reason.STARTING
        return None

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
        return bool(self.stuck_pods) or self.paused or (self.workload is not None and self.workload.deadline_passed)

    @property
    def paused(self) -> bool:
        """Is there a rollout that somebody has paused? Without one a pause keeps nothing from its way."""
        workload = self.workload
        if workload is None or not workload.paused:
            return False
        return workload.current and self.moving is Reason.ROLLING_OUT

    @property
    def stuck_message(self) -> str:
        """Which pod holds the rollout up, and the way out."""
        workload = self.workload
        for pod in self.stuck_pods:
            what = _pod_text(pod).rstrip(" .")
            if pod.deleting:
                return f"{what}. The rollout waits for it"
            if workload is not None and pod.revision != workload.update_revision:
                return (
                    f"{what}. It runs an earlier template and the rollout may wait for it for ever: "
                    f"delete it (kubectl delete pod {pod.name})"
                )
            return f"{what}. It runs the newest template; the other pods keep the previous one"
        if self.paused:
            return f"somebody has paused its rollout: kubectl rollout resume deployment {self.name}"
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
    pods = _that_count(role, observed)
    troubled = sorted(
        (pod for pod in pods if pod.trouble is not None),
        key=lambda pod: (list(Reason).index(pod.trouble.reason) if pod.trouble else 0, pod.name),
    )
    labels = {names.LABEL_DEPLOYMENT: observed.name, names.LABEL_ROLE: role}
    return RoleFacts(
        role=role,
        wanted=int(replicas),
        workload=workload,
        refusals=tuple(one for one in refusals if one.role in (role, "")),
        troubled=tuple(troubled),
        ending=tuple(pod.name for pod in pods if pod.deleting and pod.trouble is None),
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        pods_refused=_pods_refused(child, observed),
        name=child.ref.name if child else "",
        running=_running(pods),
    )


def _that_count(role: str, observed: Observed) -> list[Pod]:
    """The role's pods, without routers in a final phase.

    A Deployment has made others in their place the moment they failed, and keeps them for as long as it likes. One that
    its node refused, so that nothing of it has ever run, speaks while none that was made after it is on its way: where
    the node refuses all that come, the last one does. A StatefulSet deletes engines that failed before it makes their
    successors.
    """
    pods = [pod for pod in observed.pods if pod.role == role]
    if role != ROUTER:
        return pods
    newest = max((pod.created for pod in pods if not pod.finished), default="")
    return [pod for pod in pods if not pod.finished or (not pod.begun and newest < pod.created)]


def _running(pods: Iterable[Pod]) -> tuple[str, ...]:
    unready = [pod for pod in pods if not (pod.ready or pod.deleting or pod.finished)]
    return tuple(sorted(pod.name for pod in unready)) if all(pod.runs for pod in unready) else ()


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
    if moving is Reason.NOT_READY:
        more = len(facts.running) - SHOWN_PODS
        who = ", ".join(facts.running[:SHOWN_PODS]) + (f" and {more} more" if more > 0 else "")
        verb = "runs but is" if len(facts.running) == 1 else "run but are"
        return f"{who} {verb} not ready{SEES_NO_PAIR if facts.role == ROUTER else ENGINE_UNWELL}"
    return "starting"


def _pod_text(pod: Pod) -> str:
    assert pod.trouble is not None
    return f"pod {pod.name}: {pod.trouble.reason.value}: {pod.trouble.message}"
