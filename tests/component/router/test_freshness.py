"""A handle is attached only while its holder surely keeps the blocks, judged when the prefill is sent (HL-04)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat import Talk, send
from support.fake_engine import Behaviour, Gate
from support.router_process import RouterFailed, RouterProcess
from support.specs import NARROW, NARROW_STOCK


@pytest.mark.parametrize("spec", [NARROW, NARROW_STOCK], ids=["verified", "stock"])
async def test_an_old_handle_is_not_attached(deploy: Any, spec: Any) -> None:
    deployment = await deploy(spec)
    talk = Talk(deployment, stream=True)
    await talk.say()
    await asyncio.sleep(0.7)
    assert (await talk.say("Too late.")).attached == []


async def test_a_handle_that_grows_old_in_the_queue_is_not_attached(deploy: Any) -> None:
    deployment = await deploy(NARROW)
    talk = Talk(deployment)
    await talk.say()
    gate = Gate(0)
    deployment.decode.next(Behaviour(gate=gate))
    other = Talk(deployment, stream=True)
    blocking = asyncio.create_task(send(deployment, other.body("Hold the only place."), other.headers))
    await gate.reached.wait()
    waiting = asyncio.create_task(talk.say("Sent in time, served too late."))
    await asyncio.sleep(0.7)
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
    # The engine's clock is not the router's: it declines within 5 s of the end of its lease.
    deployment = await deploy()
    talk = Talk(deployment, stream=True)
    await talk.say()
    deployment.fabric.clock.advance(477)
    turn = await talk.say("Go on.")
    assert [record.handle_id is not None for record in turn.prefills] == [True, False]
    assert turn.prefills[0].status == 500
