"""Two operators for one PDDeployment: which one may write.

Two releases whose namespaces overlap render different children, and each would put the other's right, for ever, engines
included. So every child says which operator wrote it, and whoever finds engines of another one asks before it touches
anything that costs: it writes one cheap child and waits. An operator that is alive writes it back at once, since to it
that is a change by somebody else; the asker then stands back and asks again rarely. One that is gone does not answer,
and the asker takes over: a release may be installed anew under another name. One that dies later is noticed by the next
edit: a living operator judges each generation of a spec in its status within seconds, so one that is left unjudged is
reason enough to ask, and costs no read.

Nothing has to be remembered for this to be safe: an operator that starts again finds the other's engines and asks.
A spec that is refused leaves nothing to ask with, and its status is the other operator's like all else.
Separate from `plan`, which says what differs and not whose turn it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pd_operator.core.observed import HASH_ANNOTATION, Child, Observed
from pd_operator.core.plan import Apply, Plan, Why

PATIENCE: Final = 60.0
"""Seconds for an answer: longer than a new pod of the other operator needs to start."""
FIRST_RETRY: Final = 300.0
LONGEST_RETRY: Final = 3600.0
"""Seconds between two questions to an operator that has answered; each costs both one write."""
SUSPICION: Final = 30.0
"""Seconds that another operator may leave a generation of the spec unjudged before it is asked out of turn."""
_COSTLY: Final = frozenset({"StatefulSet", "Deployment"})


@dataclass(frozen=True, slots=True)
class Claim:
    """A question: the hash that was written, when, how often it was asked, and when an answer was seen.

    Attributes:
        unjudged_since: since when the status is about an older spec, None while it is about the newest.
        suspected: the newest generation that was reason for a question. An operator that has answered once and still
            does not judge it (it may lack a right) is alive.
    """

    uid: str
    rendered_hash: str
    asked_at: float
    tries: int = 1
    answered_at: float | None = None
    unjudged_since: float | None = None
    suspected: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What may be done now. ``rival`` is the operator that manages the object, empty when it is this one; ``former`` is
    the one that does not any more since it gave no answer; ``wait`` is when to look again, in seconds."""

    plan: Plan
    rival: str = ""
    claim: Claim | None = None
    wait: float = 0.0
    former: str = ""


def whose_turn(todo: Plan | None, observed: Observed, identity: str, claim: Claim | None, now: float) -> Turn:
    """Let the plan pass, or only a question, or nothing.

    Args:
        todo: all that this operator would do; None when it refuses the spec.
        observed: with every child.
        identity: this operator, as its children name it.
        claim: the question that is open, if any.
        now: a clock in seconds.
    """
    rival = rival_of(observed, identity)
    if not rival:
        return Turn(todo or Plan())
    if claim is not None and claim.answered_at is None:
        asked = next((child for child in observed.mine() if child.uid == claim.uid), None)
        if asked is not None and asked.rendered_hash == claim.rendered_hash:
            left = claim.asked_at + PATIENCE - now
            return Turn(todo or Plan(), former=rival) if left <= 0 else Turn(Plan(), rival, claim, left)
        claim = replace(claim, answered_at=now)
    if claim is not None and claim.answered_at is not None:
        left = claim.answered_at + min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** (claim.tries - 1)) - now
        claim = _judged(claim, observed, now)
        if claim.unjudged_since is not None and todo is not None:
            patience = claim.unjudged_since + SUSPICION - now
            if patience <= 0:
                return _suspect(_ask(todo, observed, identity, rival, claim.tries, now), observed.generation)
            left = min(left, patience)
        if left > 0:
            return Turn(Plan(), rival, claim, left)
    return _ask(todo, observed, identity, rival, 1 if claim is None else claim.tries + 1, now)


def rival_of(observed: Observed, identity: str) -> str:
    """The other operator that wrote the engines, or an empty text. Engines without a name are anybody's."""
    writers = {child.operator for child in observed.mine() if child.ref.kind == "StatefulSet" and child.operator}
    return min(writers - {identity}, default="")


def _judged(claim: Claim, observed: Observed, now: float) -> Claim:
    judged = int((observed.raw.get("status") or {}).get("observedGeneration", 0))
    if judged >= observed.generation or claim.suspected >= observed.generation:
        return replace(claim, unjudged_since=None)
    return claim if claim.unjudged_since is not None else replace(claim, unjudged_since=now)


def _suspect(question: Turn, generation: int) -> Turn:
    claim = question.claim
    return question if claim is None else replace(question, claim=replace(claim, suspected=generation))


def _ask(todo: Plan | None, observed: Observed, identity: str, rival: str, tries: int, now: float) -> Turn:
    for action in todo.actions if todo else ():
        if isinstance(action, Apply) and action.why is Why.CHANGED and action.ref.kind not in _COSTLY and action.uid:
            return Turn(Plan((action,)), rival, Claim(action.uid, _hash(action), now, tries), PATIENCE)
    ours = [child for child in observed.mine() if child.ref.kind not in _COSTLY and child.operator == identity]
    if ours:  # asked in an earlier life of this process
        return Turn(Plan(), rival, _claim_on(ours[0], now, tries), PATIENCE)
    return Turn(Plan(), rival, wait=LONGEST_RETRY) if todo is None else Turn(todo)


def _claim_on(child: Child, now: float, tries: int) -> Claim:
    return Claim(child.uid, child.rendered_hash, now, tries)


def _hash(action: Apply) -> str:
    return str(action.manifest["metadata"]["annotations"][HASH_ANNOTATION])
