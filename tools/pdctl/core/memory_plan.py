"""How many conversations' KV one decode engine can keep readable, and which way of retaining it fits.

Capacity is arithmetic. How often the next turn finds its KV is simulated, since it depends on when the next turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdctl.core.kv_trace import Client, Turn
from pdctl.core.retention_modes import Mode
from pdctl.core.retention_report import percent
from pdctl.core.retention_simulation import Engine, Outcome, largest_turn_blocks, simulate, working_set_blocks

GIB: Final = 1 << 30
WAIT_LIMIT_S: Final = 1.0
"""A turn in a hundred that waits longer than this for memory is felt."""
SAME: Final = 0.01
"""Shares of tokens that differ by less are alike, and the simpler way is better."""
GOOD: Final = 0.9


class PlanError(ValueError):
    """A plan that can't be made, in one sentence that says what to give."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One engine's GPUs. ``weights_gib`` is of the whole model, the rest of each GPU."""

    gpu_gib: float
    utilization: float
    weights_gib: float
    other_gib: float
    tensor_parallel: int

    def pool_bytes_per_gpu(self) -> float:
        """What is left for KV on each GPU.

        Raises:
            PlanError: nothing is.
        """
        allowed = self.gpu_gib * self.utilization
        left = allowed - self.weights_gib / self.tensor_parallel - self.other_gib
        if left <= 0:
            raise PlanError(
                f"no memory is left for KV: of {allowed:.1f} GiB per GPU the weights take "
                f"{self.weights_gib / self.tensor_parallel:.1f} and the rest {self.other_gib:.1f}"
            )
        return left * GIB


@dataclass(frozen=True, slots=True)
class Capacity:
    """One engine's pool and conversations of equal length in it."""

    pool_blocks: int
    block_tokens: int
    conversation_tokens: int

    @property
    def pool_tokens(self) -> int:
        """As vLLM's log says it."""
        return self.pool_blocks * self.block_tokens

    @property
    def blocks_per_conversation(self) -> int:
        """Rounded up to whole blocks."""
        return -(-self.conversation_tokens // self.block_tokens)

    @property
    def conversations(self) -> int:
        """That fit into the pool when nothing runs; also what Pinned admits per TTL, where none of them is read."""
        return self.pool_blocks // self.blocks_per_conversation


@dataclass(frozen=True, slots=True)
class Advice:
    """A mode, or None where none does; reasons are sentences."""

    mode: str
    reasons: tuple[str, ...]


def fit_trace(
    clients: Sequence[Client], conversations: int, tokens: float, engine: Engine
) -> tuple[list[Client], Engine]:
    """The same turns at the same times, lengthened until the mean of so many conversations has so many tokens.

    Answers get longer by the same factor, and so does the speed at which they come.
    """
    factor = tokens * conversations / (working_set_blocks(clients, engine) * engine.block_tokens)
    stretched: list[Client] = [[_stretched(turn, factor) for turn in turns] for turns in clients]
    return stretched, replace(engine, decode_tokens_per_s=engine.decode_tokens_per_s * factor)


def simulate_modes(clients: Sequence[Client], modes: Sequence[Mode], pool_blocks: int, engine: Engine) -> list[Outcome]:
    """One run per mode.

    Raises:
        PlanError: the pool can't take the largest turn.
    """
    largest = largest_turn_blocks(clients, engine)
    if largest > pool_blocks:
        tokens = engine.block_tokens
        raise PlanError(
            f"the longest turn has {largest * tokens:,} tokens, and the pool (that part of it which is simulated) "
            f"{pool_blocks * tokens:,}: far more conversations than it can keep"
        )
    return [simulate(clients, mode, pool_blocks, engine) for mode in modes]


def advise(outcomes: Sequence[Outcome], needed_blocks: float) -> Advice:
    """Choose among runs with one pool, the simplest mode first.

    Args:
        outcomes: at least one, in the order of preference among equals.
        needed_blocks: the working set.
    """
    quick = [one for one in outcomes if one.wait_p99_s <= WAIT_LIMIT_S]
    most = max((one.token_hit_rate or 0.0) for one in quick or outcomes)
    fitting = [one for one in quick or outcomes if (one.token_hit_rate or 0.0) >= most - SAME]
    # Where all make turns wait, the shortest wait counts.
    best = fitting[0] if quick else min(outcomes, key=lambda one: one.wait_p99_s)
    reasons = [f"reads back {percent(best.token_hit_rate)} of what earlier turns computed"]
    if best.wait_p99_s > WAIT_LIMIT_S:
        reasons.append(f"every way makes turns wait for memory (this one {_seconds(best.wait_p99_s)} at p99)")
    else:
        reasons.append(
            "no turn waits for memory" if not best.waited else f"waits of {_seconds(best.wait_p99_s)} at p99"
        )
    for one in outcomes:
        if one.wait_p99_s > max(WAIT_LIMIT_S, best.wait_p99_s):
            reasons.append(f"{one.mode} would let turns wait {_seconds(one.wait_p99_s)} at p99")
        elif (one.token_hit_rate or 0.0) < most - SAME:
            reasons.append(f"{one.mode} would read back {percent(one.token_hit_rate)}")
    if (best.token_hit_rate or 0.0) < GOOD or best.wait_p99_s > WAIT_LIMIT_S:
        engines = -(-needed_blocks // best.pool_blocks)
        reasons.append(f"memory is short: {engines:.0f} such engines would keep every conversation")
    return Advice(best.mode, tuple(reasons))


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"


def _stretched(turn: Turn, factor: float) -> Turn:
    return replace(
        turn,
        prompt_tokens=max(1, round(turn.prompt_tokens * factor)),
        reply_tokens=max(1, round(turn.reply_tokens * factor)),
    )
