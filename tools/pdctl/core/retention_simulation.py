"""A trace of turns against one decode engine's KV pool: what is read back, what is held for it, and who waits.

Everything is counted in whole blocks and happens at events, so a run is exact and the same every time. A turn's read by
P happens when it arrives; its decode gets all blocks of prompt and answer at once, in the order of arrival, and keeps
them for as long as its answer takes. Prefill takes no time here, and P and the network are never short.

With leases the router's words are events, too: a lease is prolonged while tools run and while a turn goes on from it,
and ends with that turn's own. What becomes of them in decode is the pool's.
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
from pdctl.core.retention_modes import FIRST_WORD_S, Mode

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
    partly: int = 0
    """Turns of which only the leading blocks were."""
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
    return _Run(clients, mode, pool_blocks, engine).play()


@dataclass(slots=True)
class _State:
    """A client: which turn is next, what the one before it left, and since when."""

    turns: Client
    next: int = 0
    before: Turn | None = None
    mark: int = -1
    ended_s: float = 0.0
    shared_blocks: int = 0
    """Of what it left, so many leading ones are the next turn's too; known once that has arrived."""


@dataclass(slots=True)
class _Waiting:
    state: _State
    turn: Turn
    since_s: float


@dataclass(slots=True)
class _Right:
    """Why a lease is prolonged: a turn runs on it, or its client runs tools until then."""

    until_s: float
    running: bool = False


class _Run:
    def __init__(self, clients: Sequence[Client], mode: Mode, pool_blocks: int, engine: Engine) -> None:
        self._mode, self._engine = mode, engine
        self._pool = Pool(pool_blocks, int(mode.share * pool_blocks))
        self._outcome = Outcome(mode.name, pool_blocks, engine.seconds)
        self._queue: deque[_Waiting] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._rights: dict[int, _Right] = {}
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
        state.shared_blocks = shared // engine.block_tokens
        read = min(self._pool.intact(state.mark), state.shared_blocks) * engine.block_tokens
        pinned = mode.hold_s and not mode.leased
        if self._now - state.ended_s >= mode.readable_s or (pinned and self._pool.held(state.mark) is None):
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
        if pinned and read:
            self._pool.release(state.mark)
        if state.shared_blocks:
            self._run_on(state.mark)
        else:
            # An agent that rewrites its history has it summed up first: an answer that goes on and calls no tools.
            self._rights.pop(state.mark, None)
        self._queue.append(_Waiting(state, turn, self._now))

    def _admit(self) -> None:
        """First come, first served: a turn that doesn't fit keeps those behind it waiting, as in vLLM."""
        while self._queue:
            first = self._queue[0]
            state, turn = first.state, first.turn
            need, own = self._engine.blocks(turn.tokens), state.shared_blocks
            if not self._pool.fits(need, state.mark, own, reclaim=self._mode.reclaim):
                return
            self._queue.popleft()
            self._pool.take(need, state.mark, own)
            self._outcome.waits_s.append(self._now - first.since_s)
            seconds = turn.reply_tokens / self._engine.decode_tokens_per_s
            self._at(self._now + seconds, partial(self._finish, state, turn))

    def _finish(self, state: _State, turn: Turn) -> None:
        mode, engine, blocks = self._mode, self._engine, self._engine.blocks(turn.tokens)
        state.next += 1
        following = state.turns[state.next] if state.next < len(state.turns) else None
        self._marks += 1
        mark = self._marks
        # Leases are of whole blocks, since only those are proven. Where nothing is shared, what the earlier turn left
        # is not this one's, and is held until its time is over.
        wanted = turn.tokens // engine.block_tokens if mode.leased else blocks if mode.hold_s else 0
        before = state.mark if state.shared_blocks else -1
        ends = self._now + mode.hold_s
        held = self._pool.finish(blocks, mark, before, hold=wanted, ends=ends)
        self._outcome.refused += held == 0 < wanted
        self._outcome.partly += 0 < held < wanted
        self._rights.pop(before, None)
        if held:
            self._at(ends, partial(self._run_out, mark))
            if mode.leased and mode.tool_hold_s and following is not None and following.after_tool:
                self._rights[mark] = _Right(self._now + mode.tool_hold_s)
                self._at(self._now + FIRST_WORD_S, partial(self._speak, mark))
        state.before, state.mark, state.ended_s = turn, mark, self._now
        state.shared_blocks = 0
        self._outcome.finished += 1
        if following is not None:
            next_s = max(self._now + following.wait_s, following.not_before_s)
            self._at(next_s, partial(self._arrive, state))

    # -- leases --------------------------------------------------------------------------------------
    def _run_on(self, mark: int) -> None:
        """A turn has begun that continues what is held. The engine hears of that with the next beat."""
        held = self._pool.held(mark)
        if held is None or not self._mode.leased:
            return
        right = self._rights.get(mark)
        if right is None:
            self._rights[mark] = _Right(-math.inf, running=True)
            beat = held.ends - self._mode.hold_s + self._mode.beat_s
            self._at(max(beat, self._now + FIRST_WORD_S), partial(self._speak, mark))
        else:
            right.running = True

    def _speak(self, mark: int) -> None:
        """Prolong a lease that somebody has a right to, now and with every beat."""
        right = self._rights.get(mark)
        if right is None:
            return
        if self._pool.held(mark) is None or not (right.running or self._now < right.until_s):
            del self._rights[mark]
            return
        ends = self._now + self._mode.hold_s
        self._pool.speak(mark, ends)
        self._at(self._now + self._mode.beat_s, partial(self._speak, mark))

    def _run_out(self, mark: int) -> None:
        """The time that was said first has passed: release what was not prolonged."""
        held = self._pool.held(mark)
        if held is None:
            return
        if held.ends <= self._now:
            self._pool.release(mark)
        else:
            self._at(held.ends, partial(self._run_out, mark))
