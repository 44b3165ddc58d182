"""The store in memory: the port's behaviour, and that it stays bounded under traffic that never comes back (HL-27)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.cutting import strip_json
from pd_router.core.store import ENTRY_OVERHEAD, Entry, Fate
from pd_router.core.store_memory import MemoryStore
from unit.router.store_behaviour import ENGINE_TTL, TTL, StoreBehaviour, entry, handle


class TestMemoryStore(StoreBehaviour):
    def make(self, cap_bytes: int = 1 << 20, cap_entries: int = 1000) -> MemoryStore:
        return MemoryStore(cap_bytes, cap_entries, TTL, ENGINE_TTL)


def test_a_port_without_a_factory_says_so() -> None:
    with pytest.raises(NotImplementedError):
        StoreBehaviour().make()


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
    store = MemoryStore(8_000, 4, TTL, ENGINE_TTL)
    now, turns, taken = 0.0, [0], []
    for number, (verb, keys) in enumerate(steps):
        if verb == "begin":
            turns.append(store.begin(sorted(keys), now))
        elif verb == "put":
            kept = entry(turns[number % len(turns)], arrived=now, holder=f"d{number % 2}")
            store.put(kept, sorted(keys), now)
        elif verb == "take":
            found = store.take(sorted(keys), now)
            if found is not None:
                assert found.key in keys
                assert found.entry not in taken
                taken.append(found.entry)
        elif verb == "forget":
            store.forget(sorted(keys))
        elif verb == "purge":
            store.purge_holder("d0", now)
        else:
            now += TTL / 3
        alive = list(store._entries.values())
        assert {key: kept for kept in alive for key in kept.keys} == store._index
        assert sum(kept.size for kept in alive) == store.stats(now).bytes <= 8_000
        assert len(alive) == store.stats(now).entries <= 4
        assert all(kept.keys for kept in alive)
        gone = sum(count for fate, count in store.stats(now).fates.items() if fate not in (Fate.LATE, Fate.TOO_LARGE))
        assert store.stats(now).stored == len(alive) + gone
