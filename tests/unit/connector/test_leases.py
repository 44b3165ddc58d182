"""Which finished turns' blocks are kept: the table of leases against a simple model, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_connector.core.leases import Held, Leases

CAP = 6
BLOCKS = st.lists(st.integers(1, 11), min_size=1, max_size=8, unique=True)


@dataclass
class Known:
    """What the model knows of a lease."""

    blocks: frozenset[int]
    ends: float
    spoken_for: float
    prolonged: bool = False

    def over(self, now: float) -> bool:
        return self.ends <= now


class Model(RuleBasedStateMachine):
    """Every step is done on the table and on a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Leases(CAP)
        self.known: dict[str, Known] = {}
        self.now = 0.0
        self.count = 0

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(blocks=BLOCKS, seconds=st.integers(1, 60))
    def grant(self, blocks: list[int], seconds: int) -> None:
        self.count += 1
        token = f"{self.count:032x}"
        may_give_way = {name for name, one in self.known.items() if one.over(self.now) or not one.prolonged}
        before = frozenset[int]().union(*(one.blocks for one in self.known.values()))
        grant = self.table.grant(token, blocks, self.now, seconds)
        if grant is None or len(grant.held.blocks) < len(blocks):
            left = [one.blocks for name, one in self.known.items() if name not in may_give_way]
            assert len(frozenset(blocks).union(*left)) > CAP
            assert grant is None or not grant.gave_way
            part = grant.held.blocks if grant is not None else ()
            assert part == tuple(blocks[: len(part)])
            assert len(before.union(blocks[: len(part) + 1])) > CAP, "the next one would not have fitted"
        if grant is None:
            return
        gave_way = grant.gave_way
        for held in gave_way:
            assert held.token in may_give_way
        if gave_way:
            # Without the last one it would not have been enough.
            spared = gave_way[-1].token
            kept = [one.blocks for name, one in self.known.items() if name not in _tokens(gave_way) - {spared}]
            assert len(frozenset(blocks).union(*kept)) > CAP
        part = frozenset(grant.held.blocks)
        continued = any(one.prolonged and not one.over(self.now) and one.blocks <= part for one in self.known.values())
        assert grant.held.prolonged is continued
        for name in _tokens(gave_way):
            del self.known[name]
        self.known[token] = Known(part, self.now + seconds, self.now, continued)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), seconds=st.integers(0, 60))
    def set_end(self, data: st.DataObject, seconds: int) -> None:
        token = data.draw(st.sampled_from(sorted(self.known)))
        one = self.known[token]
        left = self.table.set_end(token, self.now, seconds)
        if one.over(self.now):
            assert left == 0
            return
        assert left == seconds
        one.ends = self.now + seconds
        if seconds:
            one.prolonged, one.spoken_for = True, self.now

    @rule(seconds=st.integers(0, 60))
    def set_the_end_of_none(self, seconds: int) -> None:
        assert self.table.set_end("f" * 32, self.now, seconds) == 0

    @rule()
    def remove_what_is_over(self) -> None:
        over = self.table.over(self.now)
        assert _tokens(over) == {name for name, one in self.known.items() if one.over(self.now)}
        for held in over:
            self.table.remove(held)
            del self.known[held.token]
        assert not self.table.any_over(self.now)

    @precondition(lambda self: self.known)
    @rule()
    def reclaim(self) -> None:
        first = self.table.by_value(self.now)[0]
        one = self.known.pop(first.token)
        for other in self.known.values():
            assert _value(one, self.now) <= _value(other, self.now)
        self.table.remove(first)

    @invariant()
    def agrees(self) -> None:
        union = frozenset[int]().union(*(one.blocks for one in self.known.values()))
        assert (len(self.table), self.table.blocks) == (len(self.known), len(union))
        assert self.table.blocks <= CAP
        assert self.table.any_over(self.now) == any(one.over(self.now) for one in self.known.values())


def _tokens(held: list[Held]) -> set[str]:
    return {one.token for one in held}


def _value(one: Known, now: float) -> tuple[bool, bool, float]:
    return not one.over(now), one.prolonged, one.spoken_for


TestModel = Model.TestCase


def granted(table: Leases, token: str, blocks: list[int], now: float, seconds: float = 60) -> list[str] | None:
    grant = table.grant(token, blocks, now, seconds)
    return None if grant is None else [held.token for held in grant.gave_way]


def test_turns_of_a_conversation_count_their_common_blocks_once() -> None:
    table = Leases(6)
    assert granted(table, "first", [1, 2, 3], 0) == []
    assert granted(table, "second", [1, 2, 3, 4, 5], 1) == []
    assert table.blocks == 5
    table.remove(table.by_value(2)[0])
    assert table.blocks == 5, "the second turn needs them"
    table.remove(table.by_value(2)[0])
    assert table.blocks == 0


def test_a_burst_of_single_turns_keeps_the_latest_and_no_prolonged_one_gives_way() -> None:
    table = Leases(6)
    granted(table, "returning", [1, 2], 0)
    assert table.set_end("returning", 1, 600) == 600
    for number in range(10):
        blocks = [10 + 4 * number + place for place in range(4)]
        assert granted(table, f"single {number}", blocks, 2 + number) == ([f"single {number - 1}"] if number else [])
    assert table.blocks == 6
    assert table.set_end("returning", 20, 600) == 600


def test_prolonged_leases_fill_the_cap_and_a_new_one_is_refused() -> None:
    table = Leases(6)
    for token, block in (("one", 1), ("two", 11)):
        granted(table, token, [block, block + 1, block + 2], 0)
        table.set_end(token, 1, 100)
    assert granted(table, "three", [21], 2) is None
    assert len(table) == 2
    assert granted(table, "three", [21], 101) == ["one"], "over, although nobody has collected it"


def test_who_gives_way_in_vain_stays() -> None:
    table = Leases(6)
    granted(table, "single", [1, 2], 0)
    granted(table, "returning", [3, 4, 5, 6], 0)
    table.set_end("returning", 1, 100)
    assert granted(table, "large", [7, 8, 9], 2) is None
    assert granted(table, "larger than all", list(range(20, 27)), 2) is None
    assert len(table) == 2


def test_the_least_valuable_goes_first() -> None:
    table = Leases(40)
    for number, token in enumerate(("a", "b", "c", "d", "e")):
        granted(table, token, [number], number)
    table.set_end("a", 10, 100)
    table.set_end("c", 20, 100)
    table.set_end("a", 30, 100)
    table.set_end("d", 40, 0)
    assert [held.token for held in table.by_value(41)] == ["d", "b", "e", "c", "a"]


def test_a_conversation_that_goes_on_at_the_cap_keeps_what_it_had_and_its_good_word() -> None:
    table = Leases(10)
    for token, first in (("a", 0), ("b", 5)):
        granted(table, token, list(range(first, first + 5)), 0)
        table.set_end(token, 1, 600)
    grant = table.grant("a, next turn", [0, 1, 2, 3, 4, 10], 2, 60)
    assert grant is not None
    assert (grant.held.blocks, grant.held.prolonged, grant.gave_way) == ((0, 1, 2, 3, 4), True, [])
    table.set_end("a", 3, 0)
    table.remove(table.over(3)[0])
    assert table.blocks == 10
    assert granted(table, "single", [20], 4) is None


def test_an_ended_lease_is_not_revived() -> None:
    table = Leases(4)
    granted(table, "a", [1], 0)
    assert table.set_end("a", 1, 0) == 0
    assert table.set_end("a", 1, 60) == 0
    granted(table, "b", [2], 0, seconds=5)
    assert table.set_end("b", 5, 60) == 0, "it has run out"
    assert table.set_end("b", 4.9, 2) == 2, "a shorter time is a time, too"
    assert table.set_end("b", 7, 60) == 0
