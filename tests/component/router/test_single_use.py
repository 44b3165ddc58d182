"""A handle is sent once, whatever happens to the request that carried it (HL-03, HL-13)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import Talk, send
from support.deployment import Spec
from support.fake_engine import Behaviour, Fault, Kind, Point, with_handle
from support.specs import NEVER_PULLS
from support.waiting import until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("link", [{}, {"conversation_id": "twins"}])
@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_concurrent_requests_with_one_history(deploy: Any, mode: Any, link: dict[str, Any], stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode))
    talk = Talk(deployment, stream=stream, **link)
    await talk.say()
    for engine in deployment.engines:
        engine.requests.clear()
    body = talk.body("Go on.")
    turns = await asyncio.gather(*(send(deployment, body, talk.headers) for _ in range(6)))
    right = deployment.right(body).content
    assert [turn.text for turn in turns] == [right] * 6
    carriers = [record for record in deployment.records(deployment.prefills) if record.handle_id]
    assert len(carriers) == 1


@pytest.mark.parametrize("fault", [Kind.STATUS, Kind.CLOSE, Kind.RESET])
async def test_a_retry_goes_without_the_handle(deploy: Any, fault: Kind) -> None:
    deployment = await deploy(Spec())
    talk = Talk(deployment)
    await talk.say()
    point = Point.BEFORE_ADMISSION
    deployment.prefill.next(Behaviour(fault=Fault(fault, point, status=503)), when=with_handle)
    turn = await talk.say("Go on.")
    assert [record.handle_id is not None for record in turn.prefills] == [True, False]
    # The handle of the failed attempt is gone for good; the one of this turn's answer is used next.
    turn = await talk.say("And then?")
    assert len(turn.attached) == 1


async def test_below_the_engines_threshold_the_handle_is_spent_all_the_same(deploy: Any) -> None:
    deployment = await deploy(NEVER_PULLS)
    talk = Talk(deployment)
    await talk.say()
    for _ in range(2):
        turn = await talk.say("Go on.")
        assert len(turn.attached) == 1
        assert turn.pulled == 0


async def test_regenerating_after_a_use_sends_nothing_old(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="regenerate")
    await talk.say()
    await talk.say("Go on.")
    for _ in range(3):
        del talk.messages[-1]
        await talk.say(None)
    handles = [record.handle_id for record in deployment.records(deployment.prefills) if record.handle_id]
    assert len(handles) == len(set(handles))


async def test_a_late_answer_does_not_replace_a_newer_turn(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="late")
    await talk.say()
    hold = asyncio.Event()
    deployment.decode.next(Behaviour(hold=hold))
    body = talk.body("The slow branch.")
    late = asyncio.create_task(send(deployment, body, talk.headers))

    async def decoding() -> bool:
        return len(deployment.decode.generates) == 2

    await until(decoding)
    quick = await talk.say("The quick branch.")
    hold.set()
    await late
    turn = await talk.say("And then?")
    assert turn.attached == [quick.decodes[0].request_id]
    assert turn.pulled > 150


async def test_a_late_answer_is_not_found_by_id(deploy: Any) -> None:
    # The newer turn has no handle to offer any more; the late one's must not take its place under the id.
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="late, by id")
    await talk.say()
    hold = asyncio.Event()
    deployment.decode.next(Behaviour(hold=hold))
    body = talk.body("The slow branch.")
    late = asyncio.create_task(send(deployment, body, talk.headers))

    async def decoding() -> bool:
        return len(deployment.decode.generates) == 2

    await until(decoding)
    deployment.decode.next(Behaviour(handle_on="none"))
    await talk.say("The quick branch.")
    hold.set()
    await late
    assert (await talk.say("And then?")).attached == []


async def test_an_overwritten_handle_is_not_sent_again(deploy: Any) -> None:
    # Two branches finish under one id; whichever is kept, each handle goes out at most once and answers stay right.
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="branches")
    await talk.say()
    base = list(talk.messages)
    for text in ("Left.", "Right.", "Left."):
        talk.messages = list(base)
        await talk.say(text)
        await talk.say("More.")
