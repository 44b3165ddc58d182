"""What is said to engines about leases, what of their answers is believed, and that without leases nothing runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from pd_router.core.leases import Batch, Why
from pd_router.core.store import Entry, Fate
from pd_router.shell.exchange import Address, Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.lease_keeper import MAX_ANSWER, LeaseKeeper, Others, Refused, Used, read_answer
from pd_router.shell.metrics import Metrics
from pd_wire.lease import Lease
from support.waiting import until
from unit.router.store_behaviour import LEASED, SHARED, entry

TOKEN, OTHER = "a" * 32, "b" * 32
MEMBER = Member("d1", "decode", Address("127.0.0.1", 8200), "g", incarnation=1)


class Pool:
    """Answers at once, or fails; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, dict[str, int]]] = []
        self.fault: LegError | None = None
        self.status = 200
        self.body: bytes | None = None
        self.at_work = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def request(self, address: Address, head: bytes, body: bytes, within: float) -> Exchange:
        assert address == MEMBER.address
        said = {one["token"]: one["seconds"] for one in json.loads(body)["leases"]}
        self.asked.append((head, said))
        self.at_work.set()
        await self.go_on.wait()
        if self.fault is not None:
            raise self.fault
        exchange = Exchange(_Wire(), 0.0, asyncio.get_running_loop())
        answer = {"leases": [{"token": token, "seconds": seconds} for token, seconds in said.items()]}
        exchange.got_head(self.status)
        exchange.got_data(json.dumps(answer).encode() if self.body is None else self.body)
        exchange.finish()
        return exchange


class _Wire:
    lane = None

    def close(self) -> None:
        """Nothing to close."""

    pause = resume = close


class Scene:
    def __init__(self, authorization: str = "", others: Others | None = None) -> None:
        self.let_go: list[str] = []
        self.pool = Pool()
        self.now = 100.0
        self.members = {"d1": MEMBER}
        self.keeper = LeaseKeeper(
            self.pool,  # type: ignore[arg-type]
            self.members.get,
            Metrics(),
            lambda: self.now,
            lambda: authorization,
            0.0,
            self.let_go.append,
            others,
        )

    @property
    def timer(self) -> asyncio.TimerHandle | None:
        return self.keeper._timer

    async def told(self, count: int) -> None:
        async def seen() -> bool:
            self.now += 1.0
            self.keeper._ring()
            return len(self.pool.asked) >= count and not self.keeper._running

        await until(seen)


def kept(token: str = TOKEN, **more: Any) -> Entry:
    return entry(1, arrived=100.0, **{**LEASED, "pd_lease": f"{token}-60", **more})


async def test_without_leases_nothing_runs() -> None:
    scene = Scene()
    plain = entry(1, arrived=100.0, **SHARED)
    assert scene.keeper.begin(plain) is None
    assert not scene.keeper.hold(plain, 60.0, exact=True)
    scene.keeper.dropped("d1", "", Fate.EVICTED)
    assert scene.keeper.begin(entry(1)) is None
    assert (scene.timer, scene.pool.asked) == (None, [])
    assert scene.keeper.describe() == {"kept": 0, "renewed": 0, "released": 0, "lost": 0, "failures": 0}


async def test_a_lease_without_a_right_starts_no_timer_and_one_with_it_stops_it() -> None:
    scene = Scene()
    used = scene.keeper.begin(kept())
    assert used == Used("d1", Lease(TOKEN, 60))
    assert scene.timer is not None
    assert scene.keeper.describe()["kept"] == 1
    scene.keeper.end(used)
    assert scene.keeper.describe()["kept"] == 0
    scene.now += 61.0
    scene.keeper._ring()
    assert (scene.timer, scene.pool.asked) == (None, [])


async def test_what_has_run_out_is_left_alone_unless_another_process_may_have_prolonged_it() -> None:
    scene = Scene()
    scene.now += 61.0
    old = kept()
    assert scene.keeper.begin(old) is None
    # When its handle goes, its engine need not hear of it.
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.EVICTED)
    assert scene.timer is None
    old = kept(OTHER)
    old.own = False
    used = scene.keeper.begin(old)
    assert used is not None
    await scene.told(1)
    scene.keeper.release(*used, Why.SUPERSEDED)
    scene.keeper.end(used)
    await scene.told(2)
    assert [said for _, said in scene.pool.asked] == [{OTHER: 60}, {OTHER: 0}]
    assert scene.keeper.describe()["lost"] == 0


async def test_what_an_engine_is_sent() -> None:
    scene = Scene("Bearer own")
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.SUPERSEDED)
    scene.keeper.hold(kept(OTHER), 5.0, exact=True)
    await scene.told(1)
    [(head, said)] = scene.pool.asked
    assert said == {TOKEN: 0, OTHER: 4}
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /pd/v1/leases HTTP/1.1"
    assert lines[-2:] == ["", ""]
    assert {"host: 127.0.0.1:8200", "content-type: application/json", "authorization: Bearer own"} <= set(lines)


async def test_for_an_engine_that_is_not_there_nothing_is_kept() -> None:
    scene = Scene()
    scene.members.clear()
    assert scene.keeper.begin(kept()) is None
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.ENDED)
    assert not scene.keeper.hold(kept(), 600.0, exact=True)
    scene.members["d1"] = MEMBER
    assert scene.keeper.begin(kept(incarnation="0")) is None
    assert not scene.keeper.hold(kept(incarnation="0"), 600.0, exact=True)
    assert scene.timer is None
    scene.members["d1"] = MEMBER
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.ENDED)
    assert scene.keeper.hold(kept(OTHER), 600.0, exact=True)
    scene.members.clear()
    scene.now += 10.0
    scene.keeper._ring()
    assert (scene.pool.asked, scene.timer) == ([], None)
    assert scene.let_go == [TOKEN, TOKEN, OTHER]


@pytest.mark.parametrize(
    ("status", "body", "fault", "reason"),
    [
        (400, None, None, "refused"),
        (404, None, None, "refused"),
        (503, None, None, "status_5xx"),
        (200, b"no", None, "malformed_answer"),
        (200, b"[]", None, "malformed_answer"),
        (200, None, LegError(Failure.CONNECT), "connect"),
        (200, None, LegError(Failure.TIMEOUT), "timeout"),
        (200, None, LegError(Failure.CLOSED), "closed"),
    ],
)
async def test_a_failure_is_counted_and_logged_once(
    status: int, body: bytes | None, fault: LegError | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    scene.pool.status, scene.pool.body, scene.pool.fault = status, body, fault
    for number in range(3):
        scene.keeper.release("d1", Lease(f"{number:032x}", 60), Why.ENDED)
        await scene.told(number + 1)
    metrics, asked = scene.keeper.metrics, len(scene.pool.asked)
    assert (metrics.failures[reason].value, scene.keeper.describe()["failures"]) == (asked, asked)
    assert sum(count.value for count in metrics.released.values()) == 0
    assert [record.getMessage() for record in caplog.records].count(
        f"engine d1 does not prolong leases: {reason}; they run out there"
    ) == 1
    assert not any(f"{number:032x}" in caplog.text for number in range(3))
    scene.pool.status, scene.pool.body, scene.pool.fault = 200, None, None
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.ENDED)
    await scene.told(asked + 1)
    assert metrics.released["ended"].value == 4, "it hears now what it has missed"
    scene.pool.fault = LegError(Failure.CONNECT)
    scene.keeper.release("d1", Lease(OTHER, 60), Why.ENDED)
    await scene.told(asked + 2)
    assert len(caplog.records) == 2


class Workers:
    """What the other workers of one router know."""

    def __init__(self, scene: list[Scene]) -> None:
        self.gone: list[str] = []
        self.mine: list[str] = []
        self._scene = scene

    def ended(self, token: str) -> None:
        # Before the engine hears of it.
        assert not any(token in said for _, said in self._scene[0].pool.asked)
        self.gone.append(token)

    def taken(self, token: str) -> None:
        self.mine.append(token)

    async def elsewhere(self, tokens: Sequence[str]) -> Sequence[str]:
        return [token for token in tokens if token in self.gone]


def gone(*tokens: str) -> bytes:
    return json.dumps({"leases": [{"token": token, "seconds": 0} for token in tokens]}).encode()


async def test_what_another_worker_ended_or_took_is_neither_prolonged_nor_lost() -> None:
    scenes: list[Scene] = []
    workers = Workers(scenes)
    scene = Scene(others=workers)
    scenes.append(scene)
    scene.keeper.hold(kept(), 600.0, exact=True)
    scene.keeper.hold(kept(OTHER), 600.0, exact=True)
    runs = scene.keeper.begin(kept("c" * 32))
    await scene.told(1)
    assert scene.pool.asked[0][1] == {TOKEN: 60, OTHER: 60, "c" * 32: 60}
    workers.gone = [TOKEN, "c" * 32]
    scene.now += 40.0
    await scene.told(2)
    # A turn runs here on the third.
    assert scene.pool.asked[1][1] == {OTHER: 60, "c" * 32: 60}
    assert (scene.keeper.describe()["lost"], scene.keeper.describe()["kept"]) == (0, 2)
    assert scene.let_go == [], "it counts for whoever took it, or was given back by whoever ended it"
    scene.pool.body = gone(OTHER, "c" * 32)
    scene.now += 40.0
    await scene.told(3)
    assert (scene.keeper.describe()["lost"], scene.keeper.describe()["kept"]) == (1, 0)
    assert sorted(scene.let_go) == [OTHER, "c" * 32]
    assert runs is not None
    scene.keeper.end(runs)
    scene.pool.body = None
    scene.keeper.release("d1", Lease("d" * 32, 60), Why.ENDED)
    assert workers.gone == [TOKEN, "c" * 32, "d" * 32]
    await scene.told(4)
    assert scene.pool.asked[3][1] == {"d" * 32: 0}


async def test_a_batch_of_which_nothing_is_left_is_not_sent() -> None:
    scenes: list[Scene] = []
    workers = Workers(scenes)
    scene = Scene(others=workers)
    scenes.append(scene)
    workers.gone = [TOKEN]
    scene.keeper.hold(kept(), 600.0, exact=True)
    scene.now += 1.0
    scene.keeper._ring()
    await asyncio.gather(*scene.keeper._running)
    assert (scene.pool.asked, scene.keeper.describe()["kept"], scene.timer) == ([], 0, None)


async def test_what_an_earlier_turn_left_is_taken_by_who_holds_it() -> None:
    scenes: list[Scene] = []
    workers = Workers(scenes)
    scene = Scene(others=workers)
    scenes.append(scene)
    carried = kept(OTHER)
    carried.own = False
    assert scene.keeper.hold(kept(), 600.0, exact=True)
    assert scene.keeper.hold(carried, 600.0, exact=True)
    assert workers.mine == [OTHER]
    scene.members.clear()
    assert not scene.keeper.hold(carried, 600.0, exact=True)
    assert workers.mine == [OTHER]
    scene.keeper.stop()


async def test_what_is_lost_to_this_process_alone_is_counted_at_once() -> None:
    scene = Scene()
    scene.keeper.hold(kept(), 600.0, exact=True)
    scene.pool.body = gone(TOKEN)
    await scene.told(1)
    assert (scene.keeper.describe()["lost"], scene.let_go) == (1, [TOKEN])


async def test_whoever_counts_what_is_prolonged_hears_of_every_end() -> None:
    scene = Scene()
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.SUPERSEDED)
    scene.keeper.dropped("gone", f"{OTHER}-60", Fate.EVICTED)
    scene.keeper.release("d1", None, Why.ENDED)
    assert scene.let_go == [TOKEN, OTHER]
    scene.keeper.stop()


async def test_a_hanging_engine_holds_up_no_other_and_no_turn() -> None:
    scene = Scene()
    scene.pool.go_on.clear()
    scene.keeper.release("d1", Lease(TOKEN, 60), Why.ENDED)
    scene.now += 1.0
    scene.keeper._ring()
    await scene.pool.at_work.wait()
    used = scene.keeper.begin(kept(OTHER))
    assert used is not None
    scene.keeper.end(used)
    scene.keeper.stop()
    await asyncio.sleep(0)
    assert len(scene.pool.asked) == 1


async def test_a_process_that_is_gone_is_told_nothing() -> None:
    scene = Scene()
    used = scene.keeper.begin(kept())
    assert used is not None
    scene.keeper.release("d1", Lease(OTHER, 60), Why.ENDED)
    scene.keeper.forget("d1")
    scene.now += 100.0
    scene.keeper._ring()
    scene.keeper.end(used)
    assert (scene.pool.asked, scene.timer) == ([], None)


@pytest.mark.parametrize("fate", list(Fate))
async def test_which_fates_end_a_lease(fate: Fate) -> None:
    scene = Scene()
    scene.keeper.dropped("d1", f"{TOKEN}-60", fate)
    tells = {Fate.OVERWRITTEN, Fate.ENDED, Fate.EVICTED, Fate.EXPIRED}
    assert (scene.timer is not None) is (fate in tells)
    scene.keeper.stop()


BATCH = Batch(((TOKEN, 60), (OTHER, 0)), 0.0, None)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"leases": None},
        {"leases": []},
        {"leases": [{"token": TOKEN, "seconds": 60}]},
        {"leases": [{"token": OTHER, "seconds": 0}, {"token": TOKEN, "seconds": 60}]},
        {"leases": [{"token": TOKEN, "seconds": -1}, {"token": OTHER, "seconds": 0}]},
        {"leases": [{"token": TOKEN, "seconds": 1.5}, {"token": OTHER, "seconds": 0}]},
        {"leases": [{"token": TOKEN, "seconds": True}, {"token": OTHER, "seconds": 0}]},
        {"leases": [{"token": TOKEN}, {"token": OTHER, "seconds": 0}]},
        {"leases": [TOKEN, OTHER]},
    ],
)
def test_an_answer_that_is_none(found: Any) -> None:
    with pytest.raises(Refused):
        read_answer(json.dumps(found).encode(), BATCH)


def test_an_answer() -> None:
    answer = {"leases": [{"token": TOKEN, "seconds": 59, "more": 1}, {"token": OTHER, "seconds": 0}]}
    assert read_answer(json.dumps(answer).encode(), BATCH) == [59, 0]
    with pytest.raises(Refused):
        read_answer(b" " * MAX_ANSWER + json.dumps(answer).encode(), BATCH)
