"""Engines that die, restart, hang or are not there: a right answer or a clear 503, and reuse again afterwards (EL)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import Talk, send
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, FakeEngine, Fault, Gate, Kind, with_handle
from support.ports import free_ports
from support.specs import QUICK, TWO_BY_TWO, WATCHED
from support.waiting import until


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_restarts_between_turns(deploy: Any, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    talk = Talk(deployment, stream=stream)
    await talk.say()
    old = deployment.decode.engine_id
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    turn = await talk.say("Go on.")
    assert all(old.encode() not in record.raw for record in turn.prefills)
    assert len((await talk.say("And then?")).attached) == 1


async def test_decode_restarts_and_the_turn_comes_at_once(deploy: Any) -> None:
    # The router may or may not have noticed; the answer is right, or a clear 503 that says when to come back.
    deployment = await deploy(breaks=True)
    talk = Talk(deployment, stream=True)
    await talk.say()
    await deployment.decode.restart()
    turn = await talk.say("Go on.", check=False)
    if turn.status == 503:
        assert int(turn.headers["Retry-After"]) >= 1
        await deployment.wait_ready(2)
        turn = await talk.say("Go on.")
    assert turn.text == deployment.right(turn.body).content


async def test_decode_dies_and_another_serves(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    talk = Talk(deployment, stream=True)
    await talk.say()
    holder = next(engine for engine in deployment.decodes if engine.generates)
    await holder.kill()
    turn = await talk.say("Go on.")
    assert turn.status == 200
    assert (await talk.say("And then?")).pulled > 100
    await holder.start()
    holder.connector.fabric.join(holder.connector)
    await deployment.wait_ready(4)


async def test_no_decode_engine_left(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    talk = Talk(deployment, stream=True)
    await talk.say()
    await deployment.decode.kill()
    for _ in range(2):
        turn = await talk.say("Go on.", check=False)
        assert turn.status == 503
        assert turn.json["error"]["message"]
        assert int(turn.headers["Retry-After"]) >= 1
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    await talk.say("Go on.")
    assert len((await talk.say("And then?")).attached) == 1


async def test_no_prefill_engine_left(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    talk = Talk(deployment)
    await talk.say()
    await deployment.prefill.kill()
    turn = await talk.say("Go on.", check=False)
    assert turn.status == 503
    assert int(turn.headers["Retry-After"]) >= 1
    await deployment.prefill.restart()
    await deployment.wait_ready(2)
    await talk.say("Go on.")
    assert len((await talk.say("And then?")).attached) == 1


async def test_prefill_restarts_between_turns(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    talk = Talk(deployment, stream=True)
    await talk.say()
    await deployment.prefill.restart()
    await deployment.wait_ready(2)
    # The handle is D's; a new P can read it as well as the old one.
    assert len((await talk.say("Go on.")).attached) == 1


async def test_decode_dies_in_the_middle_of_a_stream(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    deployment.decode.next(Behaviour(gate=Gate(3)))
    content = asyncio.Event()
    talk = Talk(deployment, stream=True)
    reading = asyncio.create_task(talk.say(check=False, at_content=content.set))
    await content.wait()
    await deployment.decode.kill()
    turn = await reading
    assert (turn.status, turn.error) == (200, None)
    assert "error" in turn.events[-1]
    await deployment.decode.restart()


async def test_prefill_dies_with_a_handle_in_hand(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    talk = Talk(deployment)
    await talk.say()
    for engine in deployment.prefills:
        engine.connector.pull_delay = 5.0
    reading = asyncio.create_task(talk.say("Go on."))

    async def carrying() -> list[FakeEngine]:
        return [engine for engine in deployment.prefills if any(record.handle_id for record in engine.generates)]

    carriers = await until(carrying)
    await carriers[0].kill()
    await reading
    assert len([record for record in deployment.records(deployment.prefills) if record.handle_id]) == 1


async def test_prefill_hangs_on_the_pull(deploy: Any) -> None:
    deployment = await deploy(QUICK, breaks=True)
    talk = Talk(deployment, stream=True)
    await talk.say()
    for engine in deployment.prefills:
        engine.next(Behaviour(fault=Fault(Kind.HANG)), when=with_handle)
    turn = await talk.say("Go on.")
    assert sorted(record.handle_id is not None for record in turn.prefills) == [False, True]
    assert next(record for record in turn.prefills if record.handle_id).fate == "aborted"
    for engine in deployment.engines:
        engine.forget()
    assert len((await talk.say("And then?")).attached) == 1


async def test_a_prefill_that_parks_a_failed_load_for_ever(deploy: Any) -> None:
    # Policy "recompute" on a stock P: the load fails and the request waits for KV that never comes (engine-measured 5).
    deployment = await deploy(QUICK, breaks=True)
    for engine in deployment.prefills:
        engine.default = Behaviour(load_failure="hang")
    talk = Talk(deployment)
    await talk.say()
    deployment.fabric.clock.advance(477)
    turn = await talk.say("Go on.")
    assert sorted(record.handle_id is not None for record in turn.prefills) == [False, True]


async def test_a_frozen_engine_whose_health_is_frozen_too(deploy: Any) -> None:
    deployment = await deploy(WATCHED, breaks=True)
    frozen, healthy = deployment.prefills
    frozen.freeze()
    await deployment.wait_ready(3)
    for _ in range(3):
        await Talk(deployment).say()
    assert len(healthy.generates) == 3
    frozen.thaw()
    await deployment.wait_ready(4)


async def test_a_breaker_keeps_work_from_what_always_fails(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    bad, good = deployment.prefills
    bad.default = Behaviour(fault=Fault(Kind.STATUS, status=500))
    for _ in range(12):
        await Talk(deployment).say()
    assert len(good.generates) == 12
    assert len(bad.generates) <= 4


async def test_engines_that_are_not_up_yet() -> None:
    deployment = Deployment(Spec())
    deployment.decode.port = free_ports(1)[0]
    starting = deployment.decode.start
    deployment.decode.start = _nothing  # type: ignore[method-assign]
    try:
        await deployment.start(ready=False)
        turn = await send(deployment, Talk(deployment).body("Hello."))
        assert turn.status == 503
        assert int(turn.headers["Retry-After"]) >= 1
        await starting()
        await deployment.router.wait_ready()
        await Talk(deployment).say()
        await deployment.check()
    finally:
        await deployment.stop()


async def _nothing() -> None:
    """Stands in for a start that comes later."""


async def test_a_handle_that_names_a_foreign_host(deploy: Any) -> None:
    # As from a compromised engine: prefill must never be told to connect there (IS-01).
    deployment = await deploy()
    for host in ("169.254.169.254", "10.0.0.1", "localhost.example", ""):
        talk = Talk(deployment, stream=True)

        def edit(handle: dict[str, Any], host: str = host) -> dict[str, Any]:
            return {**handle, "remote_host": host}

        deployment.decode.next(Behaviour(edit_handle=edit))
        await talk.say()
        assert (await talk.say("Go on.")).attached == []


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda handle: {**handle, "remote_block_ids": None}, id="no blocks"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": []}, id="empty blocks"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": handle["remote_block_ids"][0]}, id="flattened"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": [["1", "2"]]}, id="blocks as text"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": [[-1]]}, id="negative block"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": [[2**40]]}, id="huge block"),
        pytest.param(lambda handle: {**handle, "remote_block_ids": [[True]]}, id="boolean block"),
        pytest.param(lambda handle: {**handle, "remote_engine_id": None}, id="no engine id"),
        pytest.param(lambda handle: {**handle, "remote_request_id": ""}, id="empty request id"),
        pytest.param(lambda handle: {**handle, "remote_port": "5600"}, id="port as text"),
        pytest.param(lambda handle: {**handle, "remote_port": 0}, id="port 0"),
        pytest.param(lambda handle: {**handle, "remote_num_tokens": None}, id="no token count"),
        pytest.param(lambda handle: {**handle, "remote_num_tokens": 1.5}, id="half a token"),
        pytest.param(lambda handle: {**handle, "remote_blocks_expiry_time": None}, id="no expiry"),
        pytest.param(lambda handle: {**handle, "do_remote_decode": False}, id="flags false"),
        pytest.param(lambda handle: {**handle, "do_remote_prefill": True}, id="both flags"),
        pytest.param(lambda handle: [handle], id="a list"),
        pytest.param(lambda handle: "handle", id="a string"),
        pytest.param(lambda handle: {}, id="empty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_handle_never_reaches_prefill(deploy: Any, edit: Any, stream: bool) -> None:
    deployment = await deploy()
    deployment.decode.next(Behaviour(edit_handle=edit))
    talk = Talk(deployment, stream=stream, conversation_id="malformed")
    await talk.say()
    assert (await talk.say("Go on.")).attached == []
    assert len((await talk.say("And then?")).attached) == 1
