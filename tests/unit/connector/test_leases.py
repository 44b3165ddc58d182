"""Which finished turns' blocks are kept: the table of leases against a simple model, and its rules one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
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
    heir: str = ""
    """Who has inherited that it was prolonged."""

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
        staying = _union(one for name, one in self.known.items() if name not in may_give_way)
        room = next((at for at in range(len(blocks), 0, -1) if len(staying.union(blocks[:at])) <= CAP), 0)
        grant = self.table.grant(token, blocks, self.now, seconds)
        if grant is None:
            assert room == 0, "there was room for some"
            return
        assert grant.held.blocks == tuple(blocks[:room]), "as many of the leading blocks as there can be room for"
        part, gave_way = frozenset(grant.held.blocks), _tokens(grant.gave_way)
        assert gave_way <= may_give_way
        for spared in gave_way:
            kept = _union(one for name, one in self.known.items() if name not in gave_way - {spared})
            assert len(kept | part) > CAP, "it gave way in vain"
        for name in gave_way:
            self.forget(name)
        words = [
            one
            for one in self.known.values()
            if one.prolonged and not one.heir and not one.over(self.now) and one.blocks <= part
        ]
        assert grant.held.prolonged is bool(words)
        if words:
            max(words, key=lambda one: len(one.blocks)).heir = token
        self.known[token] = Known(part, self.now + seconds, self.now, bool(words))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), seconds=st.integers(0, 60))
    def set_end(self, data: st.DataObject, seconds: int) -> None:
        token = data.draw(st.sampled_from(sorted(self.known)))
        one = self.known[token]
        left = self.table.set_end(token, self.now, seconds)
        if one.over(self.now):
            assert left is None
            return
        assert left == seconds
        one.ends = self.now + seconds
        if seconds:
            one.prolonged, one.spoken_for = True, self.now

    @rule(seconds=st.integers(0, 60))
    def set_the_end_of_none(self, seconds: int) -> None:
        assert self.table.set_end("f" * 32, self.now, seconds) is None

    @rule()
    def remove_what_is_over(self) -> None:
        over = self.table.over(self.now)
        assert _tokens(over) == {name for name, one in self.known.items() if one.over(self.now)}
        for held in over:
            self.table.remove(held)
            self.forget(held.token)
        assert not self.table.any_over(self.now)

    @precondition(lambda self: self.known)
    @rule()
    def reclaim(self) -> None:
        first = self.table.by_value(self.now)[0]
        one = self.known[first.token]
        self.forget(first.token)
        for other in self.known.values():
            assert _value(one, self.now) <= _value(other, self.now)
        self.table.remove(first)

    def forget(self, token: str) -> None:
        """A word comes back from an heir that had not passed it on, and from the one to whom it had, afterwards."""
        gone = self.known.pop(token)
        for one in self.known.values():
            if one.heir == token:
                one.heir = gone.heir

    @invariant()
    def agrees(self) -> None:
        union = _union(self.known.values())
        assert (len(self.table), self.table.blocks) == (len(self.known), len(union))
        assert self.table.blocks <= CAP
        assert self.table.any_over(self.now) == any(one.over(self.now) for one in self.known.values())

    def teardown(self) -> None:
        """Whatever was granted, nothing is left once each lease has been removed once."""
        for held in self.table.by_value(self.now):
            self.table.remove(held)
        assert (len(self.table), self.table.blocks, self.table._uses) == (0, 0, {})


def _union(leases: Iterable[Known]) -> frozenset[int]:
    return frozenset[int]().union(*(one.blocks for one in leases))


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


def turns(table: Leases, **conversations: tuple[int, int]) -> None:
    """Grant each its blocks, from the first to before the last; those of `held…` are prolonged."""
    for token, (first, end) in conversations.items():
        assert granted(table, token, list(range(first, end)), 0) == []
        if token.startswith("held"):
            assert table.set_end(token, 0, 600) == 600


@pytest.mark.parametrize("ended", [False, True])
def test_where_not_all_fits_who_may_give_way_does(ended: bool) -> None:
    table = Leases(100)
    turns(table, held=(0, 60), single=(60, 100))
    if ended:
        table.set_end("single", 1, 0)
    grant = table.grant("new", range(200, 260), 2, 60)
    assert grant is not None
    assert (grant.held.blocks, _tokens(grant.gave_way)) == (tuple(range(200, 240)), {"single"})


def test_a_held_conversation_that_outgrows_the_cap_goes_on_to_it() -> None:
    table = Leases(100)
    turns(table, held=(0, 50), single=(50, 100))
    grant = table.grant("held, next turn", [*range(50), *range(200, 260)], 1, 60)
    assert grant is not None
    assert (len(grant.held.blocks), grant.held.prolonged, table.blocks) == (100, True, 100)


def test_a_turn_larger_than_the_cap_displaces_all_that_nobody_prolonged() -> None:
    table = Leases(100)
    turns(table, a=(0, 20), b=(20, 40), c=(40, 60), d=(60, 80), e=(80, 100))
    grant = table.grant("large", range(200, 320), 1, 60)
    assert grant is not None
    assert (len(grant.held.blocks), _tokens(grant.gave_way)) == (100, {"a", "b", "c", "d", "e"})


def test_who_gives_way_in_vain_stays() -> None:
    table = Leases(30)
    turns(table, held=(0, 10), alike=(0, 8), small=(10, 12), large=(20, 30), later=(30, 33))
    # `alike` frees nothing, and `small` is not needed once `large` has gone.
    assert granted(table, "new", list(range(40, 53)), 1) == ["large"]
    assert granted(table, "none", [0, 1, 2], 1) == [], "all of it is held"
    table = Leases(6)
    turns(table, held_one=(0, 3), held_two=(3, 6), alike=(0, 2))
    assert granted(table, "new", [7], 1) is None
    assert len(table) == 3


def test_a_good_word_is_inherited_once() -> None:
    table = Leases(30)
    turns(table, held=(0, 4))
    prompt = list(range(4))
    for number in range(4):
        own = list(range(100 + 10 * number, 110 + 10 * number))
        # The first one may be the conversation's next turn, and stays; the others displace each other.
        gave_way = [] if number < 2 else [f"single {number - 1}"]
        assert granted(table, f"single {number}", prompt + own, 1 + number) == gave_way
    assert [held.token for held in table.by_value(9) if held.prolonged] == ["held", "single 0"]
    assert granted(table, "another", list(range(200, 216)), 10) is not None


def test_a_good_word_comes_back_from_a_turn_that_was_thrown_away() -> None:
    table = Leases(100)
    turns(table, held=(0, 10))

    def tried(token: str, last: int) -> bool:
        grant = table.grant(token, [*range(10), last], 2, 60)
        assert grant is not None
        return grant.held.prolonged

    assert tried("aborted", 20)
    assert not tried("at the same time", 21)
    table.set_end("aborted", 2, 0)
    table.remove(table.over(2)[0])
    assert tried("again", 22)
    grant = table.grant("its next turn", [*range(10), 22, 23], 2, 60)
    assert grant is not None
    assert grant.held.prolonged
    # The word is with the next turn now: it is not there twice.
    table.set_end("again", 2, 0)
    table.remove(table.over(2)[0])
    assert not tried("fork", 24)
    table.set_end("its next turn", 2, 0)
    table.remove(table.over(2)[0])
    assert tried("once more", 25)


def test_what_nobody_can_give_back_is_not_walked_through_for_each_new_lease() -> None:
    """Single turns with a long common prompt that a conversation holds, at the cap."""

    class Counted(tuple[int, ...]):
        walks = 0

        def __iter__(self) -> Iterator[int]:
            Counted.walks += 1
            return super().__iter__()

    prompt = tuple(range(1000))
    table = Leases(1100)
    turns(table, held=(0, 1000))
    for number in range(200):
        grant = table.grant(f"single {number}", prompt, 2, 60)
        assert grant is not None
        grant.held.blocks = Counted(grant.held.blocks)
    for number in range(20):
        assert (
            granted(table, f"longer {number}", [*prompt, *range(2000 + 60 * number, 2060 + 60 * number)], 3) is not None
        )
    assert 0 < Counted.walks <= 2 * 200


def test_each_turn_passes_the_word_on_to_its_next_one_and_the_longest_is_meant() -> None:
    table = Leases(100)
    turns(table, held=(0, 4), held_long=(0, 10))
    table.set_end("held", 1, 600)
    table.set_end("held_long", 1, 600)
    for end in (20, 30, 40):
        grant = table.grant(f"turn of {end}", range(end), 2, 60)
        assert grant is not None
        assert grant.held.prolonged
    # `held_long` had taken the word of `held` when it began, and the turns took its own from one to the next.
    for first in (50, 60):
        grant = table.grant(f"fork at {first}", [*range(10), *range(first, first + 5)], 3, 60)
        assert grant is not None
        assert not grant.held.prolonged
    table.set_end("held", 4, 600)
    grant = table.grant("fork after more words", [*range(4), 70], 5, 60)
    assert grant is not None
    assert not grant.held.prolonged


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
    assert table.set_end("a", 1, 60) is None
    granted(table, "b", [2], 0, seconds=5)
    assert table.set_end("b", 5, 60) is None, "it has run out"
    assert table.set_end("b", 4.9, 2) == 2, "a shorter time is a time, too"
    assert table.set_end("b", 7, 60) is None
