"""What a supervisor does about workers that cannot be started or stand still; the rest needs processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pd_router.core.addresses import Endpoint
from pd_router.core.settings import Settings
from pd_router.shell import supervisor
from pd_router.shell.channel import ChannelError
from pd_router.shell.supervisor import Supervisor, Worker, command
from support.waiting import until


def make(workers: int = 2) -> Supervisor:
    return Supervisor(Settings(Endpoint("127.0.0.1", 0), Endpoint("127.0.0.1", 0), workers=workers), [])


class Process:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class Answering:
    """A worker's channel."""

    def __init__(self, answer: Callable[[asyncio.Future[Any]], object]) -> None:
        self.asked = 0
        self._answer = answer

    def ask(self, verb: str) -> asyncio.Future[Any]:
        assert verb == "alive"
        self.asked += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answer(answer)
        return answer


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(supervisor, "STUCK_SECONDS", 0.02)


def worker(answer: Callable[[asyncio.Future[Any]], object]) -> tuple[Any, Process, Answering]:
    process, channel = Process(), Answering(answer)
    return Worker(0, 0, process, channel, None), process, channel  # type: ignore[arg-type]


@pytest.mark.usefixtures("_quick")
async def test_a_worker_that_stands_still_is_killed() -> None:
    stuck, process, _ = worker(lambda _: None)
    await make()._watch(stuck)
    assert process.killed


@pytest.mark.usefixtures("_quick")
async def test_a_worker_that_answers_is_asked_again_and_left_alone() -> None:
    well, process, channel = worker(lambda answer: answer.set_result(None))
    watching = asyncio.create_task(make()._watch(well))

    async def asked() -> bool:
        return channel.asked > 5

    await until(asked, pause=0.001)
    assert not process.killed
    watching.cancel()


@pytest.mark.usefixtures("_quick")
async def test_a_worker_that_is_gone_is_not_killed() -> None:
    gone, process, _ = worker(lambda answer: answer.set_exception(ChannelError("gone")))
    await make()._watch(gone)
    assert not process.killed


async def test_without_room_for_another_process_it_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def refuse(*_words: Any, **_how: Any) -> Any:
        nonlocal tries
        tries += 1
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setattr("pd_router.core.workers.FIRST_DELAY", 0.0)
    found = make()
    found._listening[0].set()
    keeping = asyncio.create_task(found._keep(0))

    async def tried() -> bool:
        return tries > 3

    await until(tried, pause=0.001)
    found._told.set()
    await keeping
    assert "worker 0 cannot be started: Resource temporarily unavailable" in caplog.text
    assert not found._failed.done()


async def test_without_room_for_the_first_process_the_router_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_words: Any, **_how: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    found = make()
    await found._keep(0)
    assert found._failed.result() == 1


@pytest.mark.parametrize(("first", "safe"), [(os.getcwd(), False), ("/somewhere/bin", True), ("", True)])
def test_workers_look_for_modules_where_the_supervisor_does(
    monkeypatch: pytest.MonkeyPatch, first: str, safe: bool
) -> None:
    monkeypatch.setattr(sys, "path", [first, *sys.path])
    assert ("-P" in command()) is safe
    assert command()[0] == sys.executable
    assert command()[-2:] == ["-m", "pd_router"]
