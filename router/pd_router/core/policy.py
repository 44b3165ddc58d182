"""May this handle be sent with this turn? The rules of DESIGN §5 in the order of the funnel, each with its reason.

Separate from store and placement: they say what there is, this module says what is allowed. Pure: the decision is a
value over a request, an entry, a picture of the fleet and the time of dispatch. A rule added here is a row in its
test's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pd_router.core.linking import HISTORY, kind_of
from pd_router.core.placement import Engine
from pd_router.core.request import Prepared
from pd_router.core.store import Entry, Found
from pd_wire.handle import decoder_handle_fault


class Drop(StrEnum):
    """Why a turn is recomputed; the value is a metric label and never changes. In the order of the funnel."""

    DISABLED = "disabled"
    NO_TENANT = "no_tenant"
    NOT_LINKABLE = "not_linkable"
    NOT_FOUND = "not_found"
    EXPIRED = "expired"
    HOLDER_GONE = "holder_gone"
    HOLDER_RESTARTED = "holder_restarted"
    HOLDER_DRAINING = "holder_draining"
    OTHER_GENERATION = "other_generation"
    FOREIGN_HOST = "foreign_host"
    UNPROVEN = "unproven"
    """No proof, and the history does not stand in for one."""
    SEVERAL_GROUPS = "several_groups"
    """No proof, and more than one KV group: nothing could be trimmed."""
    BELOW_THRESHOLD = "below_threshold"
    REFUSED_BY_PREFILL = "refused_by_prefill"
    """P's report: its own tokens did not match the proof."""


_DROPPED_AS_DEAD = frozenset(
    {
        Drop.EXPIRED,
        Drop.HOLDER_GONE,
        Drop.HOLDER_RESTARTED,
        Drop.HOLDER_DRAINING,
        Drop.OTHER_GENERATION,
        Drop.FOREIGN_HOST,
    }
)


class NotStored(StrEnum):
    """Why a decode engine's handle is not kept; a metric label."""

    NO_HANDLE = "no_handle"
    MALFORMED = "malformed"
    FOREIGN_HOST = "foreign_host"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with what was found. A dropped entry stays: its holder's own prefix cache is still worth a visit."""

    attach: bool
    entry: Entry | None
    drop: Drop | None
    linked_by: str
    """`history`, the id field, or "" when nothing was found."""

    @classmethod
    def recompute(cls, drop: Drop | None = None) -> Decision:
        """Nothing to attach and nobody to prefer."""
        return cls(False, None, drop, "")

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of the funnel that the handle passed, after `eligible` and before `attached`."""
        if self.entry is None:
            return ()
        if self.drop in _DROPPED_AS_DEAD:
            return ("found",)
        return ("found", "live")


def decide(
    prepared: Prepared,
    found: Found | None,
    *,
    now: float,
    engines: Sequence[Engine],
    hosts: AbstractSet[str],
    ttl: float,
    threshold: int,
    local_tokens: int = 0,
    trust_history: bool = True,
) -> Decision:
    """Judge a taken entry at the moment of dispatch. Whatever the answer, the entry is spent.

    Args:
        now: monotonic seconds, the clock of `Entry.arrived`.
        engines: decode engines.
        hosts: addresses that belong to live decode engines.
        ttl: the router's, in seconds after the handle's arrival.
        threshold: tokens below which the engine would skip the read and free the blocks all the same (HL-13).
        local_tokens: prompt tokens that P is believed to have in its own cache.
        trust_history: whether an exact history may stand in for a missing proof. Equal text is nearly always equal
            tokens, not always: a reply can be tokenised in more than one way, and a template can move what it likes.
    """
    if prepared.link_fault is not None:
        return Decision.recompute(Drop.NOT_LINKABLE)
    if found is None:
        return Decision.recompute(Drop.NOT_FOUND)
    entry, key = found
    linked_by = kind_of(key)
    drop = _not_live(entry, now, engines, hosts, ttl) or _not_proven(prepared, entry, linked_by, trust_history)
    if drop is None and entry.remote_tokens - local_tokens < threshold:
        drop = Drop.BELOW_THRESHOLD
    return Decision(drop is None, entry, drop, linked_by)


def fresh(entry: Entry, now: float, ttl: float) -> bool:
    """Whether D still holds the blocks, by the router's own clock and its shorter TTL (HL-04)."""
    return now - entry.arrived < ttl


def judge_handle(handle: Mapping[str, Any] | None, hosts: AbstractSet[str]) -> NotStored | None:
    """Why a handle that an engine returned is not worth keeping, or None (HL-24, IS-01)."""
    if handle is None:
        return NotStored.NO_HANDLE
    if decoder_handle_fault(handle) is not None:
        return NotStored.MALFORMED
    if handle["remote_host"] not in hosts:
        return NotStored.FOREIGN_HOST
    return None


def _not_live(entry: Entry, now: float, engines: Sequence[Engine], hosts: AbstractSet[str], ttl: float) -> Drop | None:
    if not fresh(entry, now, ttl):
        return Drop.EXPIRED
    holder = next((engine for engine in engines if engine.key == entry.holder), None)
    if holder is not None and holder.incarnation != entry.incarnation:
        return Drop.HOLDER_RESTARTED
    if holder is None or not holder.ready:
        return Drop.HOLDER_GONE
    if holder.draining:
        return Drop.HOLDER_DRAINING
    if holder.generation != entry.generation:
        return Drop.OTHER_GENERATION
    if entry.remote_host not in hosts:
        return Drop.FOREIGN_HOST
    return None


def _not_proven(prepared: Prepared, entry: Entry, linked_by: str, trust_history: bool) -> Drop | None:
    if entry.proven:
        return None
    if not trust_history or linked_by != HISTORY or entry.inexact is not None or prepared.inexact is not None:
        return Drop.UNPROVEN
    return Drop.SEVERAL_GROUPS if entry.groups > 1 else None
