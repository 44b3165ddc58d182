"""A client that leaves at any point of a turn: nothing is kept, and no engine works on or leaks (RP-06, HL-15)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import TEXT, Talk, Turn, assert_right
from support.deployment import Deployment
from support.fake_engine import AnswerStyle, Behaviour, FakeEngine, Gate
from support.rawhttp import RawConnection, post
from support.specs import NARROW, QUICK
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


async def leaves(deployment: Deployment, raw: RawConnection) -> None:
    """Drop the connection and wait until the router has noticed."""

    async def count() -> float:
        samples = await deployment.metrics()
        return sum(value for name, value in samples.items() if name.startswith("pd_router_client_disconnects_total"))

    before = await count()
    raw.abort()

    async def noticed() -> bool:
        return await count() > before

    await until(noticed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_before_a_legs_first_byte(deploy: Any, leg: str, attached: bool, stream: bool) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=stream)
    if attached:
        await talk.say()
    engine = deployment.prefill if leg == "prefill" else deployment.decode
    before = len(engine.generates)
    hold = asyncio.Event()
    engine.next(Behaviour(hold=hold))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(engine, before + 1)
        await leaves(deployment, raw)
    hold.set()
    await no_turn_runs(deployment)
    await all_ended(deployment)
    # Decode read prefill's blocks, or prefill was stopped: in no case do they wait for the end of their lease.
    assert deployment.prefill.connector.retained() == {}
    assert (await talk.say("Still there?")).attached == []


async def test_prefill_is_stopped_at_once_when_it_holds_nothing(deploy: Any) -> None:
    deployment = await deploy()
    deployment.prefill.next(Behaviour(hold=asyncio.Event()))
    talk = Talk(deployment)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(deployment.prefill, 1)
        await leaves(deployment, raw)
    # Nobody lets it go on: only an abort ends it.
    await deployment.prefill.idle()
    await no_turn_runs(deployment)
    assert [record.fate for record in deployment.prefill.generates] == ["aborted"]
    assert deployment.decode.generates == []
    told = (await deployment.explain())[-1]
    assert (told["status"], told["client_left"]) == (499, "prefill")


async def test_prefill_that_may_be_reading_is_let_finish(deploy: Any) -> None:
    # Blocks that are given up during a read are lost for a lease, or end the process on some engines (EL-03, EL-13).
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    deployment.prefill.connector.pull_delay = 0.4
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body("Go on."), *lines(talk)))
        await arrived(deployment.prefill, 2)
        await leaves(deployment, raw)
    await no_turn_runs(deployment)
    await all_ended(deployment)
    assert deployment.prefill.generates[-1].fate == "ended"
    assert deployment.prefill.connector.counters["aborted_in_pull"] == 0
    # Decode has read prefill's blocks, so that they do not wait for the end of their lease.
    assert deployment.decode.generates[-1].pulled_tokens
    assert deployment.prefill.connector.retained() == {}
    assert (await deployment.explain())[-1]["status"] == 499


async def test_clients_that_leave_are_no_failures_of_an_engine(deploy: Any) -> None:
    deployment = await deploy()
    for _ in range(5):
        talk = Talk(deployment)
        deployment.prefill.next(Behaviour(hold=asyncio.Event()))
        before = len(deployment.prefill.generates)
        async with RawConnection(deployment.router.port) as raw:
            await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
            await arrived(deployment.prefill, before + 1)
            await leaves(deployment, raw)
        await no_turn_runs(deployment)
    await Talk(deployment).say()


@pytest.mark.parametrize("place", ["finish", "first"])
@pytest.mark.parametrize("event", range(6))
@pytest.mark.parametrize("attached", [False, True])
async def test_in_front_of_each_event_of_the_stream(deploy: Any, attached: bool, event: int, place: Any) -> None:
    # Events: role, three pieces, finish with the handle, [DONE].
    deployment = await deploy()
    talk = Talk(deployment, stream=True, conversation_id=f"cut-{attached}-{event}-{place}")
    if attached:
        await talk.say()
    gate = Gate(event)
    deployment.decode.next(Behaviour(gate=gate, piece_chars=20, handle_on=place))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await gate.reached.wait()
        await leaves(deployment, raw)
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
    deployment = await deploy(NARROW)
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
        await leaves(deployment, raw)
    gate.open()
    await holding
    await no_turn_runs(deployment)
    assert len(deployment.prefill.generates) == 1


async def test_a_client_that_pauses_longer_than_an_engine_may(deploy: Any) -> None:
    # The idle timeout is for engines. A reader that stops for a while gets the rest, and no engine is blamed for it.
    deployment = await deploy(QUICK)
    style = AnswerStyle(tail="x" * 60)
    for engine in deployment.decodes:
        engine.next(Behaviour(style=style, piece_chars=1, comments=True, comment_bytes=150_000))
    talk = Talk(deployment, stream=True, style=style)
    body = talk.body(TEXT)
    async with RawConnection(deployment.router.port, limit=1000) as raw:
        await raw.send(post(CHAT, body, *lines(talk)))
        await asyncio.sleep(1.5)
        answer = await raw.answer()
    assert_right(deployment, Turn(body, 200, {}, answer.body), style)
    for engine in deployment.engines:
        await engine.idle()
    assert {record.fate for record in deployment.records()} == {"ended"}


async def test_a_client_that_reads_slowly_slows_the_engine(deploy: Any) -> None:
    deployment = await deploy()
    large = Behaviour(style=AnswerStyle(tail="x" * 300), piece_chars=1, comments=True, comment_bytes=100_000)
    deployment.decode.next(large)
    talk = Talk(deployment, stream=True)
    async with RawConnection(deployment.router.port, limit=1000) as raw:
        await raw.send(post(CHAT, talk.body(TEXT), *lines(talk)))
        await arrived(deployment.decode, 1)
        await asyncio.sleep(0.5)
        # Nobody reads: the engine cannot have got rid of everything, so the router does not hold it all.
        assert deployment.decode.generates[0].fate == "running"
        raw.abort()
    await no_turn_runs(deployment)
