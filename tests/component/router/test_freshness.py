"""A handle is attached only while its holder surely keeps the blocks, judged when the prefill is sent (HL-04)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import Talk, send
from support.deployment import Spec
from support.fake_engine import Behaviour, Gate
from support.router_process import RouterFailed, RouterProcess

SHORT = Spec(flags=(("--handle-ttl", "0.5"), ("--max-inflight", "1"), ("--max-queue", "50")))


@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_an_old_handle_is_not_attached(deploy: Any, mode: Any) -> None:
    deployment = await deploy(Spec(mode=mode, flags=SHORT.flags))
    talk = Talk(deployment, stream=True)
    await talk.say()
    assert len((await talk.say("At once.")).attached) == 1
    await asyncio.sleep(0.6)
    assert (await talk.say("Too late.")).attached == []


async def test_a_handle_that_grows_old_in_the_queue_is_not_attached(deploy: Any) -> None:
    deployment = await deploy(SHORT)
    talk = Talk(deployment)
    await talk.say()
    gate = Gate(0)
    deployment.decode.next(Behaviour(gate=gate))
    other = Talk(deployment, stream=True)
    blocking = asyncio.create_task(send(deployment, other.body("Hold the only place."), other.headers))
    await gate.reached.wait()
    waiting = asyncio.create_task(talk.say("Sent in time, served too late."))
    await asyncio.sleep(0.6)
    gate.open()
    await blocking
    assert (await waiting).attached == []


async def test_the_routers_ttl_must_be_below_the_engines() -> None:
    flags = {"--handle-ttl": "480", "--engine-ttl": "480"}
    router = RouterProcess(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], flags)
    with pytest.raises(RouterFailed, match="--handle-ttl"):
        await router.start()
    assert router.returncode == 2
    router.discard()


async def test_an_engine_that_declines_is_not_the_clients_problem(deploy: Any) -> None:
    # The router believes in 450 s, the engine keeps blocks for 3 s only and declines within 5 s of the end.
    deployment = await deploy(Spec(connector=(("decoder_ttl", 3.0),)))
    talk = Talk(deployment, stream=True)
    await talk.say()
    turn = await talk.say("Go on.")
    assert [record.handle_id is not None for record in turn.prefills] == [True, False]
    assert turn.prefills[0].status == 500
