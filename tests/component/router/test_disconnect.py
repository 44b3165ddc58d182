"""A client that leaves at any point of a turn: nothing is kept, and no engine works on or leaks (RP-06, HL-15)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import TEXT, Talk
from support.deployment import Deployment, Spec
from support.fake_engine import AnswerStyle, Behaviour, FakeEngine, Gate
from support.rawhttp import RawConnection, post
from support.waiting import until

CHAT = "/v1/chat/completions"


def lines(talk: Talk) -> list[str]:
    return [f"{name}: {value}" for name, value in talk.headers.items()]


async def arrived(engine: FakeEngine, count: int) -> None:
    async def there() -> bool:
        return len(engine.generates) >= count

    await until(there, pause=0.002)


async def all_ended(deployment: Deployment) -> None:
    for engine in deployment.engines:
        await engine.idle()


async def no_turn_runs(deployment: Deployment) -> None:
    async def done() -> bool:
        samples = await deployment.metrics()
        return bool(samples["pd_router_inflight"] == 0)

    await until(done)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("attached", [False, True])
async def test_during_prefill(deploy: Any, attached: bool, stream: bool) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=stream)
    if attached:
        await talk.say()
    before = (len(deployment.prefill.generates), len(deployment.decode.generates))
    deployment.prefill.next(Behaviour(first_byte_delay=0.15))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(deployment.prefill, before[0] + 1)
        raw.abort()
    await no_turn_runs(deployment)
    await all_ended(deployment)
    # Prefill's blocks were read by decode, or prefill was stopped: in no case do they wait for their lease.
    assert deployment.prefill.connector.retained() == {}
    after = await talk.say("Still there?")
    assert after.attached == []


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_before_decodes_first_byte(deploy: Any, stream: bool, attached: bool) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=stream)
    if attached:
        await talk.say()
    before = len(deployment.decode.generates)
    deployment.decode.next(Behaviour(first_byte_delay=0.15))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(deployment.decode, before + 1)
        raw.abort()
    await no_turn_runs(deployment)
    await all_ended(deployment)
    assert deployment.prefill.connector.retained() == {}
    assert (await talk.say("Still there?")).attached == []


@pytest.mark.parametrize("event", range(8))
@pytest.mark.parametrize("attached", [False, True])
async def test_after_each_event_of_the_stream(deploy: Any, attached: bool, event: int) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=True, conversation_id=f"cut-{attached}-{event}")
    if attached:
        await talk.say()
    gate = Gate(event)
    deployment.decode.next(Behaviour(gate=gate, piece_chars=8))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await gate.reached.wait()
        raw.abort()
        await asyncio.sleep(0.05)
        gate.open()
    await no_turn_runs(deployment)
    await all_ended(deployment)
    assert deployment.prefill.connector.retained() == {}
    assert (await talk.say("Still there?")).attached == []


async def test_a_slow_stream_is_stopped_soon_after_its_client_left(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=True)
    deployment.decode.next(Behaviour(event_delay=0.05, piece_chars=1))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await raw.some()
    await no_turn_runs(deployment)
    await all_ended(deployment)
    assert deployment.decode.generates[-1].fate == "aborted"


async def test_right_after_the_end(deploy: Any) -> None:
    # Everything was delivered: the turn counts, whether or not the client stays.
    deployment = await deploy()
    talk = Talk(deployment, stream=True)
    body = talk.body(TEXT)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, body, *lines(talk)))
        await raw.answer()
        raw.abort()
    await no_turn_runs(deployment)
    talk.messages = [*body["messages"], {"role": "assistant", "content": deployment.right(body).content}]
    assert len((await talk.say("Still there?")).attached) == 1


async def test_in_the_queue(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--max-inflight", "1"), ("--max-queue", "5"))))
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    holding = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    talk = Talk(deployment)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))

        async def queued() -> bool:
            return bool((await deployment.metrics())["pd_router_queued"] == 1)

        await until(queued)
        raw.abort()
    await asyncio.sleep(0.05)
    gate.open()
    await holding
    await no_turn_runs(deployment)
    assert len(deployment.prefill.generates) == 1


async def test_a_client_that_reads_slowly_slows_the_engine(deploy: Any) -> None:
    deployment = await deploy()
    size = 24_000_000
    deployment.decode.next(Behaviour(style=AnswerStyle(tail="x" * size), piece_chars=60_000))
    talk = Talk(deployment, stream=True)
    async with RawConnection(deployment.router.port) as raw:
        raw._reader._limit = 1000  # type: ignore[attr-defined]
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(deployment.decode, 1)
        await asyncio.sleep(0.5)
        # Nobody reads: the engine cannot have got rid of everything, so the router does not hold it all.
        assert deployment.decode.generates[0].fate == "running"
        raw.abort()
    await no_turn_runs(deployment)
