"""What was seen → `status`: counts per role, and seven conditions in a fixed order.

Everything here is a function of the facts, so that a pass that finds nothing new gives the very same status and is not
written. Hence no counters, no ages and no time of the pass; a condition's time changes only when its verdict does.

Precedence inside one role: what stops the operator (refusals) before what stops the pods (troubles) before progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.model import PDDeployment
from pd_operator.core.observed import Observed, Workload
from pd_operator.core.plan import Refusal, role_of
from pd_operator.core.problems import Problem
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.status_model import Condition, ConditionStatus, EngineVersions, PDDeploymentStatus, RoleStatus
from pd_operator.core.status_reuse import reuse_verdicts
from pd_operator.core.status_roles import ROLES, RoleFacts, judge_role, role_facts
from pd_operator.core.status_verdict import Verdict
from pd_operator.core.versions import version_in_image, version_text

TAG_LIMIT: Final = 64
MESSAGE_LIMIT: Final = 2000
"""Most characters of a condition's message."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A spec that was accepted, and what was rendered from it."""

    deployment: PDDeployment
    generation: str
    manifests: Sequence[Mapping[str, Any]]
    connector_image: str | None = None


def compute_status(
    wish: Wish | Sequence[Problem], observed: Observed, refusals: Iterable[Refusal], now: str
) -> PDDeploymentStatus:
    """The status of one PDDeployment.

    Args:
        wish: the accepted spec, or the problems of a refused one.
        observed: what was seen; its `raw` holds the previous status.
        refusals: children that could not be brought to what is wanted.
        now: RFC 3339 time for verdicts that change.
    """
    previous = previous_status(observed.raw)
    facts = role_facts(wish.manifests if isinstance(wish, Wish) else (), observed, tuple(refusals))
    verdicts = _verdicts(wish, facts, observed)
    conditions = tuple(
        _condition(kind, verdicts[kind], previous.condition(kind), observed.generation, now) for kind in ConditionType
    )
    if not isinstance(wish, Wish):
        return previous.model_copy(
            update={"observed_generation": observed.generation, "conditions": conditions, **_role_statuses(facts)}
        )
    return PDDeploymentStatus(
        observed_generation=observed.generation,
        conditions=conditions,
        generation=wish.generation,
        url=_url(wish.manifests),
        engine=_versions(wish),
        **_role_statuses(facts),
    )


def previous_status(raw: Mapping[str, Any]) -> PDDeploymentStatus:
    """The status on the object, or an empty one when there is none or it can't be read."""
    value = raw.get("status")
    try:
        return PDDeploymentStatus.model_validate(value if isinstance(value, Mapping) else {})
    except ValueError:
        return PDDeploymentStatus()


def _verdicts(
    wish: Wish | Sequence[Problem], facts: Mapping[str, RoleFacts], observed: Observed
) -> dict[ConditionType, Verdict]:
    roles = {role: judge_role(facts[role]) for role in ROLES}
    verdicts = {ROLES[role]: verdict for role, verdict in roles.items()}
    if isinstance(wish, Wish):
        verdicts[ConditionType.READY] = _ready(roles)
        verdicts[ConditionType.PROGRESSING] = _progressing(facts, roles)
    else:
        invalid = Verdict(ConditionStatus.FALSE, Reason.INVALID_SPEC, _problems_text(wish))
        verdicts[ConditionType.READY] = invalid
        verdicts[ConditionType.PROGRESSING] = invalid
    return verdicts | reuse_verdicts(wish.deployment if isinstance(wish, Wish) else None, observed)


def _ready(roles: Mapping[str, Verdict]) -> Verdict:
    waiting = {role: verdict for role, verdict in roles.items() if verdict.status is not ConditionStatus.TRUE}
    if not waiting:
        return Verdict(ConditionStatus.TRUE, Reason.ALL_READY, "prefill, decode and router are ready")
    worst = min(waiting.values(), key=lambda verdict: verdict.severity)
    message = "; ".join(f"{role}: {verdict.message}" for role, verdict in waiting.items())
    return Verdict(ConditionStatus.FALSE, worst.reason, message)


def _progressing(facts: Mapping[str, RoleFacts], roles: Mapping[str, Verdict]) -> Verdict:
    stuck = [role for role in roles if facts[role].stuck]
    if stuck:
        message = "; ".join(f"{role}: {facts[role].stuck_message}" for role in stuck)
        return Verdict(ConditionStatus.FALSE, Reason.ROLLOUT_STUCK, message)
    blocked = [role for role, verdict in roles.items() if verdict.blocks]
    if blocked:
        worst = min((roles[role] for role in blocked), key=lambda verdict: verdict.severity)
        message = "; ".join(f"{role}: {roles[role].message}" for role in blocked)
        return Verdict(ConditionStatus.FALSE, worst.reason, message)
    moving = [role for role, one in facts.items() if one.moving is not None]
    if moving:
        reason = min((facts[role].moving or Reason.STARTING for role in moving), key=list(Reason).index)
        return Verdict(ConditionStatus.TRUE, reason, "; ".join(f"{role}: {roles[role].message}" for role in moving))
    return Verdict(ConditionStatus.FALSE, Reason.COMPLETE, "every pod runs what the spec asks for")


def _condition(
    kind: ConditionType, verdict: Verdict, previous: Condition | None, generation: int, now: str
) -> Condition:
    if verdict.reason is Reason.ROUTER_NOT_ASKED and previous is not None and previous.reason != Reason.DISABLED:
        # A restarted operator knows nothing for a second; that is no reason to change anything.
        return previous.model_copy(update={"observed_generation": generation})
    same = previous is not None and previous.status is verdict.status
    return Condition(
        type=kind.value,
        status=verdict.status,
        reason=verdict.reason.value,
        message=bounded(verdict.message),
        last_transition_time=previous.last_transition_time if same and previous is not None else now,
        observed_generation=generation,
    )


def bounded(message: str) -> str:
    """A message that is never longer than the limit; the beginning is kept."""
    return message if len(message) <= MESSAGE_LIMIT else f"{message[: MESSAGE_LIMIT - 1]}…"


def _problems_text(problems: Sequence[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)


def _role_statuses(facts: Mapping[str, RoleFacts]) -> dict[str, RoleStatus]:
    return {role: _role_status(facts[role]) for role in ROLES}


def _role_status(facts: RoleFacts) -> RoleStatus:
    workload = facts.workload or Workload(wanted=facts.wanted)
    return RoleStatus(
        replicas=workload.replicas,
        ready_replicas=workload.ready,
        updated_replicas=workload.updated,
        ready=f"{workload.ready}/{facts.wanted}",
        selector=facts.selector,
    )


def _url(manifests: Iterable[Mapping[str, Any]]) -> str:
    for manifest in manifests:
        if manifest["kind"] == "Service" and role_of(manifest) == "router":
            metadata = manifest["metadata"]
            port = manifest["spec"]["ports"][0]["port"]
            return f"http://{metadata['name']}.{metadata['namespace']}.svc:{port}"
    return ""


def _versions(wish: Wish) -> EngineVersions:
    """As far as the spec and the images' tags say."""
    engine = wish.deployment.spec.engine
    found = version_in_image(engine.image) if engine.image else None
    return EngineVersions(
        vllmVersion=engine.vllm_version or (version_text(found) if found else ""),
        connector_version=_tag(wish.connector_image or ""),
    )


def _tag(image: str) -> str:
    """The tag of an image reference, empty when there is none."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2][:TAG_LIMIT]
