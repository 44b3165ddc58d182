"""The one reconcile: observe → plan → render → apply → status. Everything that happens anywhere ends in a call of it.

It looks at the whole object each time and keeps nothing that matters between calls, so it may be killed after any API
call and started again by another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from pd_operator.core.observed import Child, Observed, observe_child
from pd_operator.core.observed_endings import ends_soon
from pd_operator.core.observed_events import hindrance, pods_refused, pods_to_ask_about, with_hindrances
from pd_operator.core.observed_kinds import DEPLOYMENTS, PODS, Ref
from pd_operator.core.observed_router import RouterAnswer
from pd_operator.core.parse import parse_deployment
from pd_operator.core.plan import Refusal, Why, plan, ref_of
from pd_operator.core.problems import Problem, SpecError
from pd_operator.core.reasons import Reason
from pd_operator.core.render_children import cluster_generation, render_children
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_engine_pod import connector_image
from pd_operator.core.rollout import held_back
from pd_operator.core.status import Wish, compute_status, previous_status
from pd_operator.core.status_events import Happening, happenings
from pd_operator.core.status_model import PDDeploymentStatus
from pd_operator.shell.api import ApiError, ClusterApi
from pd_operator.shell.carry_out import Hands
from pd_operator.shell.events import post_events
from pd_operator.shell.mirror import Mirror
from pd_operator.shell.rivals import Rivals
from pd_operator.shell.wakeups import Key

logger = logging.getLogger(__name__)

A_WHILE: Final = 5.0
"""Seconds until pods that have not begun or ended are looked at again; a kubelet tells a hindrance thrice in two."""


class Result(StrEnum):
    """How a reconcile ended; WAITING is tried again although nothing failed, SOON without ever longer pauses, and
    BEGINNING after `A_WHILE`: pods begin or end soon or are hindered, and nothing wakes a reconcile for an Event or for
    the end of a grace period.
    """

    SETTLED = "settled"
    BEGINNING = "beginning"
    WAITING = "waiting"
    SOON = "soon"
    INVALID = "invalid"
    STANDING_BACK = "standing_back"
    GONE = "gone"


class Interrupted(Exception):
    """A call failed in the middle of the writes. `progress`: others have gone through, so it may soon work."""

    def __init__(self, error: ApiError, *, progress: bool) -> None:
        super().__init__(str(error))
        self.retry_after = error.retry_after
        self.progress = progress


class Reconciler:
    """Brings one PDDeployment at a time in order."""

    def __init__(
        self,
        api: ClusterApi,
        mirror: Mirror,
        hands: Hands,
        context: Callable[[str], RenderContext],
        answers: Callable[[], Mapping[str, RouterAnswer | None]],
        now: Callable[[], str],
        rivals: Rivals,
    ) -> None:
        self._api = api
        self._mirror = mirror
        self._hands = hands
        self._context = context
        self._answers = answers
        self._now = now
        self._rivals = rivals

    async def reconcile(self, key: Key) -> Result:
        """Look at one object and do what is to do.

        Raises:
            Interrupted, ApiError: when a call failed and the rest has to be done later.
        """
        observed = self._observe(key)
        if observed is None:
            return Result.GONE
        wish = self._wish(observed)
        if not isinstance(wish, Wish):
            return await self._refuse(key, wish, observed)
        observed = await self._with_objects_in_the_way(wish.manifests, observed)
        manifests = held_back(wish.generation, wish.manifests, observed)
        todo = plan(manifests, observed, self._hands.not_kept)
        turn, news = self._rivals.turn(todo, observed)
        todo = turn.plan
        if any(action.why is Why.ABSENT for action in todo.actions) and not await self._is_alive(observed):
            return Result.GONE
        outcome = await self._hands.carry_out(todo, observed)
        if outcome.interrupted is not None:
            if outcome.interrupted.namespace_is_going:
                return Result.GONE
            raise Interrupted(outcome.interrupted, progress=outcome.wrote > 0) from outcome.interrupted
        if turn.rival:
            if outcome.refusals:
                return Result.WAITING  # The question was not written, so nobody can answer it.
            self._rivals.asked(key, turn)
            return await self._stand_back(observed, news)
        result = await self._report(key, wish, observed, outcome.refusals)
        if any(refusal.reason is Reason.WAITING_FOR_API for refusal in outcome.refusals):
            return Result.SOON
        return Result.WAITING if outcome.refusals else result

    async def _refuse(self, key: Key, problems: Sequence[Problem], observed: Observed) -> Result:
        turn, news = self._rivals.turn(None, observed)
        if turn.rival:
            return await self._stand_back(observed, news)
        await self._report(key, problems, observed, ())
        return Result.INVALID

    async def _stand_back(self, observed: Observed, news: Sequence[Happening]) -> Result:
        """Write nothing but news: the status is the other operator's as well."""
        await post_events(self._api, observed, news, self._now())
        return Result.STANDING_BACK

    def _observe(self, key: Key) -> Observed | None:
        """What is known; None when there is nothing to do any more. An object in deletion keeps its children until
        the garbage collector takes them."""
        observed = self._mirror.observed(key, self._answers())
        if observed is None or "deletionTimestamp" in observed.metadata:
            return None
        return observed

    async def _is_alive(self, observed: Observed) -> bool:
        """Before something is created: children of a dead owner would be collected and created again in turns."""
        ref = _ref(observed)
        if await self._api.alive(ref, observed.uid):
            return True
        self._mirror.gone(ref, observed.uid)
        return False

    def _wish(self, observed: Observed) -> Wish | Sequence[Problem]:
        context = self._context(observed.uid)
        try:
            deployment = parse_deployment(observed.raw, unknown_fields="ignore")
            manifests = render_children(deployment, context)
        except SpecError as error:
            return error.problems
        return Wish(
            deployment, cluster_generation(deployment, context), manifests, connector_image(deployment, context)
        )

    async def _with_objects_in_the_way(self, manifests: Sequence[Mapping[str, Any]], observed: Observed) -> Observed:
        """Ask for every child that the mirror lacks: it sees labelled objects only, and others may have the name."""
        absent = [ref for ref in map(ref_of, manifests) if ref not in observed.children]
        found = await asyncio.gather(*(self._look_up(ref) for ref in absent))
        children = {child.ref: child for child in found if child is not None}
        return replace(observed, children={**observed.children, **children}) if children else observed

    async def _look_up(self, ref: Ref) -> Child | None:
        raw = await self._api.get(ref)
        return None if raw is None else observe_child(ref.kind, raw)

    async def _report(
        self, key: Key, wish: Wish | Sequence[Problem], before: Observed, refusals: Sequence[Refusal]
    ) -> Result:
        """Write the status when it differs, judged by what the children are after the writes."""
        now = self._mirror.observed(key, self._answers())
        if now is None or now.uid != before.uid:
            return Result.SETTLED
        lacking = [child for child in now.mine() if child.ref.kind == "StatefulSet" and _lacks_pods(child)]
        # The spec that was read is what the status is about, even when a newer one has arrived meanwhile.
        raw = {**before.raw, "status": now.raw.get("status")}
        refused = {child.ref: pods_refused(await self._events_about(child.ref, child.uid)) for child in lacking}
        silent = pods_to_ask_about(now)
        hindered = {
            pod.uid: hindrance(await self._events_about(Ref(PODS.name, pod.namespace, pod.name), pod.uid))
            for pod in silent
        }
        seen = with_hindrances(replace(now, raw=raw, pods_refused=refused), hindered)
        time = self._now()
        status = compute_status(wish, seen, refusals, time)
        old = previous_status(seen.raw)
        if not status.stands_in(seen.raw.get("status")):
            await self._write_status(seen, old, status)
        if not all(hindered.values()) or ends_soon(seen, time):
            return Result.BEGINNING
        return Result.WAITING if lacking or hindered else Result.SETTLED

    async def _events_about(self, ref: Ref, uid: str) -> Sequence[Mapping[str, Any]]:
        """What was told about an object. Without the right to read it, nothing was."""
        try:
            return await self._api.events_about(ref.namespace, uid)
        except ApiError as error:
            if error.transient:
                raise
            logger.info("events of %s in %s can't be read: %s", ref, ref.namespace, error)
            return ()

    async def _write_status(self, seen: Observed, old: PDDeploymentStatus, status: PDDeploymentStatus) -> None:
        ref = _ref(seen)
        try:
            raw = await self._api.apply_status(ref, seen.uid, status.document())
        except ApiError as error:
            if error.status == 404:
                self._mirror.gone(ref, seen.uid)
                return
            raise
        self._mirror.see(DEPLOYMENTS, raw)
        await post_events(self._api, seen, happenings(old, status), self._now())


def _lacks_pods(child: Child) -> bool:
    return child.workload is not None and child.workload.lacks_pods


def _ref(observed: Observed) -> Ref:
    return Ref(DEPLOYMENTS.name, observed.namespace, observed.name)
