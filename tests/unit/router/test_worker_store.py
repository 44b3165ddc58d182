"""What workers share through their supervisor: the store's behaviour over the wire's own bytes, limits, responses, and
that a supervisor who says nothing costs reuse and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import generate_latest

from pd_router.core.addresses import Endpoint
from pd_router.core.errors import ApiError
from pd_router.core.settings import Limits, Reuse, Settings
from pd_router.core.store import Opened, PutResult, Ticket
from pd_router.core.tenant_limits import TenantLimits
from pd_router.core.worker_wire import Kind, Message, Reader, write
from pd_router.shell.channel import Answer, Channel
from pd_router.shell.metrics import Metrics
from pd_router.shell.store_metrics import SharedStoreMetrics
from pd_router.shell.store_server import Desk, StoreServer
from pd_router.shell.worker_store import Line, Shared, WorkerStore
from support.waiting import until
from unit.router.store_behaviour import ENGINE_TTL, ID_A, ID_B, SHARED_TTL, TTL, Benched, StoreBehaviour, entry


def settings_of(**limits: Any) -> Settings:
    return Settings(
        Endpoint("127.0.0.1", 1),
        Endpoint("127.0.0.1", 2),
        reuse=Reuse(handle_ttl=TTL, engine_ttl=ENGINE_TTL, shared_ttl=SHARED_TTL, cap_bytes=1 << 20),
        tenant_limits=TenantLimits(**limits),
        limits=Limits(response_bytes=1 << 20),
    )


class Straight(Line):
    """A line without a socket: every word is written and read as on one."""

    def __init__(self, desk: Desk) -> None:
        self.up = True
        self.on_change = lambda _up: None
        self._desk = desk

    async def ask(self, verb: str, *words: Any, raw: bytes = b"") -> Message | None:
        answer = self._desk.handle(*self._carry(Kind.ASK, verb, words, raw))
        assert answer is not None
        [message] = Reader().feed(write(Kind.ANSWER, *answer))
        return message

    def tell(self, verb: str, *words: Any) -> None:
        self._desk.handle(*self._carry(Kind.TELL, verb, words, b""))

    tell_later = tell

    @staticmethod
    def _carry(kind: Kind, verb: str, words: tuple[Any, ...], raw: bytes) -> tuple[str, list[Any], bytes]:
        [message] = Reader().feed(write(kind, [verb, *words], raw))
        assert message.kind is kind
        return message.words[0], message.words[1:], message.raw


class WorkerBench:
    """One worker, and a supervisor with a clock moved by hand."""

    def __init__(self, server: StoreServer | None = None, incarnation: str = "1") -> None:
        self.now = 0.0
        self.server = server or StoreServer(settings_of(), lambda: self.now)
        self.asked: list[tuple[str, str, float]] = []
        bench = self

        class Store(WorkerStore):
            # The figures are shown by the supervisor; the suite asks the store.
            stats = staticmethod(lambda now: bench.server.store.stats(now))  # type: ignore[assignment]

        def incarnation_of(holder: str, identity: str, sent: float) -> str:
            self.asked.append((holder, identity, sent))
            return incarnation

        self.store = Store(Straight(self.server.desk()), SharedStoreMetrics(Metrics()), incarnation_of)

    async def wait(self, seconds: float) -> None:
        self.now += seconds

    def ticket(self, opened: Opened) -> Ticket | None:
        return opened.ticket


class TestWorkerStore(StoreBehaviour):
    async def make(self) -> WorkerBench:
        return WorkerBench()


async def test_what_one_worker_leaves_another_takes_and_judges_by_its_own_fleet() -> None:
    one = WorkerBench()
    other = WorkerBench(one.server, incarnation="7")
    await Benched(one).leave(ID_A, arrived=12.5)
    found = (await Benched(other).open(ID_A)).found
    assert found is not None
    assert found.entry.incarnation == "7"
    assert other.asked == [("d1", "uid/start", 12.5)]
    assert await Benched(one).found(ID_A) is None
    # What is pinned is one figure for all workers.
    assert one.server.store.stats(13.0).pinned_tokens == {"d1": 1000}
    other.store.spent(found.entry)
    assert one.server.store.stats(13.0).pinned_tokens == {"d1": 0}


async def test_turn_numbers_rise_over_all_workers() -> None:
    one = WorkerBench()
    workers = [Benched(one), Benched(WorkerBench(one.server))]
    slow = await workers[0].open(ID_A)
    quick = await workers[1].open(ID_A)
    assert await workers[1].put(quick, [ID_A], host="quick") is PutResult.STORED
    assert await workers[0].put(slow, [ID_A], host="slow") is PutResult.LATE
    assert await workers[0].found(ID_A) == "quick"


async def test_a_purge_by_one_worker_is_for_all() -> None:
    one = WorkerBench()
    other = Benched(WorkerBench(one.server))
    await Benched(one).leave(ID_A)
    await Benched(one).leave(ID_B, holder="d2")
    other.bench.store.purge_holder("d1", 1.0)
    assert await Benched(one).found(ID_A) is None
    assert await Benched(one).found(ID_B) is not None


# -- tenants -----------------------------------------------------------------------------------------
def shared_of(server: StoreServer, settings: Settings) -> tuple[Shared, Desk]:
    desk = server.desk()
    return Shared(Straight(desk), b"x" * 32, settings), desk


async def test_a_tenants_places_are_counted_over_all_workers() -> None:
    settings = settings_of(max_inflight=2)
    server = StoreServer(settings, lambda: 0.0)
    workers = [shared_of(server, settings)[0].meter for _ in range(3)]
    places = [await _wait(worker.enter("kéy\udc80", 0.0)) for worker in workers[:2]]
    with pytest.raises(ApiError) as caught:
        await _wait(workers[2].enter("kéy\udc80", 0.0))
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "tenant_concurrency_limit", 1)
    assert "2 requests at one time" in caught.value.message
    await _wait(workers[2].enter("another", 0.0))
    workers[0].leave(places[0])
    assert await _wait(workers[2].enter("kéy\udc80", 0.0)) is not None


async def test_a_worker_that_ends_gives_its_places_back() -> None:
    settings = settings_of(max_inflight=2)
    server = StoreServer(settings, lambda: 0.0)
    (dead, desk), (alive, _) = shared_of(server, settings), shared_of(server, settings)
    for _ in range(2):
        await _wait(dead.meter.enter("key", 0.0))
    with pytest.raises(ApiError):
        await _wait(alive.meter.enter("key", 0.0))
    desk.close()
    for _ in range(2):
        assert await _wait(alive.meter.enter("key", 0.0)) is not None


async def test_without_a_limit_nobody_is_asked() -> None:
    shared, _ = shared_of(StoreServer(settings_of()), settings_of())
    assert shared.meter.enter("key", 0.0) is None
    assert shared.retained.has_room("key", 10**9, 0.0) is True
    assert shared.retained.prolong("key", "d1", "token", 10**9, 600.0, 0.0) is True


async def test_what_a_tenant_retains_is_counted_over_all_workers() -> None:
    settings = settings_of(retained_tokens=100)
    server = StoreServer(settings, lambda: 0.0)
    (one, _), (other, _) = shared_of(server, settings), shared_of(server, settings)
    one.retained.add("key", "d1", 80, 0.0)
    assert await _wait(other.retained.has_room("key", 30, 0.0)) is False
    assert await _wait(other.retained.has_room("another", 30, 0.0)) is True
    other.retained.release("key", "d1", 80)
    assert await _wait(one.retained.has_room("key", 30, 0.0)) is True


async def test_leases_that_a_tenant_has_prolonged_are_counted_over_all_workers() -> None:
    settings = settings_of(retained_tokens=100)
    now = [0.0]
    server = StoreServer(settings, lambda: now[0])
    (one, _), (other, _) = shared_of(server, settings), shared_of(server, settings)
    assert await _wait(one.retained.prolong("kéy", "d1", "t1", 80, 600.0, 0.0)) is True
    assert await _wait(other.retained.prolong("kéy", "d1", "t2", 30, 600.0, 0.0)) is False
    assert await _wait(other.retained.prolong("another", "d1", "t3", 30, 600.0, 0.0)) is True
    other.retained.let_go("t1")
    assert await _wait(one.retained.prolong("kéy", "d1", "t2", 100, 600.0, 0.0)) is True
    now[0] = 600.0
    server.sweep()
    assert await _wait(one.retained.prolong("kéy", "d1", "t4", 100, 600.0, 0.0)) is True
    WorkerBench(server).store.purge_holder("d1", 0.0)
    assert await _wait(one.retained.prolong("kéy", "d2", "t5", 100, 600.0, 0.0)) is True
    other.retained.forget_holder("d2")  # where the store is not the supervisor's
    assert await _wait(one.retained.prolong("kéy", "d3", "t6", 100, 600.0, 0.0)) is True


async def test_a_lease_is_whose_who_took_it_last_until_one_ends_it() -> None:
    server = StoreServer(settings_of())
    (one, _), (other, _) = shared_of(server, settings_of()), shared_of(server, settings_of())
    assert await one.leases.elsewhere(["t"]) == []
    one.leases.taken("t")
    assert (await one.leases.elsewhere(["t"]), await other.leases.elsewhere(["t"])) == ([], ["t"])
    other.leases.taken("t")
    assert (await one.leases.elsewhere(["t"]), await other.leases.elsewhere(["t"])) == (["t"], [])
    one.leases.ended("t")
    other.leases.taken("t")
    assert (await one.leases.elsewhere(["t"]), await other.leases.elsewhere(["t"])) == (["t"], ["t"])


async def test_what_one_worker_ended_another_does_not_call_lost() -> None:
    server = StoreServer(settings_of())
    (one, _), (other, _) = shared_of(server, settings_of()), shared_of(server, settings_of())
    one.leases.ended("t1")
    one.leases.ended("t2")
    assert await other.leases.elsewhere(["t3", "t2"]) == ["t2"]
    for number in range(20_000):
        one.leases.ended(f"{number}")
    assert await other.leases.elsewhere(["t1", "19999"]) == ["19999"]
    assert len(server.leases) == 16_384


async def test_what_is_ended_counts_for_nobody_whoever_comes_late() -> None:
    settings = settings_of(retained_tokens=100)
    server = StoreServer(settings)
    (one, _), (other, _) = shared_of(server, settings), shared_of(server, settings)
    assert await _wait(one.retained.prolong("key", "d1", "t1", 100, 600.0, 0.0)) is True
    assert await _wait(other.retained.prolong("key", "d1", "t2", 100, 600.0, 0.0)) is False
    other.leases.ended("t1")
    assert await _wait(one.retained.prolong("key", "d1", "t1", 100, 600.0, 0.0)) is True
    assert await _wait(other.retained.prolong("key", "d1", "t2", 100, 600.0, 0.0)) is True


# -- responses ---------------------------------------------------------------------------------------
async def test_a_response_is_recalled_by_another_worker() -> None:
    settings = settings_of()
    server = StoreServer(settings)
    (one, _), (other, _) = shared_of(server, settings), shared_of(server, settings)
    big = 2**80
    assert await _wait(one.responses.put("key", "resp_1", None, [{"n": big}, {"text": "ü"}]))
    assert await _wait(other.responses.put("key", "resp_2", "resp_1", [{"x": 1}]))
    assert await _wait(one.responses.recall("key", "resp_2")) == [{"n": big}, {"text": "ü"}, {"x": 1}]
    assert await _wait(one.responses.recall("another", "resp_2")) is None
    assert await _wait(one.responses.recall("key", "resp_3")) is None


async def _wait(found: Any) -> Any:
    return await found if asyncio.iscoroutine(found) else found


# -- a supervisor that says nothing ------------------------------------------------------------------
class Heard:
    """A supervisor's end, and what it was asked."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.heard: list[str] = []

    def handle(self, verb: str, words: list[Any], raw: bytes) -> Answer | None:
        self.heard.append(verb)
        return self._desk.handle(verb, words, raw)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel, Heard]]:
    ours, theirs = socket.socketpair()
    supervised = Heard(StoreServer(settings_of()).desk())
    supervisor = await Channel.join(ours, supervised.handle, lambda: None)
    worker = await Channel.join(theirs, lambda *_: None, lambda: None)
    yield supervisor, worker, supervised
    await worker.end()
    await supervisor.end()


async def test_an_unanswered_question_is_a_miss_and_the_next_one_is_not_asked(
    ends: tuple[Channel, Channel, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, worker, supervised = ends
    monkeypatch.setattr("pd_router.shell.worker_store.WAIT_SECONDS", 0.05)
    monkeypatch.setattr("pd_router.shell.worker_store.LOOK_SECONDS", 0.01)
    line, metrics = Line(worker), Metrics()
    store = WorkerStore(line, SharedStoreMetrics(metrics), lambda *_: "1")
    watch = asyncio.create_task(line.watch())
    opened = await _opened(store)
    assert opened.turn == 1
    assert supervisor._transport is not None
    supervisor._transport.pause_reading()  # type: ignore[attr-defined]
    assert await _opened(store) == Opened(0, None)
    assert not line.up
    # From here on nothing is sent, and nothing waits.
    assert store.open([ID_A], 0.0) == Opened(0, None)
    assert store.put(entry(1), [ID_A], 0.0) is PutResult.UNAVAILABLE
    assert store.forget([ID_A]) is None
    page = generate_latest(metrics.registry).decode()
    assert "pd_router_handle_store_up 0.0" in page
    assert 'pd_router_handle_store_failures_total{kind="timeout",operation="open"} 1.0' in page
    assert 'pd_router_handle_store_skipped_total{operation="put"} 1.0' in page
    # The late answer is nobody's, and tells that the supervisor is back.
    supervisor._transport.resume_reading()  # type: ignore[attr-defined]

    async def up() -> bool:
        return line.up

    await until(up, pause=0.001)
    assert (await _opened(store)).turn == 3
    assert supervised.heard == ["open"] * 3
    assert "pd_router_handle_store_up 1.0" in generate_latest(metrics.registry).decode()
    watch.cancel()


async def test_news_that_can_wait_come_with_the_next_question_or_by_themselves(
    ends: tuple[Channel, Channel, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_router.shell.worker_store.LOOK_SECONDS", 0.01)
    _, worker, supervised = ends
    line = Line(worker)
    line.tell_later("purge", "d1")
    await line.ask("open", [])
    assert supervised.heard == ["purge", "open"]
    line.tell_later("purge", "d2")
    watch = asyncio.create_task(line.watch())

    async def heard() -> bool:
        return supervised.heard == ["purge", "open", "purge"]

    await until(heard)
    watch.cancel()


async def test_a_turn_that_could_not_be_opened_leaves_nothing(ends: tuple[Channel, Channel, Heard]) -> None:
    _, worker, supervised = ends
    store = WorkerStore(Line(worker), SharedStoreMetrics(Metrics()), lambda *_: "1")
    assert store.put(entry(0), [ID_A], 0.0) is PutResult.UNAVAILABLE
    assert supervised.heard == []


async def test_a_fault_in_one_answer_fails_that_question_only(
    ends: tuple[Channel, Channel, Heard], caplog: pytest.LogCaptureFixture
) -> None:
    _, worker, _ = ends
    line = Line(worker)
    assert await line.ask("no such verb") is None
    assert await line.ask("has_room", "key", 1) is not None
    assert "no such verb failed" in caplog.text


async def test_with_the_other_end_gone_every_question_is_a_miss(ends: tuple[Channel, Channel, Heard]) -> None:
    supervisor, worker, _ = ends
    line = Line(worker)
    await supervisor.end()
    assert await line.ask("open", []) is None
    line.tell("purge", "d1")


async def _opened(store: WorkerStore) -> Opened:
    opened = store.open([ID_A], 0.0)
    return opened if isinstance(opened, Opened) else await opened
