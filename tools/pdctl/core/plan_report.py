"""A memory plan as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pdctl.core.memory_plan import Advice, Capacity
from pdctl.core.retention_modes import Mode
from pdctl.core.retention_report import percent
from pdctl.core.retention_simulation import Outcome

FORMAT: Final = "pdctl-plan/1"


class Retained(NamedTuple):
    """Blocks of finished turns on a running engine. Readable ones are free for others, leased ones on demand."""

    leased: int
    pinned: int
    readable: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is said. ``clients`` are per engine; ``sources`` say where the pool's size comes from."""

    name: str
    capacity: Capacity
    clients: int
    engines: int
    kv_usage: float | None
    retained: Retained | None
    sources: tuple[str, ...]
    modes: tuple[Mode, ...]
    outcomes: tuple[Outcome, ...]
    advice: Advice


def plan_text(plan: Plan) -> str:
    """Several lines."""
    capacity = plan.capacity
    lines = [
        f"{plan.name}: {plan.engines} decode engine(s), {plan.clients:,} conversations on each, "
        f"{capacity.conversation_tokens:,} tokens per conversation",
        *(f"  {source}" for source in plan.sources),
        f"  pool: {capacity.pool_tokens:,} tokens ({capacity.pool_blocks:,} blocks of {capacity.block_tokens}), "
        f"room for {capacity.conversations:,} idle conversations",
    ]
    if plan.kv_usage is not None:
        lines.append(f"  in use at this moment: {percent(plan.kv_usage)}{_retained(plan)}")
    lines += ["", *_table(plan), "", f"Recommended: {plan.advice.mode}"]
    return "\n".join([*lines, *(f"  - {reason}" for reason in plan.advice.reasons)])


def _retained(plan: Plan) -> str:
    if plan.retained is None:
        return ""
    kept = ((plan.retained.leased, "leased to"), (plan.retained.pinned, "pinned for"))
    held = [f"{percent(blocks / plan.capacity.pool_blocks)} {how} finished turns" for blocks, how in kept if blocks]
    free = f"{percent(plan.retained.readable / plan.capacity.pool_blocks)} of the pool is free and can still be read"
    return f"{', of which ' if held else ''}{' and '.join(held)}; {free}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """For scripts."""
    capacity = plan.capacity
    return {
        "format": FORMAT,
        "name": plan.name,
        "decode_engines": plan.engines,
        "conversations_per_engine": plan.clients,
        "tokens_per_conversation": capacity.conversation_tokens,
        "pool_tokens": capacity.pool_tokens,
        "pool_blocks": capacity.pool_blocks,
        "block_tokens": capacity.block_tokens,
        "idle_conversations_that_fit": capacity.conversations,
        "kv_usage": plan.kv_usage,
        "retained_blocks": None if plan.retained is None else plan.retained._asdict(),
        "sources": list(plan.sources),
        "retention": [
            {
                "retention": mode.name,
                "readable_conversations": capacity.conversations,
                "held_conversations": held_conversations(mode, capacity),
                "unread_turns_admitted_per_minute": unread_per_minute(mode, capacity),
                "token_hit_rate": out.token_hit_rate,
                "turn_hit_rate": out.turn_hit_rate,
                "turns_that_waited": out.waited,
                "wait_p99_seconds": out.wait_p99_s,
            }
            for mode, out in zip(plan.modes, plan.outcomes, strict=True)
        ],
        "recommended": plan.advice.mode,
        "reasons": list(plan.advice.reasons),
    }


def held_conversations(mode: Mode, capacity: Capacity) -> int:
    """That can be kept from being overwritten at one time."""
    return int(capacity.pool_blocks * mode.share) // capacity.blocks_per_conversation if mode.hold_s else 0


def unread_per_minute(mode: Mode, capacity: Capacity) -> float | None:
    """Turns that nobody continues and that can be admitted; None: memory that is held is given up for them."""
    if not mode.hold_s or mode.reclaim:
        return None
    return capacity.conversations / mode.hold_s * 60


def _table(plan: Plan) -> Sequence[str]:
    rows = [
        ("retention", "held at most", "admits unread", "tokens read back", "turns that waited", "wait p99"),
    ]
    for mode, out in zip(plan.modes, plan.outcomes, strict=True):
        unread = unread_per_minute(mode, plan.capacity)
        rows.append(
            (
                mode.name,
                f"{held_conversations(mode, plan.capacity):,}",
                "no limit" if unread is None else f"{unread:,.1f}/min",
                percent(out.token_hit_rate),
                f"{out.waited:,} of {out.arrived:,}",
                f"{out.wait_p99_s:,.1f} s",
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
