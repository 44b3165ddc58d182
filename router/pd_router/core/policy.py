"""May this handle be sent with this turn? The rules of DESIGN §5 in the order of the funnel, each with its reason.

Separate from store and placement: they say what there is, this module says what is allowed. Pure: the decision is a
value over a request, an entry, a picture of the fleet and the time of dispatch. A rule added here is a row in its
test's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pd_router.core.linking import HISTORY, kind_of
from pd_router.core.placement import Engine
from pd_router.core.request import Prepared
from pd_router.core.settings import Bypass
from pd_router.core.store import Entry, Found
from pd_wire import names
from pd_wire.handle import decoder_handle_fault

_MAX_TOLD: Final = 200
"""Characters of an engine's sentence that are shown."""


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
    HOLDER_FAILING = "holder_failing"
    """Its breaker is open: what it holds is probably as little use as what it is asked."""
    OTHER_GENERATION = "other_generation"
    FOREIGN_HOST = "foreign_host"
    UNPROVEN = "unproven"
    """No proof, and the history does not stand in for one."""
    SEVERAL_GROUPS = "several_groups"
    """No proof, and more than one KV group: nothing could be trimmed."""
    BELOW_THRESHOLD = "below_threshold"
    PAIR_QUARANTINED = "pair_quarantined"
    """No prefill engine that could read the holder's blocks: each such pair failed too often of late (EL-04)."""
    BYPASSED = "bypassed"
    """Decode has nearly all of the prompt and serves the turn alone. The handle stays for the next one."""
    REFUSED_BY_PREFILL = "refused_by_prefill"
    """P's report: its own tokens did not match the proof."""


_DROPPED_AS_DEAD = frozenset(
    {
        Drop.EXPIRED,
        Drop.HOLDER_GONE,
        Drop.HOLDER_RESTARTED,
        Drop.HOLDER_DRAINING,
        Drop.HOLDER_FAILING,
        Drop.OTHER_GENERATION,
        Drop.FOREIGN_HOST,
    }
)


class NotStored(StrEnum):
    """Why a decode engine's handle is not kept; a metric label."""

    NO_HANDLE = "no_handle"
    MALFORMED = "malformed"
    FOREIGN_HOST = "foreign_host"
    TENANT_LIMIT = "tenant_limit"
    """The tenant retains as much as it may."""
    STORE_UNAVAILABLE = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with what was found. A dropped entry stays: its holder's own prefix cache is still worth a visit."""

    attach: bool
    entry: Entry | None
    drop: Drop | None
    linked_by: str
    """`history`, the id field, or "" when nothing was found."""
    newest: bool = False
    """Linked by the whole history up to the last answer: nothing but new messages comes after what D has."""

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
    shared_ttl: float,
    threshold: int,
    local_tokens: int = 0,
    trust_history: bool = True,
    newest_keys: Sequence[bytes] = (),
) -> Decision:
    """Judge a taken entry at the moment of dispatch. Whatever the answer, an entry that is not shared is spent.

    Args:
        now: monotonic seconds, the clock of `Entry.arrived`.
        engines: decode engines.
        hosts: addresses that belong to live decode engines.
        ttl: the router's, in seconds after the handle's arrival.
        shared_ttl: the same for a handle that is not spent by a send.
        threshold: tokens below which the engine would skip the read and free the blocks all the same (HL-13).
        local_tokens: prompt tokens that P is believed to have in its own cache.
        trust_history: whether an exact history may stand in for a missing proof. Equal text is nearly always equal
            tokens, not always: a reply can be tokenised in more than one way, and a template can move what it likes.
        newest_keys: those that stand for the whole history up to the last answer.
    """
    if prepared.link_fault is not None:
        return Decision.recompute(Drop.NOT_LINKABLE)
    if found is None:
        return Decision.recompute(Drop.NOT_FOUND)
    entry, key = found
    linked_by = kind_of(key)
    newest = linked_by == HISTORY and key in newest_keys
    drop = _not_live(entry, now, engines, hosts, shared_ttl if entry.shared else ttl) or _not_proven(
        prepared, entry, linked_by, trust_history
    )
    if drop is None and entry.remote_tokens - local_tokens < threshold:
        drop = Drop.BELOW_THRESHOLD
    return Decision(drop is None, entry, drop, linked_by, newest)


def bypass_obstacle(prepared: Prepared, decision: Decision, decode: str, turns: int, limits: Bypass) -> str | None:
    """Why a turn takes two legs, or None when the holder itself should serve it alone.

    The holder's prefix cache has what it retained, and its own token ids decide how much of that is this prompt, so the
    answer is right in any case; what is judged here is whether it would be quick. Such a turn leaves no handle, because
    vLLM keeps no blocks for a request without params and never frees those of one with empty params (HL-09, HL-10).
    Nor does it need the old handle: that one stays unspent and leads the next turn to blocks that are a prefix still.

    Args:
        decode: key of the engine that was chosen.
        turns: those that it has now.
    """
    entry = decision.entry
    if limits.tokens < 1:
        return "off"
    if not decision.attach or entry is None:
        return "nothing that decode is known to have"
    if decode != entry.holder:
        return "the holder was not chosen"
    if not decision.newest:
        return "the history does not end in what decode has"
    inexact = entry.inexact or prepared.inexact
    if inexact is not None:
        return f"not the very tokens that decode has: {inexact}"
    new = prepared.new_tokens_estimate + entry.behind
    if new > limits.tokens:
        return f"{new} new tokens"
    if new > limits.share * (entry.remote_tokens + new):
        return f"{new} new tokens of {entry.remote_tokens + new}"
    return f"decode has {turns} turns" if turns > limits.turns else None


def newest_keys(prepared: Prepared, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Of the keys of `Keyring.lookup_keys`, those of the prompt itself and of the history up to the last answer."""
    ends_in_answer = prepared.history[:1] == (prepared.prompt_digest(),)
    return keys[: 1 if ends_in_answer else 2]


def without_handle(decision: Decision, drop: Drop) -> Decision:
    """The same decision, except that the handle is not sent."""
    return replace(decision, attach=False, drop=drop)


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
    if holder.failing:
        return Drop.HOLDER_FAILING
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


def told_retention(handle: Mapping[str, Any]) -> tuple[str, str]:
    """What a judged handle says of its engine: the mode, "" for a stock engine, and why it isn't the one asked for."""
    mode, fallback = handle.get(names.MODE_KEY), handle.get(names.FALLBACK_KEY)
    return (mode if isinstance(mode, str) else "", fallback[:_MAX_TOLD] if isinstance(fallback, str) else "")
