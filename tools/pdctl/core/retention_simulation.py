"""A trace of turns against one decode engine's KV pool: what is read back, what is held for it, and who waits.

Everything is counted in whole blocks and happens at events, so a run is exact and the same every time. A turn's read by
P happens when it arrives; its decode gets all blocks of prompt and answer at once, in the order of arrival, and keeps
them for as long as its answer takes. Prefill takes no time here, and P and the network are never short.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pdctl.core.coding_agents import DECODE_TOKENS_PER_S
from pdctl.core.kv_pool import Pool
from pdctl.core.kv_trace import Client, Turn, reusable_tokens
from pdctl.core.retention_modes import Mode

BLOCK_TOKENS: Final = 16
"""vLLM's choice on GPUs."""
MIN_READ_TOKENS: Final = 64
"""`kvTransfer.recomputeThresholdTokens`: P computes fewer than these."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What is the same in every run. ``seconds``: nothing after this time counts."""

    seconds: float
    block_tokens: int = BLOCK_TOKENS
    decode_tokens_per_s: float = DECODE_TOKENS_PER_S
    min_read_tokens: int = MIN_READ_TOKENS

    def blocks(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(slots=True)
class Outcome:
    """Sums of one run. ``waits_s``: of each turn that arrived, how long decode kept it waiting for blocks."""

    mode: str
    pool_blocks: int
    seconds: float
    arrived: int = 0
    finished: int = 0
    continued: int = 0
    """Turns of which an earlier one could have left something."""
    hits: int = 0
    """Of these, the ones that read something back."""
    reusable_tokens: int = 0
    reused_tokens: int = 0
    held_block_s: float = 0.0
    refused: int = 0
    """Turns whose blocks were not held, for want of room."""
    waits_s: list[float] = field(default_factory=list)

    @property
    def turn_hit_rate(self) -> float | None:
        """Of the turns that continue something."""
        return self.hits / self.continued if self.continued else None

    @property
    def token_hit_rate(self) -> float | None:
        """Of the tokens that an earlier turn had computed."""
        return self.reused_tokens / self.reusable_tokens if self.reusable_tokens else None

    @property
    def held_block_s_per_token(self) -> float | None:
        """What a token read back costs in memory that is kept idle for it."""
        return self.held_block_s / self.reused_tokens if self.reused_tokens else None

    @property
    def held_share(self) -> float:
        """Of the pool, on average over time."""
        return self.held_block_s / (self.pool_blocks * self.seconds)

    @property
    def waited(self) -> int:
        """Turns that had to wait for blocks."""
        return sum(wait > 0 for wait in self.waits_s)

    @property
    def wait_p99_s(self) -> float:
        """Of all turns; those still waiting at the end count with what they have waited."""
        ordered = sorted(self.waits_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


def largest_turn_blocks(clients: Sequence[Client], engine: Engine) -> int:
    """The least pool with which every turn can run alone."""
    return max(engine.blocks(turn.tokens) for turns in clients for turn in turns)


def working_set_blocks(clients: Sequence[Client], engine: Engine) -> float:
    """Blocks of the latest turns of all clients that come again, on average over time, were there no queue.

    So many are needed to read everything back. What nobody continues counts while it runs.
    """
    block_s = 0.0
    for turns in clients:
        end = 0.0
        for at, turn in enumerate(turns):
            start = max(end + turn.wait_s, turn.not_before_s)
            end = start + turn.reply_tokens / engine.decode_tokens_per_s
            following = turns[at + 1] if at + 1 < len(turns) else None
            until = max(end + following.wait_s, following.not_before_s) if following else end
            block_s += engine.blocks(turn.tokens) * max(0.0, min(until, engine.seconds) - start)
    return block_s / engine.seconds


def unhindered_end(clients: Sequence[Client], decode_tokens_per_s: float) -> float:
    """When the last answer would have ended, were there no queue, in seconds."""
    last = 0.0
    for turns in clients:
        end = 0.0
        for turn in turns:
            end = max(end + turn.wait_s, turn.not_before_s) + turn.reply_tokens / decode_tokens_per_s
        last = max(last, end)
    return last


def simulate(clients: Sequence[Client], mode: Mode, pool_blocks: int, engine: Engine) -> Outcome:
    """Play a trace.

    Raises:
        ValueError: a turn is larger than the pool.
    """
    largest = largest_turn_blocks(clients, engine)
    if largest > pool_blocks:
        raise ValueError(f"the largest turn needs {largest:,} blocks; the pool has {pool_blocks:,}")
    return _Run(clients, mode, Pool(pool_blocks), engine).play()


@dataclass(slots=True)
class _State:
    """A client: which turn is next, what the one before it left, and since when."""

    turns: Client
    next: int = 0
    before: Turn | None = None
    mark: int = -1
    ended_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    state: _State
    turn: Turn
    shared_blocks: int
    since_s: float


class _Run:
    def __init__(self, clients: Sequence[Client], mode: Mode, pool: Pool, engine: Engine) -> None:
        self._mode, self._pool, self._engine = mode, pool, engine
        self._outcome = Outcome(mode.name, pool.size, engine.seconds)
        self._queue: deque[_Waiting] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._marks = 0
        self._counted = 0
        self._now = 0.0
        for turns in clients:
            state = _State(turns)
            self._at(turns[0].not_before_s + turns[0].wait_s, partial(self._arrive, state))

    def play(self) -> Outcome:
        while self._events and self._events[0][0] <= self._engine.seconds:
            time, _, happen = heapq.heappop(self._events)
            self._pass(time)
            happen()
            self._admit()
        self._pass(self._engine.seconds)
        self._outcome.waits_s += [self._now - waiting.since_s for waiting in self._queue]
        return self._outcome

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        # The count keeps the order of events at the same time.
        self._counted += 1
        heapq.heappush(self._events, (time, self._counted, happen))

    def _pass(self, time: float) -> None:
        self._outcome.held_block_s += self._pool.held_blocks * (time - self._now)
        self._now = time

    def _arrive(self, state: _State) -> None:
        turn, mode, engine = state.turns[state.next], self._mode, self._engine
        shared = reusable_tokens(state.before, turn)
        read = min(self._pool.intact(state.mark), shared // engine.block_tokens) * engine.block_tokens
        if mode.readable_s is not None and (
            self._now - state.ended_s > mode.readable_s or not self._pool.is_held(state.mark)
        ):
            read = 0
        if read < engine.min_read_tokens:
            read = 0
        outcome = self._outcome
        outcome.arrived += 1
        if shared >= engine.min_read_tokens:
            outcome.continued += 1
            outcome.hits += read > 0
            outcome.reusable_tokens += shared
            outcome.reused_tokens += read
        if mode.spent and read:
            self._pool.release(state.mark)
        self._queue.append(_Waiting(state, turn, shared // engine.block_tokens, self._now))

    def _admit(self) -> None:
        """First come, first served: a turn that doesn't fit keeps those behind it waiting, as in vLLM."""
        while self._queue:
            first = self._queue[0]
            state, turn = first.state, first.turn
            need, own = self._engine.blocks(turn.tokens), first.shared_blocks
            # Nothing shared: what the earlier turn left is not this one's, and is held until its time is over.
            mark = state.mark if own else -1
            if not self._pool.fits(need, mark, own, reclaim=self._mode.reclaim):
                return
            self._queue.popleft()
            self._pool.take(need, mark, own, self._now)
            self._outcome.waits_s.append(self._now - first.since_s)
            seconds = turn.reply_tokens / self._engine.decode_tokens_per_s
            self._at(self._now + seconds, partial(self._finish, state, turn))

    def _finish(self, state: _State, turn: Turn) -> None:
        blocks = self._engine.blocks(turn.tokens)
        state.next += 1
        following = state.turns[state.next] if state.next < len(state.turns) else None
        self._marks += 1
        mark = self._marks
        self._pool.finish(blocks, mark)
        tools = following is not None and following.after_tool
        held = self._mode.hold(blocks, self._now, following.wait_s if following else None, tools=tools)
        if held is not None:
            if self._pool.make_room(blocks, self._mode.share * self._pool.size, self._now):
                self._pool.hold(mark, held)
                self._at(held.until_s, partial(self._pool.release, mark))
            else:
                self._outcome.refused += 1
        state.before, state.mark, state.ended_s = turn, mark, self._now
        self._outcome.finished += 1
        if following is not None:
            next_s = max(self._now + following.wait_s, following.not_before_s)
            self._at(next_s, partial(self._arrive, state))
