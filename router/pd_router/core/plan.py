"""Who serves one attempt of a turn: the decode engine, the prefill engine or none, the rank, and what becomes of the
handle, as one value with its reasons.

Separate from the rules that it puts together (`placement`, `policy`) and from the turn that carries it out, so that a
whole decision can be made in a test and shown in `/debug/explain`. Pure: a function of the engines, their loads and the
pairs in quarantine at one moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_router.core.placement import (
    NO_PAIRS,
    Blocked,
    Choice,
    Engine,
    Loads,
    choose_decode,
    choose_prefill,
    choose_rank,
    shunned,
)
from pd_router.core.policy import Decision, Drop, bypass_obstacle, without_handle
from pd_router.core.request import Prepared
from pd_router.core.settings import Bypass
from pd_router.core.store import Entry


@dataclass(frozen=True, slots=True)
class View:
    """What one attempt decides on. `prefills` may be empty for a turn of one leg."""

    decodes: Sequence[Engine]
    prefills: Sequence[Engine]
    loads: Loads
    no_handoff: Blocked = NO_PAIRS
    no_pull: Blocked = NO_PAIRS
    avoid: Collection[str] = ()
    """Engines that failed this turn already: taken only when there are no others."""
    avoid_pairs: Blocked = NO_PAIRS
    """Pairs whose hand-off failed this turn already."""
    ranks: Mapping[str, Collection[int]] | None = None
    """Data-parallel ranks that engines are known to have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision about one attempt."""

    decision: Decision
    decode: Choice
    prefill: Choice | None
    """None: decode serves the turn alone."""
    rank: int | None = None
    """The data-parallel rank that decode's leg is pinned to."""
    two_legs: str = ""
    """Why decode does not serve the turn alone, where that was a question."""

    @property
    def bypass(self) -> bool:
        """Whether prefill is left out because decode has nearly all of the prompt."""
        return self.decision.drop is Drop.BYPASSED

    def explain(self) -> dict[str, Any]:
        """For `/debug/explain`: engines, reasons, and who was passed over why. Nothing secret."""
        shown: dict[str, Any] = {"decode": _key(self.decode), "decode_reason": self.decode.reason}
        if self.decode.rejected:
            shown["decode_rejected"] = dict(self.decode.rejected)
        if self.rank is not None:
            shown["rank"] = self.rank
        if self.prefill is not None:
            shown["prefill"] = _key(self.prefill)
            shown["prefill_reason"] = self.prefill.reason
            if self.prefill.rejected:
                shown["prefill_rejected"] = dict(self.prefill.rejected)
        entry = self.decision.entry
        if entry is not None:
            shown["found_by"] = self.decision.linked_by
            shown["holder"] = entry.holder
            shown["holder_tokens"] = entry.remote_tokens
        if self.two_legs:
            shown["two_legs"] = self.two_legs
        return shown


def plan(prepared: Prepared, decision: Decision, view: View, *, overload: int, bypass: Bypass) -> Plan:
    """Choose the engines of one attempt. Changes nothing.

    Args:
        decision: about the handle that was found; the plan's may differ from it.
        overload: turns that the holder, or its rank, may have more than the least loaded.
    """
    entry = decision.entry
    loads = view.loads
    prefills = _untried(view.prefills, view.avoid)
    no_handoff = view.no_handoff | view.avoid_pairs if view.avoid_pairs else view.no_handoff
    decode = choose_decode(
        _untried(view.decodes, view.avoid),
        loads,
        entry.holder if entry is not None else None,
        overload,
        frozenset([engine.generation for engine in prefills if engine.takes_work]) if prepared.two_legs else None,
        shunned(view.decodes, prefills, no_handoff) if prepared.two_legs else frozenset(),
    )
    if decode.engine is None:
        return Plan(decision, decode, None)
    key = decode.engine.key
    rank = None
    if entry is not None and entry.rank is not None and (key, decode.engine.incarnation) == _holder(decision):
        rank = choose_rank(key, entry.rank, (view.ranks or {}).get(key, ()), loads, overload)
    if not prepared.two_legs:
        return Plan(decision, decode, None, rank)
    obstacle = bypass_obstacle(prepared, decision, key, loads.turns(key), bypass)
    if obstacle is None:
        return Plan(without_handle(decision, Drop.BYPASSED), decode, None, rank)
    no_pull: frozenset[str] = frozenset()
    if decision.attach and entry is not None:
        no_pull = frozenset([prefill for prefill, holder in view.no_pull if holder == entry.holder])
    unable = frozenset([prefill for prefill, other in no_handoff if other == key])
    prefill = choose_prefill(prefills, loads, decode.engine.generation, unable, no_pull)
    if prefill.engine is not None and prefill.engine.key in no_pull:
        decision = without_handle(decision, Drop.PAIR_QUARANTINED)
    return Plan(decision, decode, prefill, rank, obstacle if bypass.tokens else "")


def to_compute(prepared: Prepared, sent: Entry | None) -> int:
    """Tokens that prefill is expected to compute, by estimate: what it can read of `sent` is not among them."""
    if sent is None:
        return prepared.prompt_tokens_estimate
    return max(prepared.new_tokens_estimate, prepared.prompt_tokens_estimate - sent.remote_tokens)


def _holder(decision: Decision) -> tuple[str, str] | None:
    return (decision.entry.holder, decision.entry.incarnation) if decision.entry is not None else None


def _key(choice: Choice) -> str | None:
    return choice.engine.key if choice.engine is not None else None


def _untried(engines: Sequence[Engine], avoid: Collection[str]) -> Sequence[Engine]:
    """Leave out engines that failed this turn, unless there are no others."""
    if not avoid:
        return engines
    rest = [engine for engine in engines if engine.key not in avoid]
    return rest if any(engine.takes_work for engine in rest) else engines
