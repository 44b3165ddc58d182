"""What every handle store does: a suite over the port. A subclass says how to make one, and how time passes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from pd_router.core.fields import Api
from pd_router.core.history import Reply
from pd_router.core.linking import Keyring
from pd_router.core.request import Prepared, prepare
from pd_router.core.store import Entry, Fate, HandleStore, Opened, PutResult, Stats, Ticket

ID_A, ID_B = b"0" + b"a" * 16, b"0" + b"b" * 16
HISTORY_1, HISTORY_2 = b"h" + b"1" * 16, b"h" + b"2" * 16
TTL = 450.0
ENGINE_TTL = 480.0
SHARED_TTL = 900.0
HOLDER = "d1"
PROCESS = "uid/start"
SHARED: dict[str, Any] = {
    "pd_mode": "Unpinned",
    "pd_moment": "0123456789abcdef-2a",
    "remote_blocks_expiry_time": None,
}

LEASED: dict[str, Any] = {**SHARED, "pd_mode": "Leased", "pd_lease": "0123456789abcdef" * 2 + "-60"}


def handle(host: str = "10.0.0.1", tokens: int = 1000, **more: Any) -> dict[str, Any]:
    """A handle as D makes it, as small as it may be."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "engine-1",
        "remote_request_id": "request-1",
        "remote_host": host,
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 1e6,
        **more,
    }


def entry(
    turn: int,
    arrived: float = 0.0,
    holder: str = HOLDER,
    incarnation: str = "1",
    ticket: Ticket | None = None,
    identity: str = PROCESS,
    **more: Any,
) -> Entry:
    """An entry for such a handle."""
    return Entry.of(
        handle(**more),
        holder=holder,
        incarnation=incarnation,
        generation="g",
        arrived=arrived,
        turn=turn,
        inexact=None,
        sent=arrived,
        identity=identity,
        ticket=ticket,
    )


REPLY = Reply({"role": "assistant", "content": "The same answer."}, None)


def _chat(number: int, messages: int) -> Prepared:
    """A turn of a conversation; every second one has an id, too."""
    said = [{"role": "user", "content": f"Question {number}"}, REPLY.message, {"role": "user", "content": "Go on."}]
    more = {"conversation_id": f"c{number}"} if number % 2 else {}
    raw = json.dumps({"model": "m", "messages": said[:messages], **more}).encode()
    return prepare(Api.CHAT, raw, {}, frozenset())


class Bench(Protocol):
    """A store with its clock."""

    @property
    def store(self) -> HandleStore:
        """The store."""

    @property
    def now(self) -> float:
        """Its clock."""

    async def wait(self, seconds: float) -> None:
        """Let time pass, for the store and all that it depends on."""

    def ticket(self, opened: Opened) -> Ticket | None:
        """The turn's ticket as it has become by now."""


class Benched:
    """The verbs as a turn uses them, with and without waiting."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def open(self, *keys: bytes) -> Opened:
        opened = self.bench.store.open(keys, self.bench.now)
        return opened if isinstance(opened, Opened) else await opened

    async def found(self, *keys: bytes) -> str | None:
        """The host in the handle that a turn with these keys takes."""
        found = (await self.open(*keys)).found
        return None if found is None else found.entry.remote_host

    async def put(self, opened: Opened, keys: Sequence[bytes], **more: Any) -> PutResult:
        arrived = more.pop("arrived", self.bench.now)
        kept = entry(opened.turn, arrived=arrived, ticket=self.bench.ticket(opened), **more)
        return await self.put_entry(kept, keys)

    async def put_entry(self, kept: Entry, keys: Sequence[bytes]) -> PutResult:
        result = self.bench.store.put(kept, keys, self.bench.now)
        return result if isinstance(result, PutResult) else await result

    async def leave(self, *keys: bytes, **more: Any) -> PutResult:
        """A turn that finds nothing and leaves a handle."""
        return await self.put(await self.open(), keys, **more)

    async def forget(self, *keys: bytes) -> None:
        forgotten = self.bench.store.forget(keys)
        if forgotten is not None:
            await forgotten

    @property
    def stats(self) -> Stats:
        return self.bench.store.stats(self.bench.now)


class StoreBehaviour:
    """Times are seconds on the bench's clock."""

    precision = 0.001
    """How near to a limit the clock can be brought."""

    async def make(self) -> Bench:
        raise NotImplementedError

    async def begin(self) -> Benched:
        return Benched(await self.make())

    # -- take ------------------------------------------------------------------------------------
    async def test_a_handle_is_taken_once_by_any_of_its_keys(self) -> None:
        for wanted in (ID_A, HISTORY_1):
            store = await self.begin()
            more: dict[str, Any] = {"tokens": 77, "x": {"y": [1, None]}}
            assert await store.put(await store.open(ID_A), [HISTORY_1, ID_A], **more) is PutResult.STORED
            found = (await store.open(HISTORY_2, wanted)).found
            assert found is not None
            assert found.key == wanted
            assert found.entry.parsed() == handle(**more)
            assert await store.found(HISTORY_1, ID_A) is None

    async def test_what_is_found_is_what_was_left(self) -> None:
        store = await self.begin()
        opened = await store.open(ID_A)
        left = entry(opened.turn, arrived=store.bench.now, ticket=opened.ticket, pd_proof={"v": 1})
        left.inexact, left.behind = "reasoning", 12
        left.sent -= 5.0
        assert await store.put_entry(left, [ID_A]) is PutResult.STORED
        await store.bench.wait(10.0)
        found = (await store.open(ID_A)).found
        assert found is not None
        for name in (
            "raw",
            "holder",
            "incarnation",
            "generation",
            "proven",
            "inexact",
            "remote_tokens",
            "groups",
            "behind",
        ):
            assert getattr(found.entry, name) == getattr(left, name), name
        # The younger it looks, the longer it would be used: it may look older only, and not by much.
        for name in ("arrived", "sent"):
            assert 0 <= getattr(left, name) - getattr(found.entry, name) <= 2 * self.precision, name

    async def test_keys_are_tried_in_order(self) -> None:
        store = await self.begin()
        await store.leave(ID_A, host="by.id")
        await store.leave(HISTORY_1, host="by.history")
        assert await store.found(HISTORY_1, ID_A) == "by.history"
        assert await store.found(HISTORY_1, ID_A) == "by.id"

    async def test_nothing_is_nothing(self) -> None:
        store = await self.begin()
        assert await store.found(ID_A) is None
        assert await store.found() is None
        await store.forget(ID_A)
        await store.forget()
        assert store.stats.stored == 0

    async def test_a_handle_that_was_not_sent_may_be_put_back(self) -> None:
        """Decode served the turn alone, and left none of its own: the old one stays, as old as it is."""
        store = await self.begin()
        await store.leave(ID_A)
        await store.bench.wait(TTL - 20.0)
        opened = await store.open(ID_A)
        assert opened.found is not None
        back = replace(opened.found.entry, keys=(), turn=opened.turn, ticket=store.bench.ticket(opened), behind=5)
        assert await store.put_entry(back, [ID_A]) is PutResult.STORED
        again = await store.open(ID_A)
        assert again.found is not None
        assert again.found.entry.behind == 5
        back = replace(again.found.entry, keys=(), turn=again.turn, ticket=store.bench.ticket(again))
        assert await store.put_entry(back, [ID_A]) is PutResult.STORED
        await store.bench.wait(20.0)
        assert await store.found(ID_A) is None

    async def test_tenants_with_equal_ids_and_equal_texts_never_meet(self) -> None:
        """10,000 turns of two tenants, whose conversations are the same word by word (IS-03)."""
        store = await self.begin()
        ring = Keyring(b"a secret of 32 bytes and no more")
        chance = random.Random(7)
        last: dict[str, list[str | None]] = {"ann": [None] * 20, "bob": [None] * 20}
        firsts, seconds = ([_chat(number, messages) for number in range(20)] for messages in (1, 3))
        for turn in range(10_000):
            tenant, number = chance.choice(("ann", "bob")), chance.randrange(20)
            opened = await store.open(*ring.lookup_keys(tenant, seconds[number]))
            found = None if opened.found is None else opened.found.entry.remote_host
            assert found == last[tenant][number]
            last[tenant][number] = None
            if chance.random() < 0.9:
                host = f"{tenant}-{turn}"
                keys = ring.store_keys(tenant, firsts[number], REPLY)
                assert await store.put(opened, keys, host=host) is PutResult.STORED
                last[tenant][number] = host

    # -- time ------------------------------------------------------------------------------------
    async def test_a_handle_lives_for_the_routers_ttl(self) -> None:
        near = self.precision
        for age, alive in ((0.0, True), (TTL - near, True), (TTL, False), (TTL + near, False), (1e6, False)):
            store = await self.begin()
            await store.leave(ID_A)
            await store.bench.wait(age)
            assert (await store.found(ID_A) is not None) is alive, age

    async def test_age_counts_from_the_arrival_and_not_from_the_put(self) -> None:
        for more, alive in ((10.0 - self.precision, True), (10.0, False)):
            store = await self.begin()
            opened = await store.open(ID_A)
            arrived = store.bench.now
            await store.bench.wait(TTL - 10.0)
            await store.put(opened, [ID_A], arrived=arrived)
            await store.bench.wait(more)
            assert (await store.found(ID_A) is not None) is alive, more

    # -- turns -----------------------------------------------------------------------------------
    async def test_turn_numbers_rise(self) -> None:
        store = await self.begin()
        numbers = [(await store.open(*keys)).turn for keys in ([ID_A], [ID_B], [ID_A], [], [HISTORY_1])]
        assert numbers == sorted(set(numbers))

    async def test_a_late_finish_never_replaces_a_newer_turn(self) -> None:
        store = await self.begin()
        old, new = await store.open(ID_A), await store.open(ID_A)
        assert await store.put(new, [ID_A], host="new") is PutResult.STORED
        assert await store.put(old, [ID_A], host="old") is PutResult.LATE
        assert await store.found(ID_A) == "new"

    async def test_nor_one_that_has_begun_or_was_taken_or_left_nothing(self) -> None:
        store = await self.begin()
        old, new = await store.open(ID_A), await store.open(ID_A)
        assert await store.put(old, [ID_A]) is PutResult.LATE
        await store.put(new, [ID_A])
        newest = await store.open(ID_A)
        assert newest.found is not None
        assert await store.put(new, [ID_A]) is PutResult.LATE
        await store.forget(ID_A)
        assert await store.put(old, [ID_A]) is PutResult.LATE
        assert await store.put(newest, [ID_A]) is PutResult.STORED

    async def test_a_late_finish_may_still_be_found_by_its_history(self) -> None:
        store = await self.begin()
        old, new = await store.open(ID_A), await store.open(ID_A)
        assert await store.put(old, [HISTORY_1, ID_A], host="old") is PutResult.PARTLY_LATE
        assert await store.put(new, [HISTORY_2, ID_A], host="new") is PutResult.STORED
        assert await store.found(ID_A) == "new"
        assert await store.found(HISTORY_1) == "old"

    async def test_a_newer_handle_replaces_an_older_one_under_the_same_keys(self) -> None:
        store = await self.begin()
        old, new = await store.open(), await store.open()
        await store.put(old, [HISTORY_1, ID_A], host="old")
        await store.put(new, [HISTORY_1, ID_A], host="new")
        assert (store.stats.fates[Fate.OVERWRITTEN], store.stats.stored) == (1, 2)
        assert await store.found(ID_A) == "new"
        assert await store.found(HISTORY_1) is None

    async def test_an_older_handle_stays_as_long_as_a_key_of_its_own_leads_there(self) -> None:
        store = await self.begin()
        old, new = await store.open(), await store.open()
        await store.put(old, [HISTORY_1, ID_A], host="old")
        await store.put(new, [HISTORY_2, ID_A], host="new")
        assert store.stats.fates.get(Fate.OVERWRITTEN, 0) == 0
        assert await store.found(HISTORY_1) == "old"
        assert await store.found(ID_A) == "new"

    # -- leaving ---------------------------------------------------------------------------------
    async def test_forget_drops_what_the_keys_lead_to(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, ID_A)
        await store.leave(ID_B)
        await store.forget(ID_A, HISTORY_2)
        assert await store.found(HISTORY_1, ID_A) is None
        assert store.stats.fates[Fate.FORGOTTEN] == 1
        assert await store.found(ID_B) is not None

    async def test_without_a_key_nothing_is_kept(self) -> None:
        store = await self.begin()
        assert await store.leave() is PutResult.NO_KEY
        assert store.stats.stored == 0

    async def test_what_can_never_fit_is_refused_and_evicts_nobody(self) -> None:
        store = await self.begin()
        await store.leave(ID_A)
        assert await store.leave(ID_B, blob="x" * (1 << 20)) is PutResult.TOO_LARGE
        assert store.stats.fates[Fate.TOO_LARGE] == 1
        assert await store.found(ID_A) is not None

    # -- handles to blocks that nobody keeps -----------------------------------------------------
    async def test_a_shared_handle_stays_for_any_number_of_turns(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, ID_A, **SHARED)
        turns = [await store.open(HISTORY_1, ID_A) for _ in range(3)]
        assert all(turn.found is not None and turn.found.entry.shared for turn in turns)
        assert len({turn.turn for turn in turns}) == 3
        assert await store.found(ID_A) is not None
        assert store.stats.fates.get(Fate.TAKEN, 0) == 0
        await store.bench.wait(TTL + 1.0)
        assert await store.found(HISTORY_1, ID_A) is not None
        await store.bench.wait(SHARED_TTL - TTL)
        assert await store.found(HISTORY_1, ID_A) is None

    async def test_a_newer_turn_takes_the_id_over_and_history_still_leads_to_the_fork(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, ID_A, host="first", **SHARED)
        one, other = await store.open(HISTORY_1), await store.open(HISTORY_1)
        await store.put(other, [HISTORY_2, ID_A], host="second", **SHARED)
        assert await store.put(one, [b"h" + b"3" * 16, ID_A], host="late", **SHARED) is PutResult.PARTLY_LATE
        assert await store.found(ID_A) == "second"
        assert await store.found(HISTORY_1) == "first"
        assert await store.found(b"h" + b"3" * 16) == "late"

    async def test_a_turn_that_leaves_nothing_takes_no_shared_handle_away(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, **SHARED)
        await store.forget(HISTORY_1)
        assert await store.found(HISTORY_1) is not None
        assert store.stats.fates.get(Fate.FORGOTTEN, 0) == 0

    async def test_a_shared_handle_pins_nothing(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, **SHARED)
        await store.leave(HISTORY_2, tokens=70)
        found = (await store.open(HISTORY_1)).found
        assert found is not None
        store.bench.store.spent(found.entry)
        assert store.stats.pinned_tokens == {"d1": 70}

    # -- leases ----------------------------------------------------------------------------------
    async def test_a_lease_is_found_with_its_handle_unless_it_was_ended(self) -> None:
        store = await self.begin()
        await store.leave(ID_A, **LEASED)
        opened = await store.open(ID_B)
        without = entry(opened.turn, arrived=store.bench.now, ticket=store.bench.ticket(opened), **LEASED)
        without.lease = ""
        await store.put_entry(without, [ID_B])
        for key, lease in ((ID_A, LEASED["pd_lease"]), (ID_B, "")):
            found = (await store.open(key)).found
            assert found is not None
            assert (found.entry.shared, found.entry.lease) == (True, lease)

    async def test_who_takes_the_last_key_is_told_of_the_lease(self) -> None:
        store = await self.begin()
        told: list[Any] = []
        store.bench.store.report_to(lambda *one: told.append(one))
        await store.leave(HISTORY_1, **LEASED)
        await store.leave(HISTORY_1, **{**LEASED, "pd_lease": "f" * 32 + "-9"})
        assert told == [(HOLDER, LEASED["pd_lease"], Fate.OVERWRITTEN)]

    async def test_nobody_is_told_of_a_lease_that_moves_to_new_keys(self) -> None:
        store = await self.begin()
        told: list[Any] = []
        store.bench.store.report_to(lambda *one: told.append(one))
        await store.leave(ID_A, **LEASED)
        opened = await store.open(ID_A)
        assert opened.found is not None
        moved = opened.found.entry.lease
        back = replace(opened.found.entry, keys=(), turn=opened.turn, ticket=store.bench.ticket(opened))
        assert await store.put_entry(back, [ID_A]) is PutResult.STORED
        assert [lease for _, lease, _ in told if lease == moved] == []

    async def test_a_repeated_turn_finds_the_lease_that_its_first_try_has_carried_on(self) -> None:
        """By the history, where the handle of the turn before still is; and it may carry it on as well."""
        store = await self.begin()
        told: list[Any] = []
        store.bench.store.report_to(lambda *one: told.append(one))
        await store.leave(ID_A, HISTORY_1, **LEASED)
        for _ in range(2):
            opened = await store.open(HISTORY_1)
            assert opened.found is not None
            assert opened.found.entry.lease == LEASED["pd_lease"]
            again = replace(opened.found.entry, keys=(), turn=opened.turn, ticket=store.bench.ticket(opened))
            assert await store.put_entry(again, [ID_A]) is PutResult.STORED
        assert told == []

    # -- the end of a conversation ---------------------------------------------------------------
    async def end(self, store: Benched, keys: Sequence[bytes] = (), conversations: Sequence[str] = ()) -> bool:
        ended = store.bench.store.end(keys, conversations, store.bench.now)
        return ended if isinstance(ended, bool) else await ended

    async def test_an_end_drops_all_of_a_conversation_and_tells_of_its_leases(self) -> None:
        store = await self.begin()
        told: list[Any] = []
        store.bench.store.report_to(lambda *one: told.append(one))
        ours, others = "aa" * 16, "bb" * 16
        leases = [f"{number:032x}-60" for number in range(4)]
        for key, conversation, more in (
            (ID_A, ours, {**LEASED, "pd_lease": leases[0]}),
            (HISTORY_1, ours, {**LEASED, "pd_lease": leases[1]}),
            (HISTORY_2, ours, {}),
            (ID_B, others, {**LEASED, "pd_lease": leases[3]}),
        ):
            opened = await store.open()
            left = entry(opened.turn, arrived=store.bench.now, ticket=store.bench.ticket(opened), **more)
            left.conversations = (conversation,)
            await store.put_entry(left, [key])
        assert await self.end(store, conversations=[ours, "cc" * 16])
        assert sorted(told) == [(HOLDER, lease, Fate.ENDED) for lease in leases[:2]]
        assert [await store.found(key) for key in (ID_A, HISTORY_1, HISTORY_2)] == [None] * 3
        assert await store.found(ID_B) is not None
        assert store.stats.fates[Fate.ENDED] == 3
        assert await self.end(store, conversations=[ours])
        assert store.stats.fates[Fate.ENDED] == 3

    async def test_an_end_drops_what_its_keys_lead_to(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, ID_A, **SHARED)
        await store.leave(HISTORY_2)
        assert await self.end(store, [HISTORY_1, ID_B])
        assert await store.found(HISTORY_1, ID_A) is None
        assert await store.found(HISTORY_2) is not None

    # -- what engines still hold -----------------------------------------------------------------
    async def test_pinned_tokens_outlive_the_take_until_sent_or_timed_out(self) -> None:
        store = await self.begin()
        await store.leave(HISTORY_1, tokens=100)
        await store.leave(HISTORY_2, tokens=50, holder="d2")
        stats = store.stats
        assert (stats.pinned_tokens, stats.pinned_handles) == ({"d1": 100, "d2": 50}, {"d1": 1, "d2": 1})
        found = (await store.open(HISTORY_2)).found
        assert found is not None
        assert store.stats.pinned_tokens["d2"] == 50
        store.bench.store.spent(found.entry)
        assert store.stats.pinned_tokens == {"d1": 100, "d2": 0}
        await store.bench.wait(ENGINE_TTL - 1.0)
        assert store.stats.pinned_tokens["d1"] == 100
        await store.bench.wait(ENGINE_TTL * 0.2)
        assert store.stats.pinned_tokens["d1"] == 0

    async def test_pinned_tokens_of_all_times_within_the_ttl_add_up(self) -> None:
        store = await self.begin()
        for number in range(10):
            await store.leave(b"h%016d" % number, tokens=10)
            await store.bench.wait(40.0)
        assert store.stats.pinned_tokens == {"d1": 100}
        await store.bench.wait(280.0)
        assert 0 < store.stats.pinned_tokens["d1"] < 100

    async def test_a_dead_engine_pins_nothing(self) -> None:
        store = await self.begin()
        await store.leave(ID_A)
        store.bench.store.purge_holder("d1", store.bench.now)
        assert store.stats.pinned_tokens.get("d1", 0) == 0
