"""Requests that a library would not send, and clients that leave, crowd in or stop the router twice."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support.chat import TEXT, Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Gate
from support.rawhttp import RawConnection, chunked, post
from support.specs import NARROW
from support.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")


async def queued(deployment: Deployment, count: int) -> None:
    async def so_many() -> bool:
        return bool((await deployment.metrics())["pd_router_queued"] == count)

    await until(so_many)


# -- offers to upgrade ------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [1, 37, 100_000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_an_offered_upgrade_is_ignored(deploy: Any, framing: str, step: int) -> None:
    deployment = await deploy()
    offer = post(CHAT, BODY, *OFFER) if framing == "length" else chunked(CHAT, BODY, 50, *OFFER)
    data = offer + HEALTH + offer
    async with RawConnection(deployment.router.port) as raw:
        for start in range(0, len(data), step):
            await raw.send(data[start : start + step])
        answers = [await raw.answer() for _ in range(3)]
    assert answers[1].json == {"status": "ok"}
    for answer in (answers[0], answers[2]):
        assert answer.json["choices"][0]["message"]["content"] == deployment.right(BODY).content
    for record in deployment.records():
        assert record.header("upgrade") is None


async def test_an_offers_body_is_no_request(deploy: Any) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, post(CHAT, BODY), *OFFER) + HEALTH)
        assert (await raw.answer()).json["error"]["code"] == "malformed_json"
        assert (await raw.answer()).json == {"status": "ok"}
    assert deployment.records() == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        (("Transfer-Encoding: gzip", "Transfer-Encoding: chunked"), 400),
        (("Content-Encoding: gzip", "Content-Length: 5"), 415),
        (("Content-Length: 99999999999",), 413),
        (("Host: y",), 400),
    ],
    ids=["both framings", "two codings", "packed", "too large", "two hosts"],
)
async def test_an_offer_changes_no_limit(deploy: Any, lines: tuple[str, ...], status: int) -> None:
    deployment = await deploy()
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", *OFFER, *lines])
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(head.encode() + b"\r\n\r\n" + b"0\r\n\r\n" + HEALTH)
        assert (await raw.answer()).status == status
        assert await raw.at_end()


@pytest.mark.parametrize("more", [(), OFFER])
async def test_connect_opens_no_tunnel(deploy: Any, more: tuple[str, ...]) -> None:
    deployment = await deploy()
    lines = "".join(f"{line}\r\n" for line in more).encode()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"CONNECT evil.example:80 HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + HEALTH)
        assert (await raw.answer()).status == 405
        assert await raw.at_end()


# -- heads --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "head",
    [
        b"GET //[ HTTP/1.1\r\nHost: x",
        b"POST //[::1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0",
        b"GET http://[/v1/models HTTP/1.1\r\nHost: x",
        b"GET http://]/v1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models#x HTTP/1.1\r\nHost: x",
        b"GET /v1/models HTTP/1.1",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: x",
        b"GET /v1/models HTTP/1.1\r\nHost: x, y",
    ],
)
async def test_a_head_that_is_not_valid(deploy: Any, head: bytes) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(head + b"\r\n\r\n")
        answer = await raw.answer()
        assert (answer.status, answer.json["error"]["code"]) == (400, "malformed_request")
        assert await raw.at_end()


@pytest.mark.parametrize("authority", ["evil.example", "evil.example:81", "[::1]:81"])
async def test_of_a_whole_url_only_the_path_counts(deploy: Any, authority: str) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(f"http://{authority}{CHAT}?a=b", BODY))
        assert (await raw.answer()).status == 200
    for engine in deployment.engines:
        (record,) = engine.generates
        assert record.target == CHAT
        assert record.header("host") == engine.url.removeprefix("http://")


@pytest.mark.parametrize("path", ["//evil.example/v1/models", "/v1/models;a", "/v1/models/", "*"])
async def test_what_is_nearly_a_path(deploy: Any, path: str) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"OPTIONS %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode() + HEALTH)
        assert (await raw.answer()).status == 404
        assert (await raw.answer()).status == 200


async def test_a_coding_on_two_lines(deploy: Any) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(chunked(CHAT, BODY, 50).replace(b"Transfer", b"Transfer-Encoding: gzip\r\nTransfer", 1))
        assert (await raw.answer()).status == 400
        assert await raw.at_end()
    assert deployment.records() == []


async def test_a_trailer_changes_no_header(deploy: Any) -> None:
    deployment = await deploy()
    data = chunked(CHAT, BODY, 50, "X-Request-ID: of-the-head")[: -len(b"\r\n")]
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(data + b"X-Request-ID: of-the-trailer\r\nAuthorization: Bearer other\r\n\r\n")
        answer = await raw.answer()
        assert (answer.status, answer.header("x-request-id")) == (200, "of-the-head")
    assert all(record.header("authorization") is None for record in deployment.records())


# -- one behind the other ------------------------------------------------------------------------------
async def test_a_bad_request_behind_a_good_one(deploy: Any) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, BODY) + b"NONSENSE\r\n\r\n")
        assert [(await raw.answer()).status for _ in range(2)] == [200, 400]
        assert await raw.at_end()


async def test_a_body_is_asked_for_between_two_answers(deploy: Any) -> None:
    deployment = await deploy()
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    head, _, body = post(CHAT, BODY, "Expect: 100-continue").partition(b"\r\n\r\n")
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, {**BODY, "stream": True}) + head + b"\r\n\r\n")
        await gate.reached.wait()
        await raw.send(b"")
        gate.open()
        assert (await raw.answer()).body.endswith(b"data: [DONE]\n\n")
        assert (await raw.answer()).status == 100
        await raw.send(body)
        assert (await raw.answer()).status == 200


# -- the queue -----------------------------------------------------------------------------------------
async def test_a_client_that_left_keeps_no_place_in_the_queue(deploy: Any) -> None:
    deployment = await deploy(NARROW)
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    holding = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, BODY))
        await queued(deployment, 1)
        raw.abort()
    await queued(deployment, 0)
    waiting = asyncio.create_task(Talk(deployment).say())
    await queued(deployment, 1)
    gate.open()
    await asyncio.gather(holding, waiting)
    assert [entry["status"] for entry in (await deployment.explain())[-3:]] == [499, 200, 200]


async def test_a_wait_that_was_too_long_is_called_so(deploy: Any) -> None:
    flags = (("--max-inflight", "1"), ("--max-queue", "2"), ("--queue-timeout", "0.2"))
    deployment = await deploy(Spec(flags=flags))
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    holding = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, BODY))
        answer = await raw.answer()
    assert (answer.status, answer.header("retry-after")) == (429, "1")
    assert answer.json["error"]["code"] == "queue_timeout"
    assert answer.json["error"]["message"].startswith("No place came free within 0.2 s")
    gate.open()
    await holding
    await Talk(deployment).say()


# -- the process ------------------------------------------------------------------------------------------
def pid_of(deployment: Deployment) -> int:
    process = deployment.router._process
    assert process is not None
    return process.pid


async def test_the_router_takes_all_descriptors_that_it_may_have(deploy: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        deployment = await deploy(fresh=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(pid_of(deployment), resource.RLIMIT_NOFILE) == (hard, hard)


async def test_a_crowd_of_idle_clients_leaves_room_for_the_rest(deploy: Any) -> None:
    deployment = await deploy(fresh=True)
    resource.prlimit(pid_of(deployment), resource.RLIMIT_NOFILE, (256, 256))
    async with AsyncExitStack() as crowd:
        answer = None
        for _ in range(250):
            raw = await crowd.enter_async_context(RawConnection(deployment.router.port))
            await deployment.router.wait_ready()
            await raw.send(HEALTH)
            answer = await raw.answer()
            if answer.status != 200:
                break
        assert answer is not None
        assert answer.json["error"]["code"] == "too_many_connections"

    async def served() -> bool:
        return (await Talk(deployment).say(check=False)).status == 200

    await until(served)
    assert deployment.router.log.count("client connections are refused") == 1
