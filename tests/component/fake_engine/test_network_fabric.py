"""The fabric between processes: a pull over the network is a pull, and what is wrong reaches the judge.

If these pass for the wrong reason, the tests with fake engines in pods prove nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from support.cluster_serving_fabric import JudgeClient, NetworkFabric, side_channel
from support.fake_engine import ConnectorConfig, EngineConfig, FakeEngine, expected_answer
from support.fake_engine.engine import Record
from support.legs import HandTurn, hand_turn
from support.ports import free_port

TESTS = Path(__file__).parents[2]
LONG = "The quick brown fox jumps over the lazy dog while the band plays on and on. " * 3


class Pods:
    """A judge in a process of its own, and two engines that share nothing but it."""

    def __init__(self, judge: str) -> None:
        self.judge = judge
        self.fabrics: list[NetworkFabric] = []
        self.engines: list[FakeEngine] = []
        self.runners: list[web.AppRunner] = []

    async def add(self, role: Any, mode: Any, **fields: Any) -> None:
        """Start an engine with a side channel."""
        client = JudgeClient(self.judge)
        await asyncio.to_thread(client.wait)
        fabric = NetworkFabric(client)
        address = ("127.0.0.1", free_port())
        config = EngineConfig(ConnectorConfig(role, mode=mode, **fields), name=f"{role}-0", side_channel=address)
        engine = FakeEngine(config, fabric)
        runner = web.AppRunner(side_channel(engine.connector), access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, *address).start()
        await engine.start()
        self.fabrics.append(fabric)
        self.engines.append(engine)
        self.runners.append(runner)

    async def close(self) -> None:
        for engine, runner, fabric in zip(self.engines, self.runners, self.fabrics, strict=True):
            await engine.kill()
            await fabric.close()
            await runner.cleanup()

    async def say(self, *texts: str, handle: Any = None) -> HandTurn:
        return await hand_turn(*self.engines, chat(*texts), handle)

    async def report(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.judge}/report") as response:
            found: dict[str, Any] = json.loads(await response.read())
        return found

    @property
    def last_prefill(self) -> Record:
        return self.engines[0].generates[-1]


@pytest.fixture
async def judge() -> AsyncIterator[str]:
    port = free_port()
    paths = os.pathsep.join(str(folder) for folder in (TESTS, TESTS.parent / "connector"))
    argv = (sys.executable, "-m", "support.cluster_serving_judge", str(port))
    process = await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, "PYTHONPATH": paths}, stderr=asyncio.subprocess.DEVNULL
    )
    yield f"http://127.0.0.1:{port}"
    process.kill()
    await process.wait()


@pytest.fixture(params=["verified", "stock"])
async def pods(judge: str, request: pytest.FixtureRequest) -> AsyncIterator[Pods]:
    made = Pods(judge)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.close)
        for role in ("prefill", "decode"):
            await made.add(role, request.param)
        yield made


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "tiny", "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def right(pods: Pods, *texts: str) -> str:
    template = pods.engines[0].config.template
    return expected_answer(template.render(chat(*texts)), model="tiny", body=chat(*texts)).content


async def test_a_turn_is_pulled_in_both_directions_and_right(pods: Pods) -> None:
    one = await pods.say(LONG)
    said = (LONG, one.text or "", "and then?")
    two = await pods.say(*said, handle=one.handle)
    assert two.text == right(pods, *said)
    assert (pods.last_prefill.pulled_tokens or 0) > 200
    report = await pods.report()
    assert report["violations"] == []
    assert (report["issued"], report["sent"]) == (4, 3)
    assert sorted(report["engines"].values()) == ["decode-0", "prefill-0"]


async def test_a_pull_frees_what_was_kept_for_it(pods: Pods) -> None:
    one = await pods.say(LONG)
    decode = pods.engines[1].connector
    assert len(decode.retained()) == 1
    two = await pods.say(LONG, one.text or "", "and then?", handle=one.handle)
    assert two.handle is not None

    async with asyncio.timeout(10):
        while set(decode.retained()) != {two.handle["remote_request_id"]}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_breaches_reach_the_judge(pods: Pods) -> None:
    one = await pods.say(LONG)
    said = (LONG, one.text or "", "and then?")
    await pods.say(*said, handle=one.handle)
    await pods.say(*said, handle=one.handle)
    assert one.handle is not None
    await pods.say(*said, handle={**one.handle, "remote_request_id": "cmpl-made-up"})
    violations = (await pods.report())["violations"]
    assert any("handle used twice: prefill-0, prefill-0" in one for one in violations)
    assert any("names a request that no engine gave a handle for" in one for one in violations)


async def test_a_peer_that_is_gone_is_a_failed_load(pods: Pods) -> None:
    one = await pods.say(LONG)
    await pods.runners[1].cleanup()
    two = await pods.say(LONG, one.text or "", "and then?", handle=one.handle)
    assert two.prefill_status == 500
    assert pods.engines[0].connector.counters["failed_transfers"] == 1


async def test_wrong_blocks_are_a_wrong_answer(judge: str) -> None:
    """Blocks that came over the network are really what answers are made of."""
    pods = Pods(judge)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pods.close)
        for role in ("prefill", "decode"):
            await pods.add(role, "stock")
        other = await pods.say("Tell me a secret. " + LONG)
        said = ("What is the weather? " + LONG, "fine", "sure?")
        turn = await pods.say(*said, handle=other.handle)
        assert turn.text != right(pods, *said)
