"""`pdctl top` against a running router and its engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from support.chat import Talk
from support.deployment import Deployment
from support.ports import free_ports
from support.top_process import run, start


@pytest_asyncio.fixture(loop_scope="session")
async def talked(deploy: Any) -> Deployment:
    deployment: Deployment = await deploy()
    talk = Talk(deployment, stream=True)
    await talk.say()
    await talk.say("Go on.")
    return deployment


async def test_once(talked: Deployment) -> None:
    code, out, error = await run("--once", "--admin", talked.router.admin_url)
    assert (code, error) == (0, "")
    assert out.count("time to first token") == 1
    assert talked.prefill.url in out
    assert talked.decode.url in out
    assert "since the start" in out
    for line in out.splitlines():
        if "time to first token" in line:
            assert line.count(" ms") == 3


async def test_json(talked: Deployment) -> None:
    code, out, error = await run("--json", "--admin", talked.router.admin_url)
    assert (code, error) == (0, "")
    found = json.loads(out)
    metrics = await talked.metrics()
    assert found["funnel"]["pulled"] == metrics['pd_router_reuse_stage_total{stage="pulled"}'] >= 1
    assert found["pulled_tokens"] == metrics["pd_router_pulled_tokens_total"] > 0
    assert found["latency"]["ttft"]["count"] == metrics["pd_router_ttft_seconds_count"]
    assert 0 < found["latency"]["ttft"]["p50"] <= found["latency"]["ttft"]["p99"]
    engines = {one["engine"]: one for one in found["engines"]}
    decode = engines[talked.decode.url]
    assert (decode["role"], decode["ready"], decode["breaker"]) == ("decode", True, "closed")
    assert decode["handles"] >= 1
    assert decode["kv_usage"] == pytest.approx(
        1 - talked.decode.connector.free_blocks() / talked.decode.connector.pool.count
    )
    assert decode["legs"]["ok"] >= 2


async def test_over_a_window_only_what_happens_in_it_counts(talked: Deployment) -> None:
    process = await start("--json", "--window", "1", "--admin", talked.router.admin_url)
    before = (await talked.metrics())["pd_router_turn_seconds_count"]

    async def turns_until_it_ends() -> int:
        count = 0
        while process.returncode is None:
            await Talk(talked).say()
            count += 1
        return count

    talking = asyncio.create_task(turns_until_it_ends())
    out, error = await process.communicate()
    await talking
    assert error == b""
    found = json.loads(out)
    assert 0 < found["answers"] < before + await talking
    assert found["window_seconds"] == pytest.approx(1, abs=2)


async def test_without_the_engines(talked: Deployment) -> None:
    _, out, _ = await run("--json", "--no-engines", "--admin", talked.router.admin_url)
    assert {one["kv_usage"] for one in json.loads(out)["engines"]} == {None}


async def test_two_routers_add_up(deploy: Any, talked: Deployment) -> None:
    other = await deploy(fresh=True)
    await Talk(other).say()
    urls = ("--admin", talked.router.admin_url, "--admin", other.router.admin_url)
    alone = json.loads((await run("--json", *urls[:2]))[1])
    both = json.loads((await run("--json", *urls))[1])
    assert (both["routers"], both["answers"], len(both["engines"])) == (2, alone["answers"] + 1, 4)


async def test_live_until_it_is_interrupted(talked: Deployment) -> None:
    ours, theirs = os.openpty()
    process = await start("--interval", "0.2", "--admin", talked.router.admin_url, out=theirs)
    os.close(theirs)
    seen = b""
    os.set_blocking(ours, False)
    try:
        async with asyncio.timeout(60):
            while seen.count(b"time to first token") < 3 or b"last " not in seen:
                await asyncio.sleep(0.05)
                try:
                    seen += os.read(ours, 65536)
                except BlockingIOError:
                    continue
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            # Somebody has to read on: a terminal that nobody reads stops who writes to it.
            while process.returncode is None:
                await asyncio.sleep(0.05)
                with contextlib.suppress(OSError):
                    os.read(ours, 65536)
        assert process.returncode == 0
    finally:
        os.close(ours)
    assert process.stderr is not None
    assert b"Traceback" not in await process.stderr.read()


async def test_nobody_is_there() -> None:
    [port] = free_ports(1)
    code, out, error = await run("--once", "--admin", f"http://127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert error == f"pdctl top: no router answers at http://127.0.0.1:{port}/metrics: Connection refused\n"


async def test_somebody_else_is_there(deploy: Any) -> None:
    deployment = await deploy()
    code, _, error = await run("--once", "--admin", deployment.prefill.url)
    assert (code, "not a router's" in error, "admin port" in error) == (1, True, True)
    code, _, error = await run("--once", "--admin", deployment.router.url)
    assert (code, "404" in error, "admin port" in error) == (1, True, True)


async def test_somebody_answers_slowly_or_with_nonsense() -> None:
    async def nonsense(_request: web.Request) -> web.Response:
        return web.Response(body=b"\xff\xfe\x00nonsense{", content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.router.add_get("/metrics", nonsense)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        code, _, error = await run("--once", "--admin", f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    assert code == 1
    assert error.startswith("pdctl top: ")
    assert "Traceback" not in error
