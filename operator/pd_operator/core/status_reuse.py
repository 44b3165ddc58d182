"""Is KV reuse on, and do tokens really flow back? Judged from what the routers say of themselves.

Separate because it is the one judgement that Kubernetes can't make: every pod can be ready and every answer a 200 while
no KV block moves. Nothing here repeats a counter: the verdict changes when its meaning does, not with traffic.
"""

from __future__ import annotations

from typing import Final

from pd_operator.core.choices import Switch
from pd_operator.core.model import PDDeployment
from pd_operator.core.names import ROUTER
from pd_operator.core.observed import Observed
from pd_operator.core.observed_router import Flow, RouterAnswer
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.status_model import ConditionStatus
from pd_operator.core.status_verdict import Verdict

NO_PAIR: Final = "no ready prefill and decode engine of one generation"

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def reuse_verdicts(deployment: PDDeployment | None, observed: Observed) -> dict[ConditionType, Verdict]:
    """Both conditions about reuse. Without a deployment (a bad spec) the running routers alone are judged."""
    if deployment is not None and deployment.spec.kv_transfer.bidirectional is Switch.DISABLED:
        off = Verdict(_FALSE, Reason.DISABLED, "spec.kvTransfer.bidirectional is Disabled")
        return {ConditionType.BIDIRECTIONAL_ACTIVE: off, ConditionType.TRANSFERS_FLOWING: off}
    answers = _answers(observed)
    if isinstance(answers, Verdict):
        return {ConditionType.BIDIRECTIONAL_ACTIVE: answers, ConditionType.TRANSFERS_FLOWING: answers}
    wanted = "" if deployment is None else deployment.spec.kv_transfer.retention_mode.value
    return {
        ConditionType.BIDIRECTIONAL_ACTIVE: _active(answers, wanted),
        ConditionType.TRANSFERS_FLOWING: _flowing(answers),
    }


def _answers(observed: Observed) -> list[RouterAnswer] | Verdict:
    """What the ready routers said; a verdict when that is not enough to judge."""
    ready = [pod.name for pod in observed.pods if pod.role == ROUTER and pod.ready]
    if not ready:
        return Verdict(_UNKNOWN, Reason.ROUTER_NOT_READY, "no router is ready")
    unreachable = sorted(name for name in ready if name in observed.routers and observed.routers[name] is None)
    answers = [answer for name in ready if (answer := observed.routers.get(name)) is not None]
    if unreachable and not answers:
        message = f"the operator gets no answer from the admin port of {', '.join(unreachable)}"
        return Verdict(_UNKNOWN, Reason.ROUTER_UNREACHABLE, message)
    if not answers:
        return Verdict(_UNKNOWN, Reason.ROUTER_NOT_ASKED, "no router has been asked yet")
    return answers


def _active(answers: list[RouterAnswer], wanted: str) -> Verdict:
    if not all(answer.reuse for answer in answers):
        return Verdict(_FALSE, Reason.REUSE_OFF, "a router runs with reuse off")
    if not any(answer.pairs for answer in answers):
        return Verdict(_FALSE, Reason.NO_PAIR, f"routers see {NO_PAIR}")
    message = "routers attach handles and have a pair of engines to use them with"
    retentions = sorted(frozenset().union(*(answer.retentions for answer in answers)))
    fallbacks = sorted(frozenset().union(*(answer.fallbacks for answer in answers)))
    if retentions:
        message += f"; decode retains {' and '.join(retentions)}"
    if fallbacks and wanted and wanted not in retentions:
        message += f", not {wanted} as spec.kvTransfer.retention asks"
    if fallbacks:
        message += f", because {' and '.join(fallbacks)}"
    return Verdict(_TRUE, Reason.REUSE_ON, message)


def _flowing(answers: list[RouterAnswer]) -> Verdict:
    flows = {answer.flow for answer in answers}
    if Flow.STARVED in flows:
        message = "prefill pulls nothing although turns carry a handle; look at the NIXL backend and its transport"
        return Verdict(_FALSE, Reason.NOTHING_PULLED, message)
    if Flow.REUSED in flows:
        message = (
            "prefill pulls nothing: decode has given the blocks of finished turns to other requests by the time of the "
            "next turn; more decode replicas or memory, or retention Pinned, would keep them"
        )
        return Verdict(_FALSE, Reason.BLOCKS_REUSED, message)
    if Flow.FLOWING in flows:
        return Verdict(_TRUE, Reason.TOKENS_PULLED, "prefill pulls tokens from decode")
    message = (
        "when the routers were last asked, prefill had pulled no tokens from decode, and too few turns had carried a "
        "handle to call that a fault"
    )
    return Verdict(_UNKNOWN, Reason.NO_TURNS_YET, message)
