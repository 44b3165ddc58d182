"""Stopping without cutting anybody off, and many streams at once (EL-06, RP-11, RP-23)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, Talk, Turn, assert_right
from support.deployment import Spec
from support.fake_engine import Behaviour, Gate
from support.router_process import RouterFailed, RouterProcess
from support.specs import TWO_BY_TWO
from support.waiting import until

STREAMS = 350


async def test_sigterm_lets_running_streams_finish(deploy: Any) -> None:
    deployment = await deploy(fresh=True)
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    running = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    deployment.router.terminate()

    async def refused() -> bool:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(deployment.router.url + "/v1/models") as response:
                    return response.status == 503
            except aiohttp.ClientError:
                return True

    await until(refused)
    assert deployment.router.returncode is None
    gate.open()
    turn = await running
    assert turn.events[-1] == "[DONE]"
    assert await deployment.router.wait() == 0
    deployment.ended = True


async def test_sigterm_with_nothing_running(deploy: Any) -> None:
    deployment = await deploy(fresh=True)
    async with aiohttp.ClientSession() as session:
        # An idle kept connection must not hold up the end.
        async with session.get(deployment.router.url + "/v1/models") as response:
            await response.read()
        deployment.router.terminate()
        assert await deployment.router.wait(5) == 0
    deployment.ended = True


async def test_sigterm_breaks_no_request_on_a_kept_connection(deploy: Any) -> None:
    """Behind a Service new connections go to another router; those that are kept bring requests up to the end."""
    deployment = await deploy(fresh=True)
    url = deployment.router.url + "/v1/completions"
    answers: list[int] = []

    async def ask_on(session: aiohttp.ClientSession, pause: float) -> None:
        # A POST that is refused fast: nothing in the client tries one a second time.
        while True:
            try:
                async with session.post(url, data=b"{") as response:
                    await response.read()
                    answers.append(response.status)
            except aiohttp.ClientConnectorError:
                return  # a new connection, which another router would take
            await asyncio.sleep(pause)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(ask_on(session, 0.001 * number)) for number in range(40)]

        async def busy() -> bool:
            return len(answers) > 400

        await until(busy)
        deployment.router.terminate()
        await asyncio.gather(*clients)
    assert set(answers) == {400}
    assert await deployment.router.wait(5) == 0
    deployment.ended = True


async def held_stream(deployment: Any) -> tuple[Gate, asyncio.Task[Any]]:
    """A streamed turn whose client has content and whose engine holds the rest back until the gate opens."""
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    content = asyncio.Event()
    running = asyncio.create_task(Talk(deployment, stream=True).say(check=False, at_content=content.set))
    await content.wait()
    return gate, running


async def assert_cut(deployment: Any, gate: Gate, running: asyncio.Task[Any]) -> None:
    """The router has ended before the held stream: its client knows, and no engine goes on."""
    turn = await running
    assert turn.error is not None or "error" in turn.events[-1]
    gate.open()
    for engine in deployment.engines:
        await engine.idle()
    deployment.ended = True


async def test_a_second_signal_ends_the_drain(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--drain-timeout", "600"),)), fresh=True)
    gate, running = await held_stream(deployment)
    deployment.router.terminate()
    await deployment.router.wait_ready(False)
    deployment.router.terminate()
    assert await deployment.router.wait() == 0
    await assert_cut(deployment, gate, running)


async def test_the_drain_timeout_ends_what_does_not(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--drain-timeout", "0.3"),)), fresh=True)
    gate, running = await held_stream(deployment)
    deployment.router.terminate()
    assert await deployment.router.wait(5) == 0
    await assert_cut(deployment, gate, running)


async def test_a_taken_port(deploy: Any) -> None:
    deployment = await deploy()
    router = RouterProcess(
        [deployment.prefill.url],
        [deployment.decode.url],
        repeated=["--listen", f"127.0.0.1:{deployment.router.port}"],
    )
    with pytest.raises(RouterFailed, match="--listen"):
        await router.start()
    assert router.returncode == 1
    router.discard()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"--max-inflight": "0"}, "--max-inflight"),
        ({"--connect-timeout": "-1"}, "--connect-timeout"),
        ({"--tenant-from": "cookie"}, "--tenant-from"),
    ],
)
async def test_flags_that_cannot_work(flags: dict[str, str], word: str) -> None:
    router = RouterProcess(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], flags)
    with pytest.raises(RouterFailed, match=word):
        await router.start()
    assert router.returncode == 2
    router.discard()


async def test_many_slow_streams(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO)
    for engine in deployment.decodes:
        engine.default = Behaviour(event_delay=0.25)
    talks = [Talk(deployment, stream=True) for _ in range(STREAMS)]
    slowest = 0.0

    async def probe() -> None:
        nonlocal slowest
        async with aiohttp.ClientSession() as session:
            while True:
                started = time.monotonic()
                async with session.get(deployment.router.admin_url + "/healthz") as response:
                    assert response.status == 200
                slowest = max(slowest, time.monotonic() - started)
                await asyncio.sleep(0.05)

    probing = asyncio.create_task(probe())
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def stream(talk: Talk) -> None:
            body = talk.body(TEXT)
            async with session.post(
                deployment.router.url + "/v1/chat/completions", json=body, headers=talk.headers
            ) as response:
                assert response.status == 200
                assert_right(deployment, Turn(body, 200, {}, await response.read()))

        await asyncio.gather(*(stream(talk) for talk in talks))
    probing.cancel()
    assert {record.fate for record in deployment.records()} == {"ended"}
    assert len(deployment.records(deployment.decodes)) == STREAMS
    # The loop of this test shares the machine with the router; the bound is for a stuck router, not for a slow one.
    assert slowest < 10
    assert (await deployment.metrics())["pd_router_inflight"] == 0


async def test_the_store_is_bounded_by_entries(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--handle-cap-entries", "3"),)))
    talks = [Talk(deployment, stream=bool(number % 2)) for number in range(6)]
    for talk in talks:
        await talk.say()
    attached = [len((await talk.say("Go on.")).attached) for talk in reversed(talks)]
    assert sum(attached) <= 3
    assert attached[0] == 1


async def test_the_store_is_bounded_by_bytes(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--handle-cap-bytes", "4000"),)))
    talks = [Talk(deployment) for _ in range(12)]
    for talk in talks:
        await talk.say()
    attached = sum([len((await talk.say("Go on.")).attached) for talk in reversed(talks)])
    assert attached < 12
