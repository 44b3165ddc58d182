"""The pool against a list of single blocks in vLLM's order: the same blocks are intact, and none is lost or made."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdctl.core.kv_pool import Held, Pool

SIZE = 24
Block = tuple[int, int] | None
"""What a free block contains: mark and place in the conversation; None: nothing."""


class PoolOfSingleBlocks(RuleBasedStateMachine):
    """`queue` is the free queue, its front taken first; every operation is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(SIZE)
        self.queue: list[Block] = [None] * SIZE
        self.held: dict[int, Held] = {}
        self.running: list[int] = []
        self.marks = 0
        self.known: list[int] = []
        self.now = 0.0

    def intact(self, mark: int) -> int:
        if mark in self.held:
            return self.held[mark].blocks
        count = 0
        while (mark, count) in self.queue:
            count += 1
        return count

    def give_back(self, mark: int, blocks: int) -> None:
        self.queue += [(mark, at) for at in reversed(range(blocks))]

    def let_go(self, mark: int) -> None:
        if mark in self.held:
            self.give_back(mark, self.held.pop(mark).blocks)

    @rule(data=st.data(), need=st.integers(1, SIZE), reclaim=st.booleans())
    def start(self, data: st.DataObject, need: int, reclaim: bool) -> None:
        mark = data.draw(st.sampled_from([-1, *self.known]))
        own = min(data.draw(st.integers(0, need)), self.intact(mark))
        others = len(self.queue) - (0 if mark in self.held else own)
        if mark in self.held:
            others += self.held[mark].blocks - own
        if reclaim:
            others += sum(held.blocks for other, held in self.held.items() if other != mark)
        assert self.pool.fits(need, mark, own, reclaim=reclaim) == (need - own <= others)
        if need - own > others:
            return
        self.pool.take(need, mark, own, self.now)
        self.let_go(mark)
        for at in range(own):
            self.queue.remove((mark, at))
        for _ in range(need - own):
            if not self.queue:
                self.let_go(min(self.held, key=lambda other: (self.held[other].value(self.now), other)))
            self.queue.pop(0)
        self.running.append(need)
        if mark in self.known:
            self.known.remove(mark)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), hold=st.booleans(), spoken=st.floats(0, 40), beat=st.sampled_from([float("inf"), 5.0]))
    def finish(self, data: st.DataObject, hold: bool, spoken: float, beat: float) -> None:
        blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.marks += 1
        self.known.append(self.marks)
        self.pool.finish(blocks, self.marks)
        if hold:
            held = Held(blocks, self.now, self.now + 60, spoken, beat)
            self.pool.hold(self.marks, held)
            self.held[self.marks] = held
        else:
            self.give_back(self.marks, blocks)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        mark = data.draw(st.sampled_from(self.known))
        self.pool.release(mark)
        self.let_go(mark)

    @rule(blocks=st.integers(1, SIZE), most=st.integers(0, SIZE))
    def make_room(self, blocks: int, most: int) -> None:
        silent = [mark for mark, held in self.held.items() if not held.value(self.now)[0]]
        chosen, total = [], sum(held.blocks for held in self.held.values()) + blocks
        for mark in silent:
            if total <= most:
                break
            chosen.append(mark)
            total -= self.held[mark].blocks
        assert self.pool.make_room(blocks, most, self.now) == (total <= most)
        if total <= most:
            for mark in chosen:
                self.let_go(mark)

    @rule(seconds=st.floats(0.1, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def no_block_is_lost_or_made(self) -> None:
        assert self.pool.running == sum(self.running)
        assert self.pool.held_blocks == sum(held.blocks for held in self.held.values())
        assert self.pool.free == len(self.queue)
        assert self.pool.running + self.pool.held_blocks + self.pool.free == SIZE

    @invariant()
    def the_same_blocks_are_intact(self) -> None:
        for mark in self.known:
            assert self.pool.intact(mark) == self.intact(mark)
            assert self.pool.is_held(mark) == (mark in self.held)


TestPoolOfSingleBlocks = PoolOfSingleBlocks.TestCase
TestPoolOfSingleBlocks.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_a_conversation_loses_its_end_before_its_beginning() -> None:
    pool = Pool(10)
    pool.take(6, -1, 0, 0.0)
    pool.finish(6, mark=1)
    pool.take(7, -1, 0, 1.0)
    assert pool.intact(1) == 3


def test_what_was_spoken_for_is_worth_more_than_what_came_later() -> None:
    silent_early, spoken, silent_late = Held(1, 0.0, 60.0), Held(1, 1.0, 99.0, 30.0, 20.0), Held(1, 5.0, 65.0)
    ordered = sorted([spoken, silent_late, silent_early], key=lambda held: held.value(30.0))
    assert ordered == [silent_early, silent_late, spoken]
    assert spoken.value(20.0) == (False, 1.0)
    assert spoken.value(21.0) == (True, 21.0)
    assert spoken.value(500.0) == (True, 21.0)


def test_room_is_made_where_it_just_suffices_and_otherwise_nothing_is_given_up() -> None:
    pool = Pool(10)
    for mark in (1, 2):
        pool.take(3, -1, 0, 0.0)
        pool.finish(3, mark)
        pool.hold(mark, Held(3, 0.0, 60.0))
    assert not pool.make_room(7, 6, 1.0)
    assert pool.held_blocks == 6
    assert pool.make_room(6, 6, 1.0)
    assert pool.held_blocks == 0
