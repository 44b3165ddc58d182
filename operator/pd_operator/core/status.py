"""What was seen → `status`: counts per role, and seven conditions in a fixed order.

Everything here is a function of the facts, so that a pass that finds nothing new gives the very same status and is not
written. Hence no counters, no ages and no time of the pass; a condition's time changes only when its verdict does.

Precedence inside one role: what stops the operator (refusals) before what stops the pods (troubles) before progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pd_operator.core.choices import Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.names import ROUTER
from pd_operator.core.observed import Observed, Workload
from pd_operator.core.observed_endings import with_overdue_endings
from pd_operator.core.plan import Refusal, role_of
from pd_operator.core.problems import Problem
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.rollout import held_texts, paired
from pd_operator.core.status_discovery import blind_routers, with_blindness
from pd_operator.core.status_model import Condition, ConditionStatus, EngineVersions, PDDeploymentStatus, RoleStatus
from pd_operator.core.status_reuse import NO_PAIR, reuse_verdicts
from pd_operator.core.status_roles import ROLES, SERVICE, RoleFacts, judge_role, role_facts, shortfall
from pd_operator.core.status_verdict import Verdict, is_blocking
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
        now: RFC 3339 time, for verdicts that change and for pods that should have ended.
    """
    previous = previous_status(observed.raw)
    observed = with_overdue_endings(observed, now)
    facts = role_facts(wish.manifests if isinstance(wish, Wish) else (), observed, tuple(refusals))
    if isinstance(wish, Wish):
        held = held_texts(wish.generation, wish.manifests, observed)
        facts = {role: replace(one, held=held.get(role, "")) for role, one in facts.items()}
    verdicts = _verdicts(wish, facts, observed)
    moves = facts[ROUTER].moving is not None
    verdicts = with_blindness(verdicts, blind_routers(observed, previous), router_moves=moves)
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
        engine=_versions(wish, observed),
        **_role_statuses(facts),
    )


def previous_status(raw: Mapping[str, Any]) -> PDDeploymentStatus:
    """What is ours of the status on the object, as far as it can be read.

    Conditions are read one by one, and those of others are left out, so that nothing in theirs makes us forget when
    ours changed.
    """
    value = raw.get("status")
    value = value if isinstance(value, Mapping) else {}
    found = value.get("conditions")
    conditions = tuple(filter(None, map(_own_condition, found if isinstance(found, Sequence) else ())))
    try:
        return PDDeploymentStatus.model_validate({**value, "conditions": conditions})
    except ValueError:
        return PDDeploymentStatus(conditions=conditions)


def _own_condition(value: Any) -> Condition | None:
    try:
        condition = Condition.model_validate(value)
    except ValueError:
        return None
    return condition if condition.type in list(ConditionType) else None


def _verdicts(
    wish: Wish | Sequence[Problem], facts: Mapping[str, RoleFacts], observed: Observed
) -> dict[ConditionType, Verdict]:
    roles = {role: judge_role(facts[role]) for role in ROLES}
    verdicts = {ROLES[role]: verdict for role, verdict in roles.items()}
    if isinstance(wish, Wish):
        verdicts[ConditionType.READY] = _ready(roles, facts, observed)
        verdicts[ConditionType.PROGRESSING] = _progressing(facts, verdicts[ConditionType.READY])
    else:
        invalid = Verdict(ConditionStatus.FALSE, Reason.INVALID_SPEC, _problems_text(wish))
        verdicts[ConditionType.READY] = invalid
        verdicts[ConditionType.PROGRESSING] = invalid
    return verdicts | reuse_verdicts(wish.deployment if isinstance(wish, Wish) else None, observed)


def _ready(roles: Mapping[str, Verdict], facts: Mapping[str, RoleFacts], observed: Observed) -> Verdict:
    """Are requests served?"""
    away = {role: verdict for role, verdict in roles.items() if verdict.status is not ConditionStatus.TRUE}
    no_way_in = _no_way_in(facts[ROUTER], observed)
    if no_way_in is not None:
        away[ROUTER] = no_way_in
    if away:
        worst = min(away.values(), key=lambda verdict: verdict.severity)
        return Verdict(ConditionStatus.FALSE, worst.reason, _by_role(away, facts) + _meaning(facts, serves=False))
    if not paired(observed):
        return Verdict(ConditionStatus.FALSE, Reason.NO_PAIR, f"{NO_PAIR}; requests get a 503")
    lacking = {role: verdict for role, one in facts.items() if (verdict := shortfall(one)) is not None}
    if not lacking:
        return Verdict(ConditionStatus.TRUE, Reason.ALL_READY, "prefill, decode and router are ready")
    return Verdict(ConditionStatus.TRUE, Reason.SERVING, _by_role(lacking, facts) + _meaning(facts, serves=True))


def _no_way_in(router: RoleFacts, observed: Observed) -> Verdict | None:
    """The routers' Service is refused and there is none of ours: clients reach somebody else, or nobody."""
    mine = {child.ref for child in observed.mine()}
    for one in router.refusals:
        if one.ref.kind == SERVICE and one.role == ROUTER and one.ref not in mine:
            return Verdict(ConditionStatus.FALSE, one.reason, one.message)
    return None


def _meaning(facts: Mapping[str, RoleFacts], *, serves: bool) -> str:
    """For whoever reads of a refused child: what becomes of requests, and that nothing has to be done again."""
    if not any(is_blocking(refusal.reason) for one in facts.values() for refusal in one.refusals):
        return ""
    return f"; {'requests are served as before' if serves else 'no request is served'}, and it is tried again"


def _by_role(verdicts: Mapping[str, Verdict], facts: Mapping[str, RoleFacts]) -> str:
    """Each role's message. What is refused for all of them is said once and without a role."""
    common = {"; ".join(one.message for one in role.refusals if not one.role) for role in facts.values()} - {""}
    own = [f"{role}: {one.message}" for role, one in verdicts.items() if one.message not in common]
    return "; ".join([*(common if len(own) < len(verdicts) else ()), *own])


def _progressing(facts: Mapping[str, RoleFacts], ready: Verdict) -> Verdict:
    """Is the deployment on its way to what the spec asks for?"""
    missing = {role: verdict for role, one in facts.items() if (verdict := shortfall(one)) is not None}
    refused = any(verdict.blocks for role, verdict in missing.items() if facts[role].refusals)
    stuck = [role for role, one in facts.items() if one.stuck]
    if stuck and not refused:
        message = "; ".join(f"{role}: {facts[role].stuck_message}" for role in stuck)
        return Verdict(ConditionStatus.FALSE, Reason.ROLLOUT_STUCK, message)
    blocked = {role: verdict for role, verdict in missing.items() if verdict.blocks}
    if blocked:
        worst = min(blocked.values(), key=lambda verdict: verdict.severity)
        message = _by_role(blocked, facts) + _meaning(facts, serves=ready.status is ConditionStatus.TRUE)
        return Verdict(ConditionStatus.FALSE, worst.reason, message)
    moving = {role: one.moving for role, one in facts.items() if one.moving is not None}
    waiting = {role: verdict.reason for role, verdict in missing.items() if facts[role].refusals}
    if not moving and not waiting:
        return Verdict(ConditionStatus.FALSE, Reason.COMPLETE, "every pod runs what the spec asks for")
    message = _by_role({role: missing[role] for role in facts if role in {**moving, **waiting}}, facts)
    replaced = any(facts[role].replaced for role in Role) and all(one.wanted for one in facts.values())
    if replaced and ready.status is not ConditionStatus.TRUE:
        return Verdict(ConditionStatus.TRUE, Reason.SERVICE_GAP, f"{message}; requests get a 503 until then")
    reason = min([*moving.values(), *([] if moving else waiting.values())], key=list(Reason).index)
    return Verdict(ConditionStatus.TRUE, reason, message)


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


def _versions(wish: Wish, observed: Observed) -> EngineVersions:
    """What the self-tests of this generation found; of vLLM, until then, what the spec or the image's tag says."""
    engine = wish.deployment.spec.engine
    tagged = version_in_image(engine.image) if engine.image else None
    mine = [pod for pod in observed.pods if pod.generation == wish.generation]
    vllm = next((pod.vllm_version for pod in mine if pod.vllm_version), "")
    return EngineVersions(
        vllmVersion=vllm or engine.vllm_version or (version_text(tagged) if tagged else ""),
        nixl_version=next((pod.nixl_version for pod in mine if pod.nixl_version), ""),
        connector_version=_tag(wish.connector_image or ""),
    )


def _tag(image: str) -> str:
    """The tag of an image reference, empty when there is none."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2][:TAG_LIMIT]
