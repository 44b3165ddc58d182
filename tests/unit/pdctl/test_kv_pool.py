"""The pool against single blocks in vLLM's order and the connector's own table of leases.

The same blocks are intact and held, the same leases give way, and no block is lost or made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_connector.core.leases import Held as Lease
from pd_connector.core.leases import Leases
from pdctl.core.kv_pool import Pool

SIZE = 24
SECONDS = 60


@dataclass
class Turn:
    """A running turn: its blocks, and the turn whose leading blocks it has, and how many of these."""

    blocks: list[int]
    before: int
    own: int


class Engine:
    """Blocks by their numbers; `queue` is the free queue, its front taken first."""

    def __init__(self, cap: int) -> None:
        self.queue = list(range(SIZE))
        self.used = [0] * SIZE
        self.content: list[tuple[int, int] | None] = [None] * SIZE
        self.turns: dict[int, list[int]] = {}
        self.leases = Leases(cap)

    def intact(self, mark: int) -> list[int]:
        found: list[int] = []
        for at, block in enumerate(self.turns.get(mark, [])):
            if self.content[block] != (mark, at):
                break
            found.append(block)
        return found

    def lease(self, mark: int) -> Lease | None:
        return next((held for held in self.leases.by_value(0.0) if held.token == str(mark)), None)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.used[block]:
                self.queue.remove(block)
            self.used[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.used[block] -= 1
            if not self.used[block]:
                self.queue.append(block)

    def end(self, held: Lease) -> None:
        self.leases.remove(held)
        self.give_back(held.blocks)

    def start(self, need: int, own: Sequence[int], now: float) -> list[int]:
        self.touch(own)
        more = need - len(own)
        while len(self.queue) < more:
            self.end(self.leases.by_value(now)[0])
        new = self.queue[:more]
        self.touch(new)
        for block in new:
            self.content[block] = None
        return [*own, *new]

    def finish(self, turn: Turn, mark: int, hold: int, now: float) -> int:
        for at, block in enumerate(turn.blocks):
            self.content[block] = (mark, at)
        self.turns[mark] = turn.blocks
        grant = self.leases.grant(str(mark), turn.blocks[:hold], now, SECONDS) if hold else None
        if grant is not None:
            self.touch(grant.held.blocks)
            for held in grant.gave_way:
                self.give_back(held.blocks)
        self.give_back(turn.blocks)
        # The router has it ended as soon as the next turn's handle is kept.
        old = self.lease(turn.before)
        if old is not None:
            self.end(old)
        return 0 if grant is None else len(grant.held.blocks)


class PoolOfSingleBlocks(RuleBasedStateMachine):
    """Every operation is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.marks = 0
        self.running: list[Turn] = []
        self.known: list[int] = []
        self.pool, self.engine = Pool(SIZE), Engine(SIZE)

    @initialize(cap=st.sampled_from([0, SIZE // 3, SIZE // 2, SIZE]))
    def choose_the_cap(self, cap: int) -> None:
        self.pool, self.engine = Pool(SIZE, cap), Engine(cap)

    @rule(
        data=st.data(), new=st.integers(0, SIZE // 3), most=st.sampled_from([SIZE, SIZE, 2, 0]), reclaim=st.booleans()
    )
    def start(self, data: st.DataObject, new: int, most: int, reclaim: bool) -> None:
        mark = data.draw(st.sampled_from([-1, *self.known]))
        own = self.engine.intact(mark)[:most]
        need = len(own) + new or 1
        idle = [block for held in self.engine.leases.by_value(self.now) for block in held.blocks]
        out_of_reach = {block for block in idle if not any(block in turn.blocks for turn in self.running)}
        reachable = len(self.engine.queue) + len(out_of_reach if reclaim else out_of_reach & set(own))
        assert self.pool.fits(need, mark, len(own), reclaim=reclaim) == (need <= reachable)
        if need > reachable:
            return
        self.pool.take(need, mark, len(own))
        self.running.append(Turn(self.engine.start(need, own, self.now), mark if own else -1, len(own)))
        if own:
            self.known.remove(mark)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), last_is_whole=st.booleans())
    def finish(self, data: st.DataObject, last_is_whole: bool) -> None:
        turn = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.marks += 1
        hold = max(turn.own, len(turn.blocks) - (not last_is_whole))
        kept = self.engine.finish(turn, self.marks, hold, self.now)
        ends = self.now + SECONDS
        assert self.pool.finish(len(turn.blocks), self.marks, turn.before, hold=hold, ends=ends) == kept
        self.known.append(self.marks)

    @precondition(lambda self: len(self.engine.leases) > 0)
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        # Two that are prolonged at the same moment are alike.
        self.pass_time(1)
        mark = data.draw(st.sampled_from([held.token for held in self.engine.leases.by_value(self.now)] or [""]))
        if mark:
            assert self.engine.leases.set_end(mark, self.now, SECONDS) == SECONDS
            self.pool.speak(int(mark), self.now + SECONDS)

    @precondition(lambda self: len(self.engine.leases) > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.engine.leases.by_value(self.now)))
        self.engine.end(held)
        self.pool.release(int(held.token))

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for held in self.engine.leases.over(self.now):
            self.engine.end(held)
            self.pool.release(int(held.token))

    @invariant()
    def no_block_is_lost_or_made(self) -> None:
        assert self.pool.running == sum(len(turn.blocks) for turn in self.running)
        assert self.pool.free == len(self.engine.queue)
        assert self.pool.running + self.pool.held_blocks + self.pool.free == SIZE

    @invariant()
    def the_same_blocks_are_intact_and_held(self) -> None:
        for mark in self.known:
            assert self.pool.intact(mark) == len(self.engine.intact(mark))
        for mark in range(1, self.marks + 1):
            held, lease = self.pool.held(mark), self.engine.lease(mark)
            assert (held is None) == (lease is None)
            if held is not None and lease is not None:
                assert (held.blocks, held.ends, held.spoken) == (len(lease.blocks), lease.ends, lease.prolonged)


TestPoolOfSingleBlocks = PoolOfSingleBlocks.TestCase
TestPoolOfSingleBlocks.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


def left_by(pool: Pool, mark: int, blocks: int, hold: int = 0, ends: float = 60.0) -> int:
    """A turn that nobody is behind has run."""
    pool.take(blocks, -1, 0)
    return pool.finish(blocks, mark, hold=hold, ends=ends)


def test_a_conversation_loses_its_end_before_its_beginning() -> None:
    pool = Pool(10)
    left_by(pool, 1, 6)
    pool.take(7, -1, 0)
    assert pool.intact(1) == 3


def test_what_nobody_spoke_for_goes_first_and_then_what_was_spoken_for_longest_ago() -> None:
    pool = Pool(10)
    for mark in (1, 2, 3, 4, 5):
        left_by(pool, mark, 2, hold=2)
    for mark in (3, 1, 3):
        pool.speak(mark, 99.0)
    gone = []
    for _ in range(5):
        pool.take(2, -1, 0)
        gone += [mark for mark in (1, 2, 3, 4, 5) if pool.held(mark) is None and mark not in gone]
    assert gone == [2, 4, 5, 1, 3]


def test_at_the_cap_a_new_one_takes_the_place_of_silent_ones_as_far_as_they_help() -> None:
    pool = Pool(20, cap=9)
    for mark in (1, 2, 3):
        assert left_by(pool, mark, 3, hold=3) == 3
    pool.speak(2, 99.0)
    assert left_by(pool, 4, 2, hold=2) == 2
    assert (pool.held(1), pool.held_blocks) == (None, 8), "the other silent one need not go"
    assert left_by(pool, 5, 8, hold=8) == 6
    assert [mark for mark in range(6) if pool.held(mark)] == [2, 5]
    pool.speak(5, 99.0)
    assert left_by(pool, 6, 1, hold=1) == 0, "what was spoken for gives way to no new one"


def test_who_could_be_spared_in_the_end_stays() -> None:
    pool = Pool(20, cap=9)
    for mark, blocks in ((1, 1), (2, 2), (3, 6)):
        left_by(pool, mark, blocks, hold=blocks)
    assert left_by(pool, 4, 5, hold=5) == 5
    assert [mark for mark in range(6) if pool.held(mark)] == [1, 2, 4]


def test_a_conversation_that_goes_on_at_the_cap_keeps_what_it_had_and_its_good_word() -> None:
    pool = Pool(12, cap=6)
    left_by(pool, 1, 3, hold=3)
    left_by(pool, 2, 3, hold=3)
    pool.speak(1, 60.0)
    pool.speak(2, 60.0)
    pool.take(5, 1, 3)
    assert pool.held_blocks == 3, "what a turn uses is not idle"
    assert left_by(pool, 3, 1, hold=1) == 0, "and still counts"
    assert pool.finish(5, 4, 1, hold=5, ends=70.0) == 3
    held = pool.held(4)
    assert held is not None
    assert (held.spoken, held.ends, pool.intact(4), pool.held(1)) == (True, 70.0, 5, None)


def test_what_is_prolonged_for_a_part_of_it_says_nothing_of_another_beginning() -> None:
    pool = Pool(12)
    left_by(pool, 1, 4, hold=4)
    pool.speak(1, 60.0)
    pool.take(3, 1, 2)
    pool.finish(3, 2, 1, hold=3)
    held = pool.held(2)
    assert held is not None
    assert (held.spoken, pool.held_blocks, pool.free) == (False, 3, 9)
