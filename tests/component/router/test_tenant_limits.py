"""Limits of one tenant: it is told what it hit, nobody else notices, and decode holds no more for it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, Talk, Turn
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Gate
from support.waiting import until

RATE = Spec(flags=(("--tenant-rate", "0.001"), ("--tenant-burst", "2")))
CONCURRENCY = Spec(flags=(("--tenant-max-inflight", "2"),))
QUEUE = Spec(flags=(("--max-inflight", "1"), ("--max-queue", "4"), ("--tenant-queue-share", "0.5")))


def assert_limited(turn: Turn, code: str, words: str) -> None:
    assert turn.status == 429, turn.raw
    error = turn.json["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    assert words in error["message"]
    assert int(turn.headers["Retry-After"]) >= 1
    assert turn.headers["X-Request-Id"]
    assert "canary" not in error["message"]


async def gained(deployment: Deployment, limit: str, before: dict[str, float]) -> float:
    name = f'pd_router_tenant_limited_total{{limit="{limit}"}}'
    return (await deployment.metrics())[name] - before[name]


async def test_rate(deploy: Any) -> None:
    deployment = await deploy(RATE)
    before = await deployment.metrics()
    talks = [Talk(deployment, tenant="rate-a"), Talk(deployment, tenant="rate-a", stream=True)]
    for talk in talks:
        await talk.say()
    seen = len(deployment.records())
    turn = await talks[0].say(check=False)
    assert_limited(turn, "tenant_rate_limit", "0.001 requests per second")
    assert int(turn.headers["Retry-After"]) > 900
    assert len(deployment.records()) == seen
    await Talk(deployment, tenant="rate-b").say()
    assert await gained(deployment, "tenant_rate_limit", before) == 1


async def test_health_and_requests_of_others_are_not_counted(deploy: Any) -> None:
    deployment = await deploy(RATE)
    async with aiohttp.ClientSession() as session:
        for _ in range(5):
            async with session.get(deployment.router.url + "/health") as response:
                assert response.status == 200
    await Talk(deployment, tenant="rate-c").say()


@pytest.mark.parametrize("how", ["answered", "left"])
async def test_concurrency(deploy: Any, how: str) -> None:
    deployment = await deploy(CONCURRENCY)
    gates = [Gate(2), Gate(2)]
    for gate in gates:
        deployment.decode.next(Behaviour(gate=gate))
    running = [asyncio.create_task(Talk(deployment, tenant=f"busy-{how}", stream=True).say()) for _ in gates]
    for gate in gates:
        await gate.reached.wait()
    turn = await Talk(deployment, tenant=f"busy-{how}").say(check=False)
    assert_limited(turn, "tenant_concurrency_limit", "2 requests at one time")
    await Talk(deployment, tenant="idle").say()
    if how == "left":
        running[0].cancel()
        await asyncio.gather(*running[:1], return_exceptions=True)

        async def served() -> bool:
            return (await Talk(deployment, tenant=f"busy-{how}").say(check=False)).status == 200

        await until(served)
    for gate in gates:
        gate.open()
    await asyncio.gather(*running, return_exceptions=True)
    await Talk(deployment, tenant=f"busy-{how}").say()


async def test_one_tenant_cannot_fill_the_queue(deploy: Any) -> None:
    deployment = await deploy(QUEUE)
    before = await deployment.metrics()
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    running = asyncio.create_task(Talk(deployment, tenant="greedy", stream=True).say())
    await gate.reached.wait()
    waiting = [asyncio.create_task(Talk(deployment, tenant="greedy").say()) for _ in range(2)]

    async def queued(count: int) -> bool:
        return (await deployment.metrics())["pd_router_queued"] == count

    await until(lambda: queued(2))
    turn = await Talk(deployment, tenant="greedy").say(check=False)
    assert_limited(turn, "tenant_queue_limit", "2 waiting requests")
    assert await gained(deployment, "tenant_queue_limit", before) == 1
    waiting.append(asyncio.create_task(Talk(deployment, tenant="modest").say()))
    await until(lambda: queued(3))
    gate.open()
    await asyncio.gather(running, *waiting)
    await Talk(deployment, tenant="greedy").say()


@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_retained_tokens(deploy: Any, mode: Any) -> None:
    """The first conversation is kept, the second is served and not kept, until the first gives its tokens back."""
    probe = await deploy()
    usage = (await Talk(probe, tenant="probe").say()).json["usage"]
    limit = int(usage["prompt_tokens"] * 1.5) + usage["completion_tokens"]
    deployment = await deploy(Spec(mode=mode, flags=(("--tenant-retained-tokens", str(limit)),)))
    before = await deployment.metrics()
    first, second = Talk(deployment, tenant="hoarder"), Talk(deployment, tenant="hoarder")
    await first.say()
    await second.say()
    assert await gained(deployment, "tenant_retained_limit", before) == 1
    assert deployment.decode.generates[-1].body["kv_transfer_params"]["pd_retain"] is False
    # vLLM's own connector retains all the same; what it names is not kept.
    other = Talk(deployment, tenant="other")
    await other.say()
    assert len((await other.say("Go on.")).attached) == 1
    assert (await second.say("Go on.")).attached == []
    assert len((await first.say("Go on.")).attached) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_without_limits_a_tenant_may_do_as_it_likes(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    talks = [Talk(deployment, tenant="free", stream=stream) for _ in range(20)]
    await asyncio.gather(*(talk.say(TEXT) for talk in talks))
