"""Rendered manifests and what was seen → the writes that bring one to the other. No write when nothing changed.

When a child is applied
-----------------------
The hash of its rendered manifest is kept as an annotation on the child. An equal hash means that the wish is the same
as last time; comparing the live object itself would trip over every default that the server fills in. What somebody
changed by hand is then found by ownership: a server-side apply records which fields are ours, and a field that another
writer changes or removes leaves that record. So a child is applied when it is absent, when its hash differs, or when a
field that we render is not ours any more (`plan_ownership`). Fields that others add beside ours are left alone.

Replicas that go over to an autoscaler keep their value: see `Apply.hand_over`.

When a child is deleted
-----------------------
Only when its controller is this very object (by uid), it carries our managed-by label, and nothing rendered has its
name.

When a child is replaced
------------------------
When a field that can't change in place differs. It is deleted without its pods, and applied anew once it is gone: the
successor adopts them by the same selector (how many, see `plan_adoption`). With another selector nothing is done and a
condition says so.

When a child is taken back
--------------------------
When its owner reference was removed: it has no controller, our labels, and fields that this operator applied.

What is never done
------------------
Taking over an object that somebody else made, writing what would use it (`plan_needs`), giving new pods an account that
is going (`plan_accounts`), and changing anything when the spec is bad: there is no plan then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pd_operator.core.observed import HASH_ANNOTATION, IMMUTABLE, Child, Observed, immutable_fields
from pd_operator.core.observed_kinds import Ref, kind_named
from pd_operator.core.plan_accounts import account_of, for_its_account, has_living_pods
from pd_operator.core.plan_adoption import with_living_replicas
from pd_operator.core.plan_needs import needs
from pd_operator.core.plan_ownership import lost_fields, owns
from pd_operator.core.reasons import Reason
from pd_wire import names

HASH_LENGTH: Final = 16

Manifest = dict[str, Any]


class Why(StrEnum):
    """Why a child is written: a label of the operator's metrics and logs."""

    ABSENT = "absent"
    CHANGED = "changed"
    EDITED = "edited"
    NOT_WANTED = "not-wanted"
    IMMUTABLE = "immutable"


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply.

    Attributes:
        uid: that of the object seen, None when none was: another object is then not touched.
        hand_over: fields that we stop sending and that must keep their value; another manager takes them first.
    """

    ref: Ref
    manifest: Manifest
    why: Why
    uid: str | None
    hand_over: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a child together with what hangs on it; with `orphan`, leave its pods running for its successor."""

    ref: Ref
    uid: str
    why: Why
    orphan: bool = False


Action = Apply | Delete


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that is not brought to what is wanted, and why; becomes a condition of its role."""

    ref: Ref
    role: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order, and what is left undone."""

    actions: tuple[Action, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def plan(
    manifests: Iterable[Mapping[str, Any]], observed: Observed, not_kept: Mapping[str, frozenset[str]] | None = None
) -> Plan:
    """Decide all writes of one reconcile.

    Args:
        manifests: the rendered children in the order in which they are applied.
        observed: what was seen; `children` must hold every object that has the name of a rendered one.
        not_kept: by child uid, the fields that this server does not keep although they were applied
            (see `lost_fields`); without it such a child would be applied in every pass.
    """
    stamped = [stamp(for_its_account(manifest, ref_of(manifest), observed)) for manifest in manifests]
    actions: list[Action] = []
    refusals: list[Refusal] = []
    foreign: set[Ref] = set()
    going: set[Ref] = set()
    coming: set[Ref] = set()
    for manifest in stamped:
        action, refusal = _step(manifest, observed, not_kept or {})
        used = sorted(needs(manifest) & foreign)
        if used and refusal is None:
            action, refusal = None, _uses_foreign(manifest, used)
        account = account_of(manifest)
        if refusal is None and account in going:
            action, refusal = None, _waits_for(manifest, account, Reason.WAITING_FOR_CLEANUP)
        elif refusal is None and account in coming and _has_pods(ref_of(manifest), observed):
            # The next pass knows the new account and rolls the pods of the earlier one.
            action, refusal = None, _waits_for(manifest, account, Reason.CREATING)
        if refusal is not None and refusal.reason is Reason.FOREIGN_OBJECT:
            foreign.add(refusal.ref)
        if refusal is not None and refusal.reason is Reason.WAITING_FOR_CLEANUP:
            going.add(refusal.ref)
        if action is not None and action.why is Why.ABSENT:
            coming.add(action.ref)
        actions += [action] if action else []
        refusals += [refusal] if refusal else []
    wanted = {ref_of(manifest) for manifest in stamped}
    actions += [Delete(child.ref, child.uid, Why.NOT_WANTED) for child in _not_wanted(observed, wanted)]
    return Plan(tuple(actions), tuple(refusals))


def stamp(manifest: Mapping[str, Any]) -> Manifest:
    """The manifest with the hash of itself as annotation. Equal manifests get equal hashes, in any key order."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "annotations"}
    annotations = {
        key: value for key, value in manifest["metadata"].get("annotations", {}).items() if key != HASH_ANNOTATION
    }
    hashed = {**manifest, "metadata": {**metadata, "annotations": annotations}}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    return {**manifest, "metadata": {**metadata, "annotations": {**annotations, HASH_ANNOTATION: digest}}}


def ref_of(manifest: Mapping[str, Any]) -> Ref:
    """Where a manifest's object lives.

    Raises:
        KeyError: for a kind that the operator does not watch.
    """
    metadata = manifest["metadata"]
    return Ref(kind_named(manifest["kind"]).name, metadata["namespace"], metadata["name"])


def role_of(manifest: Mapping[str, Any]) -> str:
    """prefill, decode or router; empty for what belongs to all."""
    return str((manifest["metadata"].get("labels") or {}).get(names.LABEL_ROLE, ""))


def _step(
    manifest: Manifest, observed: Observed, not_kept: Mapping[str, frozenset[str]]
) -> tuple[Action | None, Refusal | None]:
    ref = ref_of(manifest)
    child = observed.children.get(ref)
    if child is None:
        return Apply(ref, dict(with_living_replicas(manifest, ref, observed)), Why.ABSENT, None), None
    blocked = _blocked(manifest, child, observed)
    if blocked is not None:
        return None, blocked
    if child.rendered_hash != manifest["metadata"]["annotations"][HASH_ANNOTATION]:
        changed = changed_immutable_fields(manifest, child)
        if changed:
            return _replace(manifest, child, changed)
        return Apply(ref, manifest, Why.CHANGED, child.uid, _hand_over(manifest, child)), None
    if child.repaired or lost_fields(manifest, child.owned_fields) - not_kept.get(child.uid, frozenset()):
        return Apply(ref, manifest, Why.EDITED, child.uid, _hand_over(manifest, child)), None
    return None, None


def _replace(manifest: Manifest, child: Child, changed: tuple[str, ...]) -> tuple[Action | None, Refusal | None]:
    """Fixed fields differ. A successor with the same selector adopts the pods; with another one it would not."""
    ref, role = child.ref, role_of(manifest)
    fields = ", ".join(f"spec.{name}" for name in changed)
    if "selector" in changed:
        message = (
            f"{fields} of {ref} can't change in place and its pods would be left behind; delete it "
            f"(kubectl delete {ref.kind.lower()} {ref.name}) and it is created anew"
        )
        return None, Refusal(ref, role, Reason.IMMUTABLE_FIELD, message)
    message = f"{ref} is replaced because {fields} can't change in place; its pods run on"
    return Delete(ref, child.uid, Why.IMMUTABLE, orphan=True), Refusal(ref, role, Reason.WAITING_FOR_CLEANUP, message)


def _hand_over(manifest: Manifest, child: Child) -> Manifest | None:
    """The replicas of a role that an autoscaler takes over: a field that its only owner drops falls to its default."""
    if child.workload is None or "replicas" in manifest["spec"] or not owns(child.owned_fields, "spec", "replicas"):
        return None
    metadata = {key: manifest["metadata"][key] for key in ("name", "namespace")}
    frame = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "metadata": metadata}
    return {**frame, "spec": {"replicas": child.workload.wanted}}


def _blocked(manifest: Manifest, child: Child, observed: Observed) -> Refusal | None:
    """Is the place taken by an object that is not this deployment's child?"""
    ref, role = child.ref, role_of(manifest)
    if child.deleting:
        return Refusal(ref, role, Reason.WAITING_FOR_CLEANUP, f"{ref} is being deleted; it will be created again")
    if child.belongs_to(observed.uid) or _lost_owner(child, observed):
        return None
    kind, name, _ = child.owner
    if (kind, name) == (names.KIND, observed.name):
        message = f"{ref} belongs to an earlier {names.KIND} of this name and is not garbage-collected yet"
        return Refusal(ref, role, Reason.WAITING_FOR_CLEANUP, message)
    owner = f"{kind} {name}" if kind else "nobody"
    message = f"{ref} exists and its controller is {owner}; rename or delete it, the operator takes over nothing"
    return Refusal(ref, role, Reason.FOREIGN_OBJECT, message)


def _lost_owner(child: Child, observed: Observed) -> bool:
    """Is it our own work without its owner reference? Labels alone can be copied; our record can't by accident."""
    ours = child.managed and child.deployment == observed.name
    return ours and child.owner == ("", "", "") and bool(child.owned_fields)


def _uses_foreign(manifest: Manifest, used: Sequence[Ref]) -> Refusal:
    """Rights must not go to an account of somebody else, nor pods run as one."""
    ref = ref_of(manifest)
    message = f"{ref} is not written, since it would use {', '.join(map(str, used))}"
    return Refusal(ref, role_of(manifest), Reason.FOREIGN_OBJECT, message)


def _waits_for(manifest: Manifest, account: Ref | None, reason: Reason) -> Refusal:
    """Pods with a token of an account that goes would soon be refused by the API server."""
    ref = ref_of(manifest)
    return Refusal(ref, role_of(manifest), reason, f"{ref} is not written until {account} is made anew")


def _has_pods(ref: Ref, observed: Observed) -> bool:
    return ref in observed.children or has_living_pods(ref, observed)


def changed_immutable_fields(manifest: Mapping[str, Any], child: Child) -> tuple[str, ...]:
    """The fixed fields that the manifest would change. A field that the manifest leaves out keeps its value."""
    if child.workload is None:
        return ()
    wanted = immutable_fields(child.ref.kind, manifest)
    live = json.loads(child.workload.immutable)
    return tuple(
        name for name in IMMUTABLE[child.ref.kind] if name in wanted and not _covers(live.get(name), wanted[name])
    )


def _covers(live: Any, wanted: Any) -> bool:
    """Does the live value agree with all that is wanted? Servers add defaults inside, so more is no difference."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(_covers(live.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        same_length = isinstance(live, Sequence) and not isinstance(live, str) and len(live) == len(wanted)
        return same_length and all(_covers(mine, theirs) for mine, theirs in zip(live, wanted, strict=True))
    return bool(live == wanted)


def _not_wanted(observed: Observed, wanted: set[Ref]) -> list[Child]:
    return [child for child in observed.mine() if child.managed and not child.deleting and child.ref not in wanted]
