"""A plan → API calls. One child that the server refuses does not keep the others from being written, except for a
workload: then nothing that exists is changed, see `plan_rehearsal`.

Separate from the reconcile because this is where each kind of failure gets its meaning: refused for good (a condition
for people), not possible now (tried again), or pointless because the namespace is going.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.observed import Observed, observe_child
from pd_operator.core.observed_kinds import Ref, kind_named
from pd_operator.core.plan import Apply, Delete, Plan, Refusal, Why, role_of
from pd_operator.core.plan_ownership import lost_fields
from pd_operator.core.plan_rehearsal import is_change, left_alone, rehearsal, rehearsed
from pd_operator.core.plan_renames import Rename, removals, renamed_items
from pd_operator.core.plan_repair import moved_items, without_claims
from pd_operator.core.reasons import Reason
from pd_operator.core.refused_fields import in_fields
from pd_operator.shell.api import ApiError, ClusterApi
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.mirror import Mirror
from pd_wire import names

logger = logging.getLogger(__name__)

UNPROCESSABLE: Final = 422
NOT_KNOWN_YET: Final = "cannot find RESTMapping"
"""Words of the plugin OwnerReferencesPermissionEnforcement, which learns of new definitions every 30 s."""

REFUSAL_LIMIT = 500
"""Most characters that a condition repeats of the server's words."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a plan: what stays refused, and the failure after which the rest was left for later.

    `wrote` counts the actions that went through.
    """

    refusals: tuple[Refusal, ...] = ()
    interrupted: ApiError | None = None
    wrote: int = 0


class Hands:
    """Writes children. `not_kept` remembers what a server drops although it was applied, by child uid."""

    def __init__(
        self, api: ClusterApi, mirror: Mirror, metrics: Metrics, log: Callable[..., None] = logger.info
    ) -> None:
        self._api = api
        self._mirror = mirror
        self._metrics = metrics
        self._log = log
        self.not_kept: dict[str, frozenset[str]] = {}

    async def carry_out(self, plan: Plan, observed: Observed) -> Outcome:
        """Run the actions in order, after those that must not be refused have been tried dry.

        Args:
            plan: what to do.
            observed: what it was planned from.
        """
        refusals = list(plan.refusals)
        tried = rehearsal(plan.actions, observed)
        refused: list[Refusal] = []
        wrote: list[Ref] = []
        for dry, action in (*((True, one) for one in tried), *((False, one) for one in plan.actions)):
            if refused and not dry and is_change(action):
                continue
            try:
                await (self._rehearse(action) if dry else self._write(action))
            except ApiError as error:
                if error.status in (404, 409):
                    await self._look_again(action.ref, action.uid)
                if error.transient or error.namespace_is_going:
                    return Outcome(tuple(refusals), error, len(wrote))
                if NOT_KNOWN_YET in error.message:
                    # True of every child that has an owner: asking for the others as well would only repeat it.
                    self._log("%s in %s has to wait: %s", action.ref, action.ref.namespace, error)
                    return Outcome((*refusals, _not_known_yet(action)), wrote=len(wrote))
                logger.warning("%s in %s is refused: %s", action.ref, action.ref.namespace, error)
                refusals.append(_refusal(action, error))
                if any(one.ref == action.ref for one in tried):
                    refused.append(refusals[-1])
            else:
                wrote += [] if dry else [action.ref]
        if refused:
            refusals += left_alone([one for one in tried if one.ref not in wrote], refused)
        return Outcome(tuple(refusals), wrote=len(wrote))

    def forget_children_except(self, uids: frozenset[str]) -> None:
        """Drop what was remembered about children that are gone."""
        self.not_kept = {uid: paths for uid, paths in self.not_kept.items() if uid in uids}

    async def _look_again(self, ref: Ref, uid: str | None) -> None:
        """The object is not the one that was seen: a watch may be behind, or it was listed before the watch began."""
        try:
            raw = await self._api.get(ref)
        except ApiError:
            return
        if raw is not None:
            self._mirror.see(kind_named(ref.kind), raw)
        elif uid is not None:
            self._mirror.gone(ref, uid)

    async def _rehearse(self, action: Apply | Delete) -> None:
        """Ask the server whether it would take an apply."""
        assert isinstance(action, Apply)
        try:
            await self._api.rehearse(rehearsed(action), action.uid)
        except ApiError as error:
            # What an edit by hand has moved is put back when it is written; until then nothing can be tried.
            if error.status != UNPROCESSABLE or not await self._in_the_way(action):
                raise

    async def _write(self, action: Apply | Delete) -> None:
        if isinstance(action, Apply):
            await self._apply(action)
        else:
            await self._delete(action)

    async def _apply(self, action: Apply) -> None:
        if action.hand_over is not None and action.uid is not None:
            await self._api.hand_over(action.hand_over, action.uid)
        renames = await self._put_back_names(action) if action.why is Why.EDITED else ()
        try:
            raw = await self._api.apply(action.manifest, action.uid)
        except ApiError as error:
            if error.status != UNPROCESSABLE or not await self._clear_the_way(action):
                raise
            raw = await self._api.apply(action.manifest, action.uid)
        doubles = removals(renames, raw)
        if doubles:
            raw = await self._api.patch(action.ref, _version(raw), doubles)
        claims = without_claims(raw)
        if claims:
            raw = await self._api.patch(action.ref, _version(raw), claims)
        self._metrics.writes.labels(action.ref.kind, action.why.value).inc()
        self._log("applied %s in %s (%s)", action.ref, action.ref.namespace, action.why.value)
        self._mirror.see(kind_named(action.ref.kind), raw)
        child = observe_child(action.ref.kind, raw)
        lost = lost_fields(action.manifest, child.owned_fields)
        if lost != self.not_kept.get(child.uid, frozenset()):
            # Applied with force and still not ours: an admission webhook rewrites it, or the server is too old for it.
            logger.warning("%s in %s: the server does not keep %s", action.ref, action.ref.namespace, sorted(lost))
            self.not_kept[child.uid] = lost

    async def _put_back_names(self, action: Apply) -> tuple[Rename, ...]:
        """Give renamed items their names again, before an apply would add ours beside them.

        Returns what could not be put back at once, such as a volume that is mounted by its other name: it has to be
        removed after the apply.
        """
        live = await self._api.get(action.ref)
        renames = renamed_items(action.manifest, live) if live is not None else ()
        if live is None or not renames or live["metadata"].get("uid") != action.uid:
            return ()
        self._log("%s: %s renamed by hand", action.ref, ", ".join(f"{one.wanted} is {one.now}" for one in renames))
        try:
            await self._api.patch(action.ref, _version(live), [step for one in renames for step in one.put_back()])
        except ApiError as error:
            if error.status != UNPROCESSABLE:
                raise
            return renames
        return ()

    async def _clear_the_way(self, action: Apply) -> bool:
        """After a refusal: put back what an edit by hand has moved. False when it was not that."""
        version, operations = await self._in_the_way(action) or ("", ())
        if operations:
            await self._api.patch(action.ref, version, operations)
            self._log("put back %s of %s", ", ".join(str(one["path"]) for one in operations), action.ref)
        return bool(operations)

    async def _in_the_way(self, action: Apply) -> tuple[str, Sequence[Mapping[str, Any]]] | None:
        """The live version, and the patch that puts back what an edit by hand has moved; None when nothing was."""
        live = await self._api.get(action.ref)
        if live is None or live["metadata"].get("uid") != action.uid:
            return None
        operations = moved_items(action.manifest, live)
        return (_version(live), operations) if operations else None

    async def _delete(self, action: Delete) -> None:
        if not await self._api.delete(action.ref, action.uid, orphan=action.orphan):
            self._mirror.gone(action.ref, action.uid)
            return
        self._metrics.writes.labels(action.ref.kind, action.why.value).inc()
        self._log("deleted %s in %s (%s)", action.ref, action.ref.namespace, action.why.value)


def _version(raw: Mapping[str, Any]) -> str:
    return str(raw["metadata"].get("resourceVersion", ""))


def _not_known_yet(action: Apply | Delete) -> Refusal:
    message = f"waiting for the API server to know {names.KIND} as an owner; it takes up to a minute after installation"
    return Refusal(action.ref, "", Reason.WAITING_FOR_API, message)


def _refusal(action: Apply | Delete, error: ApiError) -> Refusal:
    role = role_of(action.manifest) if isinstance(action, Apply) else ""
    text = in_fields(action.ref.kind, role, error.message)[:REFUSAL_LIMIT]
    return Refusal(action.ref, role, Reason.APPLY_REFUSED, f"the API server refuses {action.ref}: {text}")
