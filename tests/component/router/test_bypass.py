"""Short new messages go to the decode engine that has the rest, without prefill (HL-09, HL-10, engine-contract E9).

Such a turn leaves no handle and keeps no blocks; the handle of the turn before stays good for the one after.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.chat import TEXT, Talk, Turn
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Gate, Kind
from support.redis_server import RedisServer
from support.shared_deployment import SharedDeployment, say_on
from support.waiting import until

FLAGS = (("--bypass-tokens", "60"), ("--bypass-share", "0.5"), ("--bypass-decode-turns", "1"))
ON = Spec(flags=FLAGS)


async def told(deployment: Deployment) -> dict[str, Any]:
    return (await deployment.explain())[-1]


def alone(turn: Turn) -> bool:
    """Whether decode served the turn without prefill, and was told nothing about KV."""
    if turn.prefills:
        return False
    assert [record.params for record in turn.decodes] == [None]
    return True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_short_turns_go_to_decode_and_a_long_one_uses_the_handle(deploy: Any, mode: Any, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode, flags=FLAGS))
    talk = Talk(deployment, stream=stream)
    first = await talk.say()
    assert not alone(first)
    for text in ("Go on.", "And then?"):
        turn = await talk.say(text)
        assert alone(turn)
        [record] = turn.decodes
        assert record.local_tokens is not None
        assert record.prompt_tokens is not None
        # Decode's own cache has all but the last messages.
        assert record.prompt_tokens - record.local_tokens < 60
        assert (await told(deployment))["reason"] == "bypassed"
    turn = await talk.say()
    assert turn.attached == [first.decodes[0].request_id]
    assert turn.pulled > 100
    deployment.fabric.clock.advance(481)
    assert deployment.decode.connector.retained() == {}


async def test_what_has_grown_since_counts(deploy: Any) -> None:
    # Each turn is short; together they are not, and what decode has beyond its retained blocks may be evicted.
    deployment = await deploy(ON)
    talk = Talk(deployment)
    first = await talk.say()
    turns = [await talk.say("Tell me more of it.") for _ in range(12)]
    served = [alone(turn) for turn in turns]
    assert served[0]
    assert not all(served)
    assert turns[served.index(False)].attached == [first.decodes[0].request_id]
    # And the new handle begins a new count.
    assert True in served[served.index(False) + 1 :]


@pytest.mark.parametrize(
    ("fields", "history", "why"),
    [
        ({"conversation_id": "by id"}, "edited", "the history does not end in what decode has"),
        ({"include_reasoning": False}, None, "not the very tokens that decode has: include_reasoning"),
        ({}, "long", "new tokens"),
    ],
)
async def test_when_prefill_is_needed(deploy: Any, fields: dict[str, Any], history: str | None, why: str) -> None:
    deployment = await deploy(ON)
    talk = Talk(deployment, **fields)
    await talk.say()
    if history == "edited":
        talk.messages[-1] = {"role": "assistant", "content": "Never said so."}
    turn = await talk.say(2 * TEXT if history == "long" else "Go on.")
    assert len(turn.attached) == 1
    assert why in (await told(deployment))["two_legs"]


async def test_not_while_decode_is_busy(deploy: Any) -> None:
    deployment = await deploy(ON)
    talk = Talk(deployment)
    await talk.say()
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate), times=2)
    busy = [asyncio.create_task(Talk(deployment, stream=True).say()) for _ in range(2)]
    await gate.reached.wait()

    async def both_run() -> bool:
        return sum(record.fate == "running" for record in deployment.decode.generates) == 2

    await until(both_run)
    turn = await talk.say("Go on.")
    assert not alone(turn)
    assert (await told(deployment))["two_legs"] == "decode has 2 turns"
    gate.open()
    await asyncio.gather(*busy)
    assert alone(await talk.say("And then?"))


async def test_off_unless_asked_for(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1
    assert "two_legs" not in await told(deployment)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_bypass_is_tried_with_prefill(deploy: Any, stream: bool) -> None:
    deployment = await deploy(ON)
    talk = Talk(deployment, stream=stream)
    await talk.say()
    deployment.decode.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
    turn = await talk.say("Go on.")
    assert [len(turn.prefills), len(turn.decodes), turn.attached] == [1, 2, []]
    assert alone(await talk.say("And then?"))


async def test_a_client_that_leaves_a_bypassed_turn_leaves_nothing(deploy: Any) -> None:
    deployment = await deploy(ON)
    talk = Talk(deployment, stream=True)
    await talk.say()
    deployment.decode.next(Behaviour(hold=asyncio.Event()))
    asking = asyncio.create_task(talk.say("Go on."))

    async def there() -> bool:
        return len(deployment.decode.generates) == 2

    await until(there)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    # There is no hand-off to finish: decode is stopped at once, and nobody lets it go on.
    await deployment.decode.idle()
    assert deployment.decode.generates[-1].fate == "aborted"
    turn = await talk.say("And then?")
    assert (alone(turn), turn.attached) == (False, [])


async def test_not_after_decode_was_restarted(deploy: Any) -> None:
    deployment = await deploy(ON, breaks=True)
    talk = Talk(deployment)
    await talk.say()
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    turn = await talk.say("Go on.")
    assert not alone(turn)
    assert alone(await talk.say("And then?"))


async def test_blocks_are_not_pinned_by_many_bypassed_turns(deploy: Any) -> None:
    deployment = await deploy(ON)
    deployment.fabric.clock.advance(481)
    before = deployment.decode.used_blocks
    for _ in range(8):
        talk = Talk(deployment)
        await talk.say()
        for _ in range(3):
            await talk.say("Yes.")
    assert len(deployment.decode.connector.retained()) == 8
    deployment.fabric.clock.advance(481)
    assert deployment.decode.used_blocks == before


async def test_the_handle_moves_on_with_the_conversation_in_a_shared_store(tmp_path: Path) -> None:
    server = RedisServer()
    one = SharedDeployment(ON, server, tmp_path)
    try:
        await server.start()
        await one.start()
        other = await one.join()
        for view in (one, other):
            await view.wait_ready(2)
            await view.wait_store()
        talk = Talk(one)
        first = await say_on(other, talk, TEXT)
        # Whichever router a turn comes to, it finds what the turn before left untouched on another one.
        for view in (one, other, one):
            assert alone(await say_on(view, talk, "Yes."))
        turn = await say_on(other, talk, 2 * TEXT)
        assert turn.attached == [first.decodes[0].request_id]
        assert turn.pulled > 50
        await one.check()
    finally:
        await one.stop()
        server.close()
