"""Between prefill's answer and decode's first content: decode that hangs, an address that swallows connections, and the
lease on prefill's blocks, after which they are somebody else's (HL-16, RP-07, RP-12)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.chat import Talk
from support.deployment import Spec
from support.fake_engine import Behaviour, FakeEngine
from support.waiting import until

LEASE = Spec(
    prefills=2,
    decodes=2,
    connector=(("lease", 3.0),),
    flags=(("--lease", "3"), ("--connect-timeout", "0.5")),
)
"""The router takes an engine for silent within two thirds of the lease on prefill's blocks."""


async def prefilled(engines: list[FakeEngine], hold: asyncio.Event) -> None:
    """Wait until one of the prefill engines has computed a prompt; it answers once ``hold`` is set."""
    for engine in engines:
        engine.next(Behaviour(hold=hold))

    async def there() -> bool:
        return any(record.pulled_tokens is not None for engine in engines for record in engine.generates)

    await until(there, pause=0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("seconds", "moves"), [(0.2, False), (4.0, True)])
async def test_decode_hangs_when_prefill_has_answered(deploy: Any, stream: bool, seconds: float, moves: bool) -> None:
    deployment = await deploy(LEASE, breaks=True)
    hold = asyncio.Event()
    talk = Talk(deployment, stream=stream)
    asking = asyncio.create_task(talk.say())
    await prefilled(deployment.prefills, hold)
    told = [member for member in await deployment._fleet() if member["role"] == "decode" and member["turns"]]
    chosen = next(engine for engine in deployment.decodes if engine.url == told[0]["engine"])
    chosen.freeze()
    hold.set()
    await asyncio.sleep(seconds)
    chosen.thaw()
    turn = await asking
    # After the lease the blocks are prefill's again: a decode engine that wakes up then must have been given up before.
    assert (turn.decodes[-1] not in chosen.generates) is moves
    assert len(turn.prefills) == (2 if moves else 1)
    await deployment.wait_ready(4)


@asynccontextmanager
async def swallowing(port: int) -> AsyncIterator[None]:
    """A port at which connections are neither accepted nor refused: its queue is full and nobody takes any."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(0)
    filling = []
    try:
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            filling.append(one)
        yield
    finally:
        for one in [*filling, listener]:
            one.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_address_that_swallows_connections(deploy: Callable[..., Awaitable[Any]], role: str) -> None:
    deployment = await deploy(LEASE, breaks=True)
    engines = deployment.prefills if role == "prefill" else deployment.decodes
    gone = engines[0]
    await gone.kill()
    async with swallowing(gone.port):
        talks = [Talk(deployment, stream=True) for _ in range(6)]
        await asyncio.gather(*(talk.say() for talk in talks))
        await deployment.wait_ready(3)
        await asyncio.gather(*(talk.say("Go on.") for talk in talks))
    await gone.restart()
    await deployment.wait_ready(4)
