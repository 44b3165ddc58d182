"""Questions to routers over real sockets: what an answer changes, and that silence delays nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from pd_operator.core.observed_kinds import DEPLOYMENTS, PODS
from pd_operator.core.observed_router import Flow
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.mirror import Mirror
from pd_operator.shell.router_poll import ANSWER_LIMIT, FORGIVEN, RouterPoll
from pd_operator.shell.wakeups import Key

QWEN = Key("n", "qwen")


class Bench:
    """A router, a mirror that has it, and the poll."""

    def __init__(self, port: int) -> None:
        self.answer: Any = {
            "reuse": "on",
            "started": 1.0,
            "engines": [],
            "funnel": {"attached": 0, "pulled_tokens": 0},
        }
        self.woken: list[Key] = []
        self.time = 0.0
        self.mirror = Mirror()
        metadata = {"name": "qwen", "namespace": "n", "uid": "u", "resourceVersion": "1"}
        self.mirror.see(DEPLOYMENTS, {"metadata": metadata})
        self.poll = RouterPoll(self.mirror, self.woken.append, 30.0, Metrics(), lambda: self.time)
        self.pod("r", port)

    def pod(self, name: str, port: int, ready: bool = True) -> None:
        """A router pod on this machine."""
        labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "router"}
        metadata = {"name": name, "namespace": "n", "uid": name, "resourceVersion": "5", "labels": labels}
        status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": str(ready)}]}
        ports = [{"name": "admin", "containerPort": port}]
        self.mirror.see(PODS, {"metadata": metadata, "spec": {"containers": [{"ports": ports}]}, "status": status})

    async def ask(self, after: float = 30.0) -> list[Key]:
        """One round after that many seconds, by default when everybody's turn has come. Returns who was woken."""
        self.time += after
        self.woken.clear()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
            await self.poll.ask_due(session)
        return self.woken

    async def handle(self, _request: web.Request) -> web.Response:
        """The router's answer."""
        if self.answer is None:
            await asyncio.sleep(60)
        if isinstance(self.answer, tuple):
            status, body = self.answer
            return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:9/"})
        return web.json_response(self.answer)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    made: list[Bench] = []

    async def handle(request: web.Request) -> web.Response:
        return await made[0].handle(request)

    app.router.add_get("/status", handle)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.append(Bench(runner.addresses[0][1]))
    yield made[0]
    await runner.cleanup()


async def test_only_a_new_meaning_wakes(bench: Bench) -> None:
    assert await bench.ask() == [QWEN]
    assert await bench.ask() == []
    bench.answer["funnel"] = {"attached": 1, "pulled_tokens": 64}
    assert await bench.ask() == [QWEN]
    bench.answer["funnel"] = {"attached": 900, "pulled_tokens": 64_000}
    assert await bench.ask() == []
    answer = bench.poll.answers["r"]
    assert answer is not None
    assert answer.flow is Flow.FLOWING


SILENCE: dict[str, tuple[int, bytes] | None] = {
    "hangs": None,
    "error": (500, b"{}"),
    "redirect": (302, b""),
    "no JSON": (200, b"hello"),
    "another JSON": (200, b'{"reuse": "perhaps"}'),
    "huge": (200, b"1" * (ANSWER_LIMIT + 1)),
}


@pytest.mark.parametrize("silence", SILENCE.values(), ids=SILENCE.keys())
async def test_a_router_that_does_not_answer_is_forgiven_twice(bench: Bench, silence: tuple[int, bytes] | None) -> None:
    await bench.ask()
    bench.answer = silence
    for _ in range(FORGIVEN):
        assert await bench.ask() == []
    assert await bench.ask() == [QWEN]
    assert bench.poll.answers["r"] is None
    assert await bench.ask() == []


async def test_a_silent_router_is_asked_again_soon(bench: Bench) -> None:
    bench.answer = None
    await bench.ask()
    bench.answer = {"reuse": "on", "started": 1.0, "engines": [], "funnel": {"attached": 0, "pulled_tokens": 0}}
    bench.time += 5.0 - 30.0
    assert await bench.ask() == [QWEN]


async def test_the_first_tokens_are_seen_soon_and_later_changes_in_turn(bench: Bench) -> None:
    await bench.ask()
    bench.answer["funnel"] = {"attached": 1, "pulled_tokens": 64}
    assert await bench.ask(after=4.9) == []
    assert await bench.ask(after=0.1) == [QWEN]
    bench.answer["funnel"] = {"attached": 900, "pulled_tokens": 64}
    assert await bench.ask(after=29.9) == []
    assert await bench.ask(after=0.1) == [QWEN]


async def test_a_router_without_reuse_is_asked_in_turn(bench: Bench) -> None:
    bench.answer["reuse"] = "off"
    await bench.ask()
    bench.answer["reuse"] = "on"
    assert await bench.ask(after=29.9) == []
    assert await bench.ask(after=0.1) == [QWEN]


async def test_one_that_hangs_does_not_hold_up_another(bench: Bench) -> None:
    bench.pod("dead", 9)
    await bench.ask()
    assert bench.poll.answers["r"] is not None


async def test_pods_that_are_gone_are_forgotten(bench: Bench) -> None:
    await bench.ask()
    bench.mirror.listed(PODS, None, [], 50)
    await bench.ask()
    assert bench.poll.answers == {}


async def test_silence_is_told_when_it_begins_and_when_it_ends(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    good, bench.answer = bench.answer, (503, "no")
    with caplog.at_level(logging.INFO):
        for _ in range(FORGIVEN + 5):
            await bench.ask()
        bench.answer = good
        for _ in range(3):
            await bench.ask()
    told = [one.getMessage() for one in caplog.records if "router n/r" in one.getMessage()]
    assert told == ["router n/r does not answer: HTTP 503", "router n/r answers again"]
