"""HTTP/1.1 at the client's side: bodies in every framing, connections that are kept, methods, headers (RP-13)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.chat import TEXT, Talk, send
from support.fake_engine import Behaviour
from support.legs import events_of
from support.rawhttp import RawConnection, chunked, post

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_chunked_body(deploy: Any, size: int) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(chunked(CHAT, BODY, size))
        answer = await raw.answer()
    assert answer.json["choices"][0]["message"]["content"] == deployment.right(BODY).content
    for record in deployment.records():
        assert record.header("transfer-encoding") is None
        assert record.header("content-length") == str(len(record.raw))


async def test_expect_100_continue(deploy: Any) -> None:
    deployment = await deploy()
    whole = post(CHAT, BODY, "Expect: 100-continue")
    head, _, body = whole.partition(b"\r\n\r\n")
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(head + b"\r\n\r\n")
        assert (await raw.answer()).status == 100
        await raw.send(body)
        assert (await raw.answer()).status == 200
    assert all(record.header("expect") is None for record in deployment.records())


async def test_a_body_that_comes_in_drops(deploy: Any) -> None:
    deployment = await deploy()
    data = post(CHAT, BODY)
    async with RawConnection(deployment.router.port) as raw:
        for start in range(0, len(data), 50):
            await raw.send(data[start : start + 50])
            await asyncio.sleep(0)
        assert (await raw.answer()).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_is_kept(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        for _ in range(3):
            await raw.send(post(CHAT, {**BODY, "stream": stream}))
            answer = await raw.answer()
            assert answer.status == 200
            if stream:
                assert events_of(answer.body)[-1] == "[DONE]"
        await raw.send(post(CHAT, b"{"))
        assert (await raw.answer()).status == 400
        await raw.send(post(CHAT, BODY, "Connection: close"))
        assert (await raw.answer()).status == 200
        assert await raw.at_end()


async def test_pipelined_requests_are_answered_in_order(deploy: Any) -> None:
    deployment = await deploy()
    bodies = [
        {"model": "tiny", "messages": [{"role": "user", "content": f"{number} {TEXT}"}], "stream": number % 2 == 1}
        for number in range(4)
    ]
    hold = asyncio.Event()
    deployment.decode.next(Behaviour(hold=hold))
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"".join(post(CHAT, body) for body in bodies))
        asyncio.get_running_loop().call_later(0.1, hold.set)
        for body in bodies:
            answer = await raw.answer()
            right = deployment.right(body).content
            if body["stream"]:
                deltas = [event["choices"][0]["delta"]["content"] for event in events_of(answer.body)[:-1]]
                assert "".join(deltas) == right
            else:
                assert answer.json["choices"][0]["message"]["content"] == right


async def test_http_1_0(deploy: Any) -> None:
    deployment = await deploy()
    data = json.dumps({**BODY, "stream": True}).encode()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(data), data))
        answer = await raw.answer()
    assert answer.header("transfer-encoding") is None
    assert events_of(answer.body)[-1] == "[DONE]"


async def test_head_and_get(deploy: Any) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        got = await raw.answer()
        await raw.send(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await raw.answer(head_only=True)
        assert (got.status, head.status) == (200, 200)
        # Whatever follows HEAD's answer must be the next answer, not HEAD's body.
        await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.answer()).status == 200
        await raw.send(b"HEAD " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.answer(head_only=True)).status == 405


async def test_headers_that_must_not_be_passed_on(deploy: Any) -> None:
    deployment = await deploy()
    lines = (
        "Connection: keep-alive, X-Hop",
        "X-Hop: canary-hop",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Upgrade: websocket",
        "Proxy-Authorization: Basic canary",
        "X-PD-Tenant: canary-tenant",
        "X-Session-ID: canary-session",
        "Cookie: canary=1",
    )
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, BODY, *lines))
        assert (await raw.answer()).status == 200
    for record in deployment.records():
        assert len({name.lower() for name, _ in record.headers}) == len(record.headers)
        for name in ("x-hop", "keep-alive", "te", "upgrade", "proxy-authorization", "x-pd-tenant", "cookie"):
            assert record.header(name) is None, name


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_headers(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    headers = {
        "Connection": "keep-alive, X-Engine-Hop",
        "X-Engine-Hop": "1",
        "X-Served-By": "canary-engine@10.0.0.1:5600",
        "Keep-Alive": "timeout=9",
    }
    deployment.decode.default = Behaviour(headers=headers)
    turn = await Talk(deployment, stream=stream).say()
    expected = "text/event-stream" if stream else "application/json"
    assert turn.headers["Content-Type"].partition(";")[0] == expected
    assert "canary" not in str(turn.headers)
    assert "X-Engine-Hop" not in turn.headers
    assert turn.headers.getall("Date", []) in ([], [turn.headers.get("Date")])  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_would_compress(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    for engine in deployment.engines:
        engine.default = Behaviour(gzip=True)
    talk = Talk(deployment, stream=stream, headers={"Accept-Encoding": "gzip"})
    for number in range(2):
        turn = await talk.say()
        assert "Content-Encoding" not in turn.headers
        assert len(turn.attached) == number


async def test_request_ids(deploy: Any) -> None:
    deployment = await deploy()
    turn = await send(deployment, BODY, {"X-Request-ID": "my-id.42"})
    assert turn.headers["X-Request-Id"] == "my-id.42"
    turn = await send(deployment, BODY)
    assert turn.headers["X-Request-Id"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 300_000 + b"\r\n\r\n",
    ],
    ids=["tls hello", "no version", "bad length", "both framings", "bad chunk", "huge header"],
)
async def test_garbage_costs_one_connection(deploy: Any, data: bytes) -> None:
    deployment = await deploy()
    async with RawConnection(deployment.router.port) as raw:
        try:
            await raw.send(data)
            got = await raw.some()
        except ConnectionError:
            got = b""
        assert got == b"" or b" 4" in got.split(b"\r\n")[0]
    assert (await send(deployment, BODY)).status == 200


async def test_half_a_request(deploy: Any) -> None:
    deployment = await deploy()
    for cut in (10, 60, -10):
        async with RawConnection(deployment.router.port) as raw:
            await raw.send(post(CHAT, BODY)[:cut])
    assert (await send(deployment, BODY)).status == 200
    assert len(deployment.decode.generates) == 1
