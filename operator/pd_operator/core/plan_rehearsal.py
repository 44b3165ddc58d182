"""Which writes are tried dry before anything changes, and what stays as it is when the server refuses one of them.

Engines pair within a generation only. Where the API server takes one role's new template and refuses the other's, the
first one's engines are replaced and find no partner: an outage that lasts until somebody acts. So an edit is taken as a
whole or not at all. The server is asked without effect first (`dryRun`), about every workload that would change; if it
refuses one, no child that exists is changed or deleted, and no StatefulSet is made that would adopt running pods.

What is still written then is what serving may need: children of other kinds that are absent, routers among them, and
fields that somebody edited by hand. Nothing is tried where there is nothing to protect: when no pods exist yet, and
when a single child changes, since its own refusal leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pd_operator.core.observed import IMMUTABLE, Observed
from pd_operator.core.plan import Action, Apply, Delete, Manifest, Refusal, Why, role_of
from pd_operator.core.reasons import Reason

ENGINES: Final = "StatefulSet"


def rehearsal(actions: Sequence[Action], observed: Observed) -> tuple[Apply, ...]:
    """The applies to try dry, in the order of the actions; empty when there is nothing to protect.

    Args:
        actions: all writes of one reconcile.
        observed: what they were planned from.
    """
    if sum(is_change(action) for action in actions) < 2:
        return ()
    tried = [one for one in actions if isinstance(one, Apply) and one.ref.kind in IMMUTABLE and is_change(one)]
    roles = {pod.role for pod in observed.pods}
    exists = any(one.why is Why.CHANGED or role_of(one.manifest) in roles for one in tried)
    return tuple(tried) if exists else ()


def rehearsed(action: Apply) -> Manifest:
    """What to try: the object as it will be, so together with the fields that are handed over before the apply."""
    if action.hand_over is None:
        return action.manifest
    return {**action.manifest, "spec": {**action.hand_over["spec"], **action.manifest["spec"]}}


def is_change(action: Action) -> bool:
    """May it touch what exists? A StatefulSet that is absent may have left pods behind, which a new one adopts."""
    if isinstance(action, Delete):
        return True
    return action.why is Why.CHANGED or (action.why is Why.ABSENT and action.ref.kind == ENGINES)


def left_alone(tried: Sequence[Apply], refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """For each workload that would have been accepted and is not written: why.

    Args:
        tried: the workloads of the edit that are not written.
        refusals: those that the server refused, at least one.
    """
    refused = sorted({str(one.ref) for one in refusals})
    return tuple(
        Refusal(
            one.ref,
            role_of(one.manifest),
            Reason.APPLY_REFUSED,
            f"{one.ref} stays as it is until {' and '.join(refused)} can change with it",
        )
        for one in tried
        if str(one.ref) not in refused
    )
