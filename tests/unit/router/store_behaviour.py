"""What every handle store does: a suite over the port. A subclass says how to make one."""

from __future__ import annotations

from typing import Any

from pd_router.core.store import Entry, Fate, PutResult
from pd_router.core.store_memory import MemoryStore

ID_A, ID_B = b"0" + b"a" * 16, b"0" + b"b" * 16
HISTORY_1, HISTORY_2 = b"h" + b"1" * 16, b"h" + b"2" * 16
TTL = 450.0
ENGINE_TTL = 480.0


def handle(host: str = "10.0.0.1", tokens: int = 1000, **more: Any) -> dict[str, Any]:
    return {"remote_host": host, "remote_num_tokens": tokens, "remote_block_ids": [[1, 2]], **more}


def entry(turn: int, arrived: float = 0.0, holder: str = "d1", incarnation: str = "1", **more: Any) -> Entry:
    return Entry.of(
        handle(**more),
        holder=holder,
        incarnation=incarnation,
        generation="g",
        arrived=arrived,
        turn=turn,
        inexact=None,
    )


class StoreBehaviour:
    """Times are seconds on one clock that starts at 0."""

    def make(self, cap_bytes: int = 1 << 20, cap_entries: int = 1000) -> MemoryStore:
        raise NotImplementedError

    # -- take ------------------------------------------------------------------------------------
    def test_a_handle_is_taken_once_by_any_of_its_keys(self) -> None:
        for wanted in (ID_A, HISTORY_1):
            store = self.make()
            turn = store.begin([ID_A], 0.0)
            kept = entry(turn, tokens=77, x={"y": [1, None]})
            assert store.put(kept, [HISTORY_1, ID_A], 0.0) is PutResult.STORED
            found = store.take([HISTORY_2, wanted], 1.0)
            assert found is not None
            assert found.key == wanted
            assert found.entry.parsed() == handle(tokens=77, x={"y": [1, None]})
            assert store.take([HISTORY_1, ID_A], 1.0) is None

    def test_keys_are_tried_in_order(self) -> None:
        store = self.make()
        store.put(entry(1, host="by id"), [ID_A], 0.0)
        store.put(entry(2, host="by history"), [HISTORY_1], 0.0)
        found = store.take([HISTORY_1, ID_A], 1.0)
        assert found is not None
        assert found.entry.remote_host == "by history"
        other = store.take([HISTORY_1, ID_A], 1.0)
        assert other is not None
        assert other.entry.remote_host == "by id"

    def test_nothing_is_nothing(self) -> None:
        store = self.make()
        assert store.take([ID_A], 0.0) is None
        assert store.take([], 0.0) is None
        store.forget([ID_A])
        assert store.stats(0.0).entries == 0

    # -- time ------------------------------------------------------------------------------------
    def test_a_handle_lives_for_the_routers_ttl(self) -> None:
        for age, alive in ((0.0, True), (TTL - 0.001, True), (TTL, False), (TTL + 0.001, False), (1e9, False)):
            store = self.make()
            store.put(entry(1, arrived=100.0), [ID_A], 100.0)
            assert (store.take([ID_A], 100.0 + age) is not None) is alive, age

    def test_expiry_frees_memory_without_a_look_up(self) -> None:
        store = self.make()
        for number in range(10):
            store.put(entry(number, arrived=float(number)), [b"h%016d" % number], float(number))
        assert store.expire(TTL + 4.0) == 5
        assert store.stats(TTL + 4.0).entries == 5
        assert store.expire(2 * TTL) == 5
        assert store.stats(2 * TTL).bytes == 0
        assert store.stats(2 * TTL).fates[Fate.EXPIRED] == 10

    # -- turns -----------------------------------------------------------------------------------
    def test_turn_numbers_rise(self) -> None:
        store = self.make()
        numbers = [store.begin(keys, 0.0) for keys in ([ID_A], [ID_B], [ID_A], [], [HISTORY_1])]
        assert numbers == sorted(set(numbers))

    def test_a_late_finish_never_replaces_a_newer_turn(self) -> None:
        store = self.make()
        old, new = store.begin([ID_A], 0.0), store.begin([ID_A], 1.0)
        assert store.put(entry(new, host="new"), [ID_A], 2.0) is PutResult.STORED
        assert store.put(entry(old, host="old"), [ID_A], 3.0) is PutResult.LATE
        found = store.take([ID_A], 4.0)
        assert found is not None
        assert found.entry.remote_host == "new"

    def test_nor_one_that_has_begun_or_was_taken_or_left_nothing(self) -> None:
        store = self.make()
        old, new = store.begin([ID_A], 0.0), store.begin([ID_A], 1.0)
        assert store.put(entry(old), [ID_A], 2.0) is PutResult.LATE
        store.put(entry(new), [ID_A], 3.0)
        newest = store.begin([ID_A], 4.0)
        assert store.take([ID_A], 4.0) is not None
        assert store.put(entry(new), [ID_A], 5.0) is PutResult.LATE
        store.forget([ID_A])
        assert store.put(entry(old), [ID_A], 6.0) is PutResult.LATE
        assert store.put(entry(newest), [ID_A], 7.0) is PutResult.STORED

    def test_a_late_finish_may_still_be_found_by_its_history(self) -> None:
        store = self.make()
        old, new = store.begin([ID_A], 0.0), store.begin([ID_A], 1.0)
        assert store.put(entry(old, host="old"), [HISTORY_1, ID_A], 2.0) is PutResult.PARTLY_LATE
        assert store.put(entry(new, host="new"), [HISTORY_2, ID_A], 3.0) is PutResult.STORED
        by_id = store.take([ID_A], 4.0)
        by_history = store.take([HISTORY_1], 4.0)
        assert by_id is not None
        assert by_history is not None
        assert (by_id.entry.remote_host, by_history.entry.remote_host) == ("new", "old")

    def test_a_newer_handle_replaces_an_older_one_under_the_same_keys(self) -> None:
        store = self.make()
        store.put(entry(1, host="old"), [HISTORY_1, ID_A], 0.0)
        store.put(entry(2, host="new"), [HISTORY_1, ID_A], 1.0)
        stats = store.stats(1.0)
        assert (stats.entries, stats.fates[Fate.OVERWRITTEN], stats.stored) == (1, 1, 2)
        found = store.take([ID_A], 2.0)
        assert found is not None
        assert found.entry.remote_host == "new"
        assert store.take([HISTORY_1], 2.0) is None

    # -- leaving ---------------------------------------------------------------------------------
    def test_forget_drops_what_the_keys_lead_to(self) -> None:
        store = self.make()
        store.put(entry(1), [HISTORY_1, ID_A], 0.0)
        store.put(entry(2), [ID_B], 0.0)
        store.forget([ID_A, HISTORY_2])
        assert store.take([HISTORY_1, ID_A], 1.0) is None
        assert store.stats(1.0).entries == 1
        assert store.stats(1.0).fates[Fate.FORGOTTEN] == 1

    def test_a_restarted_holder_leaves_nothing_behind(self) -> None:
        store = self.make()
        store.put(entry(1, holder="d1"), [HISTORY_1], 0.0)
        store.put(entry(2, holder="d2"), [HISTORY_2], 0.0)
        store.put(entry(3, holder="d1", incarnation="2"), [ID_A], 0.0)
        assert store.purge_holder("d1", 1.0) == 2
        assert store.take([HISTORY_1], 1.0) is None
        assert store.take([ID_A], 1.0) is None
        assert store.take([HISTORY_2], 1.0) is not None
        assert store.purge_holder("nobody", 1.0) == 0

    def test_without_a_key_nothing_is_kept(self) -> None:
        store = self.make()
        assert store.put(entry(1), [], 0.0) is PutResult.NO_KEY
        assert store.stats(0.0).entries == 0

    # -- bounds ----------------------------------------------------------------------------------
    def test_the_oldest_go_when_there_are_too_many(self) -> None:
        store = self.make(cap_entries=3)
        for number in range(5):
            store.put(entry(number), [b"h%016d" % number], float(number))
        stats = store.stats(5.0)
        assert (stats.entries, stats.fates[Fate.EVICTED]) == (3, 2)
        assert [store.take([b"h%016d" % number], 5.0) is not None for number in range(5)] == [False] * 2 + [True] * 3

    def test_the_oldest_go_when_they_are_too_big(self) -> None:
        store = self.make(cap_bytes=40_000)
        for number in range(40):
            store.put(entry(number, blob="x" * 4_000), [b"h%016d" % number], float(number))
            assert store.stats(0.0).bytes <= 40_000
        assert 2 <= store.stats(0.0).entries < 10
        assert store.take([b"h%016d" % 39], 40.0) is not None

    def test_what_can_never_fit_is_refused_and_evicts_nobody(self) -> None:
        store = self.make(cap_bytes=20_000)
        store.put(entry(1), [ID_A], 0.0)
        assert store.put(entry(2, blob="x" * 30_000), [ID_B], 0.0) is PutResult.TOO_LARGE
        assert store.stats(0.0).fates[Fate.TOO_LARGE] == 1
        assert store.take([ID_A], 1.0) is not None

    def test_a_full_store_still_replaces_its_own(self) -> None:
        store = self.make(cap_entries=1)
        store.put(entry(1), [ID_A], 0.0)
        assert store.put(entry(2, host="new"), [ID_A], 0.0) is PutResult.STORED
        found = store.take([ID_A], 1.0)
        assert found is not None
        assert found.entry.remote_host == "new"

    # -- what engines still hold -----------------------------------------------------------------
    def test_pinned_tokens_outlive_the_entry_until_sent_or_timed_out(self) -> None:
        store = self.make(cap_entries=1)
        first, second = entry(1, tokens=100), entry(2, tokens=50, holder="d2")
        store.put(first, [HISTORY_1], 0.0)
        store.put(second, [HISTORY_2], 0.0)
        stats = store.stats(1.0)
        assert stats.entries == 1
        assert (stats.pinned_tokens, stats.pinned_handles) == ({"d1": 100, "d2": 50}, {"d1": 1, "d2": 1})
        found = store.take([HISTORY_2], 1.0)
        assert found is not None
        assert store.stats(1.0).pinned_tokens["d2"] == 50
        store.spent(found.entry)
        assert store.stats(1.0).pinned_tokens == {"d1": 100, "d2": 0}
        assert store.stats(ENGINE_TTL - 1.0).pinned_tokens["d1"] == 100
        assert store.stats(ENGINE_TTL * 1.2).pinned_tokens["d1"] == 0

    def test_pinned_tokens_of_all_times_within_the_ttl_add_up(self) -> None:
        store = self.make()
        for number in range(10):
            store.put(entry(number, arrived=number * 40.0, tokens=10), [b"h%016d" % number], number * 40.0)
        assert store.stats(400.0).pinned_tokens == {"d1": 100}
        assert 0 < store.stats(ENGINE_TTL + 200.0).pinned_tokens["d1"] < 100

    def test_a_dead_engine_pins_nothing(self) -> None:
        store = self.make()
        store.put(entry(1), [ID_A], 0.0)
        store.purge_holder("d1", 1.0)
        assert store.stats(1.0).pinned_tokens.get("d1", 0) == 0
