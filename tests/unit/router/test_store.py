"""The store in memory: the port's behaviour, and that it stays bounded under traffic that never comes back (HL-27)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.cutting import strip_json
from pd_router.core.store import ENTRY_OVERHEAD, Entry, Fate, Opened, PutResult, Ticket
from pd_router.core.store_memory import MemoryStore
from unit.router.store_behaviour import (
    ENGINE_TTL,
    HISTORY_1,
    HISTORY_2,
    HOLDER,
    ID_A,
    ID_B,
    LEASED,
    SHARED,
    SHARED_TTL,
    TTL,
    StoreBehaviour,
    entry,
    handle,
)


class MemoryBench:
    """A store in memory and a clock moved by hand."""

    def __init__(self) -> None:
        self.store = make(cap_bytes=1 << 20)
        self.now = 0.0

    async def wait(self, seconds: float) -> None:
        self.now += seconds

    def ticket(self, opened: Opened) -> Ticket | None:
        return opened.ticket


class TestMemoryStore(StoreBehaviour):
    async def make(self) -> MemoryBench:
        return MemoryBench()


def make(cap_bytes: int = 1 << 20, cap_entries: int = 1000) -> MemoryStore:
    return MemoryStore(cap_bytes, cap_entries, TTL, ENGINE_TTL, SHARED_TTL)


async def test_a_suite_without_a_factory_says_so() -> None:
    with pytest.raises(NotImplementedError):
        await StoreBehaviour().make()


def test_expiry_frees_memory_without_a_look_up() -> None:
    store = make()
    for number in range(10):
        store.put(entry(number, arrived=float(number)), [b"h%016d" % number], float(number))
    assert store.expire(TTL + 4.0) == 5
    assert store.stats(TTL + 4.0).entries == 5
    assert store.expire(2 * TTL) == 5
    assert store.stats(2 * TTL).bytes == 0
    assert store.stats(2 * TTL).fates[Fate.EXPIRED] == 10


def test_a_restarted_holder_leaves_nothing_behind() -> None:
    store = make()
    store.put(entry(1, holder="d1"), [HISTORY_1], 0.0)
    store.put(entry(2, holder="d2"), [HISTORY_2], 0.0)
    store.put(entry(3, holder="d1", incarnation="2"), [ID_A], 0.0)
    assert store.purge_holder("d1", 1.0) == 2
    assert store.take([HISTORY_1], 1.0) is None
    assert store.take([ID_A], 1.0) is None
    assert store.take([HISTORY_2], 1.0) is not None
    assert store.purge_holder("nobody", 1.0) == 0


def test_the_oldest_go_when_there_are_too_many() -> None:
    store = make(cap_entries=3)
    for number in range(5):
        store.put(entry(number), [b"h%016d" % number], float(number))
    stats = store.stats(5.0)
    assert (stats.entries, stats.fates[Fate.EVICTED]) == (3, 2)
    assert [store.take([b"h%016d" % number], 5.0) is not None for number in range(5)] == [False] * 2 + [True] * 3


def test_the_oldest_go_when_they_are_too_big() -> None:
    store = make(cap_bytes=40_000)
    for number in range(40):
        store.put(entry(number, blob="x" * 4_000), [b"h%016d" % number], float(number))
        assert (store.stats(0.0).bytes or 0) <= 40_000
    assert 2 <= (store.stats(0.0).entries or 0) < 10
    assert store.take([b"h%016d" % 39], 40.0) is not None


def test_a_shared_handle_that_was_used_goes_before_those_that_were_not() -> None:
    store = make(cap_entries=3)
    for number, key in enumerate((HISTORY_1, HISTORY_2, ID_A)):
        store.put(entry(number, **SHARED), [key], 0.0)
    store.take([ID_A], 1.0)
    store.take([HISTORY_2], 2.0)
    store.put(entry(4, **SHARED), [ID_B], 3.0)
    store.put(entry(5, **SHARED), [b"h" + b"9" * 16], 3.0)
    assert store.take([ID_A], 4.0) is None
    assert store.take([HISTORY_2], 4.0) is None
    assert store.take([HISTORY_1], 4.0) is not None
    store.expire(SHARED_TTL + 3.0)
    assert store.stats(SHARED_TTL + 3.0).entries == 0


def test_of_handles_with_two_lifetimes_each_expires_in_its_own() -> None:
    store = make()
    store.put(entry(1, **SHARED), [HISTORY_1], 0.0)
    store.put(entry(2), [HISTORY_2], 0.0)
    assert store.expire(TTL) == 1
    assert store.take([HISTORY_1], TTL) is not None
    assert store.expire(SHARED_TTL) == 1
    assert store.stats(SHARED_TTL).entries == 0


def test_the_oldest_of_both_kinds_goes_first() -> None:
    store = make(cap_entries=2)
    store.put(entry(1, arrived=0.0), [HISTORY_1], 0.0)
    store.put(entry(2, arrived=1.0, **SHARED), [HISTORY_2], 1.0)
    store.put(entry(3, arrived=2.0), [ID_A], 2.0)
    assert store.take([HISTORY_1], 2.0) is None
    store.put(entry(4, arrived=3.0), [ID_B], 3.0)
    assert store.take([HISTORY_2], 3.0) is None
    assert store.take([ID_A], 3.0) is not None


@pytest.mark.parametrize(
    ("drop", "fate"),
    [
        (lambda store: store.expire(SHARED_TTL), Fate.EXPIRED),
        (lambda store: store.take([HISTORY_1], SHARED_TTL), Fate.EXPIRED),
        (lambda store: store.put(entry(3), [HISTORY_2], 1.0), Fate.EVICTED),
        (lambda store: store.put(entry(3), [HISTORY_1], 1.0), Fate.OVERWRITTEN),
        (lambda store: store.end([HISTORY_1], [], 1.0), Fate.ENDED),
        (lambda store: store.purge_holder(HOLDER, 1.0), None),
        (lambda store: store.forget([HISTORY_1]), None),
        (lambda store: store.take([HISTORY_1], 1.0), None),
    ],
)
def test_a_lease_is_told_of_when_its_handle_is_dropped(drop: Any, fate: Fate | None) -> None:
    store = make(cap_entries=1)
    told: list[Any] = []
    store.report_to(lambda *one: told.append(one))
    store.put(entry(1, **LEASED), [HISTORY_1], 0.0)
    drop(store)
    assert told == ([] if fate is None else [(HOLDER, LEASED["pd_lease"], fate)])


def test_what_is_too_big_for_the_cap_evicts_nobody() -> None:
    store = make(cap_bytes=20_000)
    store.put(entry(1), [ID_A], 0.0)
    assert store.put(entry(2, blob="x" * 30_000), [ID_B], 0.0) is PutResult.TOO_LARGE
    assert store.take([ID_A], 1.0) is not None


def test_a_full_store_still_replaces_its_own() -> None:
    store = make(cap_entries=1)
    store.put(entry(1), [ID_A], 0.0)
    assert store.put(entry(2, host="new"), [ID_A], 0.0) is PutResult.STORED
    found = store.take([ID_A], 1.0)
    assert found is not None
    assert found.entry.remote_host == "new"


def test_what_was_evicted_is_still_pinned() -> None:
    store = make(cap_entries=1)
    store.put(entry(1, tokens=100), [HISTORY_1], 0.0)
    store.put(entry(2, tokens=50, holder="d2"), [HISTORY_2], 0.0)
    assert store.stats(1.0).entries == 1
    assert store.stats(1.0).pinned_tokens == {"d1": 100, "d2": 50}


def test_200_000_one_turn_conversations_reach_a_plateau() -> None:
    store = MemoryStore(32 * 1024 * 1024, 20_000, TTL, ENGINE_TTL)
    answer = json.dumps({"kv_transfer_params": handle(tokens=100_000, fp="x" * 800)}).encode()
    big = strip_json(answer)[1]
    assert big is not None
    levels = []
    for number in range(200_000):
        now = number * 0.01
        key = b"%016d" % number
        turn = store.begin([b"0" + key], now)
        kept = Entry.of(big, holder="d1", incarnation="1", generation="g", arrived=now, turn=turn, inexact=None)
        store.put(kept, [b"h" + key, b"0" + key], now)
        if number % 20_000 == 19_999:
            levels.append((store.stats(now).entries, store.stats(now).bytes))
    assert len(set(levels[1:])) == 1
    entries, size = levels[-1]
    assert entries <= 20_000
    assert size <= 32 * 1024 * 1024
    assert len(store._index) == 2 * entries
    assert len(store._latest) <= 40_000
    assert store.stats(2000.0).fates[Fate.EVICTED] == 200_000 - entries
    # 480 s at 100 handles a second of 100k tokens each, give or take one slot of the estimate.
    assert 48_000 <= store.stats(1999.99).pinned_handles["d1"] <= 54_000


def test_size_counts_the_text_of_the_handle() -> None:
    assert entry(1, blob="x" * 1000).size - entry(1, blob="").size == 1000
    assert entry(1).size > ENTRY_OVERHEAD


def test_the_text_of_a_handle_is_kept_as_it_came() -> None:
    text = b'{"remote_host": "h", "remote_num_tokens": 5,\n "remote_block_ids": [[1]], "big": 1e400, "n": 1.10}'
    text = text.replace(b"1e400", b"123456789012345678901234567890")
    found = strip_json(b'{"kv_transfer_params":' + text + b"}")[1]
    assert found is not None
    kept = Entry.of(found, holder="d", incarnation="1", generation="g", arrived=0.0, turn=1, inexact=None)
    assert kept.raw == text
    assert kept.handle.raw == text
    assert kept.parsed()["big"] == 123456789012345678901234567890


_KEYS = [b"0" + b"%d" % n for n in range(3)] + [b"h" + b"%d" % n for n in range(3)]
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sets(st.sampled_from(_KEYS), max_size=3)),
        st.tuples(st.just("put"), st.sets(st.sampled_from(_KEYS), max_size=3)),
        st.tuples(st.just("share"), st.sets(st.sampled_from(_KEYS), max_size=3)),
        st.tuples(st.just("carry"), st.sets(st.sampled_from(_KEYS), max_size=3)),
        st.tuples(st.just("end"), st.sets(st.sampled_from(_KEYS), max_size=1)),
        st.tuples(st.just("take"), st.sets(st.sampled_from(_KEYS), max_size=3)),
        st.tuples(st.just("forget"), st.sets(st.sampled_from(_KEYS), max_size=2)),
        st.tuples(st.just("purge"), st.just(frozenset())),
        st.tuples(st.just("wait"), st.just(frozenset())),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(steps=_STEPS)
def test_books_balance_after_any_history(steps: list[tuple[str, Any]]) -> None:
    store = MemoryStore(8_000, 4, TTL, ENGINE_TTL, SHARED_TTL)
    told: list[str] = []
    store.report_to(lambda _holder, lease, _fate: told.append(lease))
    leases: dict[str, Entry] = {}
    purged: set[str] = set()
    now, turns, taken = 0.0, [0], []
    for number, (verb, keys) in enumerate(steps):
        if verb == "begin":
            turns.append(store.begin(sorted(keys), now))
        elif verb == "put":
            kept = entry(turns[number % len(turns)], arrived=now, holder=f"d{number % 2}")
            store.put(kept, sorted(keys), now)
        elif verb == "share":
            lease = f"{number:032x}-60"
            kept = entry(turns[-1], arrived=now, holder=f"d{number % 2}", **{**LEASED, "pd_lease": lease})
            kept.conversations = ("c0",)
            if store.put(kept, sorted(keys), now) in (PutResult.STORED, PutResult.PARTLY_LATE):
                leases[lease] = kept
        elif verb == "carry":
            # The next turn left no handle of its own.
            live = [one for one in store._shared.values() if one.lease in store._leased]
            if live:
                kept = replace(live[number % len(live)], keys=(), arrived=now, turn=turns[-1])
                if store.put(kept, sorted(keys), now) in (PutResult.STORED, PutResult.PARTLY_LATE):
                    leases[kept.lease] = kept
        elif verb == "end":
            store.end(sorted(keys), ["c0"] if number % 2 else [], now)
            assert not (number % 2 and store._conversations)
        elif verb == "take":
            found = store.take(sorted(keys), now)
            if found is not None:
                assert found.key in keys
                assert found.entry not in taken or found.entry.shared
                taken.append(found.entry)
        elif verb == "forget":
            store.forget(sorted(keys))
        elif verb == "purge":
            purged |= {lease for lease, kept in leases.items() if kept.holder == "d0"}
            store.purge_holder("d0", now)
        else:
            now += TTL / 3
        alive = [*store._single.values(), *store._shared.values()]
        assert store._leased.keys() == leases.keys() - set(told) - purged
        assert {id(kept) for kept in store._leased.values()} <= {id(kept) for kept in alive}
        assert len(told) == len(set(told))
        there = {id(kept) for kept in alive if kept.conversations}
        assert {one for group in store._conversations.values() for one in group} == there
        assert {key: kept for kept in alive for key in kept.keys} == store._index
        assert sum(kept.size for kept in alive) == store.stats(now).bytes <= 8_000
        assert len(alive) == store.stats(now).entries <= 4
        assert all(kept.keys for kept in alive)
        gone = sum(count for fate, count in store.stats(now).fates.items() if fate not in (Fate.LATE, Fate.TOO_LARGE))
        assert store.stats(now).stored == len(alive) + gone
