"""No prompt, key or answer in a log line, a metric or an explanation, whatever goes wrong (IS-07).

A canary of its own stands in every field of every body, in every header, in the query and in the answers; the router
logs at its most talkative level. Each place has its own word, so that a failure says where it came from.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, Talk, send
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Gate, Kind
from support.rawhttp import RawConnection, post
from support.waiting import until

CANARY = re.compile(rb"canary[-_ ]?[a-z0-9-]*", re.IGNORECASE)
CHAT = "/v1/chat/completions"


def texts(place: str) -> str:
    return f"{TEXT} My canary-{place} is buried here. {TEXT}"


CHAT_BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": texts("system")},
        {"role": "user", "name": "canary-name", "content": [{"type": "text", "text": texts("part")}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "canary-call", "type": "function", "function": {"name": "f", "arguments": '{"a": "canary-args"}'}}]},
        {"role": "tool", "tool_call_id": "canary-call", "content": texts("tool")},
        {"role": "user", "content": texts("user")},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "canary-tool", "parameters": {}}}],
    "user": "canary-user-field",
    "metadata": {"canary-key": "canary-value"},
    "conversation_id": "canary-conversation",
    "session_id": "canary-session",
    "prompt_cache_key": "canary-cache",
    "cache_salt": "canary-salt",
    "stop": ["canary-stop"],
    "chat_template_kwargs": {"canary-kwarg": "canary"},
    "kv_transfer_params": {"remote_host": "canary-host", "remote_engine_id": "canary-engine"},
    "canary_unknown_field": "canary-unknown",
}  # fmt: skip
HEADERS = {
    "Authorization": "Bearer sk-canary-authorization",
    "x-api-key": "canary-api-key",
    "Cookie": "canary=cookie",
    "X-Conversation-ID": "canary-conversation-header",
    "X-Session-ID": "canary-session-header",
    "X-PD-Tenant": "canary-tenant",
    "X-PD-Gateway-Secret": "canary-gateway-secret",
    "User-Agent": "canary-agent",
    "Baggage": "canary=baggage",
    "X-Canary-Header": "canary-header",
}
BODIES: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, CHAT_BODY),
    "streamed chat": (CHAT, {**CHAT_BODY, "stream": True}),
    "completions": ("/v1/completions", {"model": "tiny", "prompt": texts("prompt"), "suffix": "canary-suffix"}),
    "responses": ("/v1/responses", {"model": "tiny", "input": texts("input"), "instructions": texts("instructions")}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 5, "system": texts("system"),
                                  "messages": [{"role": "user", "content": texts("user")}]}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": texts("prompt")}),
    "embeddings": ("/v1/embeddings", {"model": "tiny", "input": texts("input")}),
    "no JSON": (CHAT, b'{"model": "tiny", "messages": [canary-broken'),
    "not UTF-8": (CHAT, b'{"model": "canary\xff"}'),
    "wrong type": (CHAT, {**CHAT_BODY, "n": "canary-n"}),
    "wrong role": (CHAT, {"model": "tiny", "messages": [{"role": {"canary": "role"}, "content": "canary"}]}),
    "unknown model": (CHAT, {**CHAT_BODY, "model": "canary-model"}),
    "unknown path": ("/v1/canary-path?canary=query", CHAT_BODY),
    "query": (CHAT + "?api_key=canary-query", CHAT_BODY),
    "too deep": (CHAT, b'{"model": "tiny", "messages": ' + b'[{"canary": ' * 3000 + b"1" + b"}]" * 3000 + b"}"),
    "half a surrogate": (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "canary \\ud800"}]}'),
    "huge integer": (CHAT, b'{"model": "tiny", "canary": 1' + b"0" * 400
                     + b', "messages": [{"role": "user", "content": "canary-integer"}]}'),
}  # fmt: skip


async def assert_silent(deployment: Deployment) -> None:
    """No canary anywhere that an operator looks."""
    await deployment.decode.idle(15.0)
    pages = {"log": deployment.router.log.encode()}
    async with aiohttp.ClientSession() as session:
        for path in ("/metrics", "/debug/explain", "/debug/fleet", "/status"):
            async with session.get(deployment.router.admin_url + path) as response:
                pages[path] = await response.read()
    for name, page in pages.items():
        found = CANARY.search(page)
        assert found is None, (name, page[max(0, found.start() - 200) : found.end() + 100])
    assert TEXT[:40].encode() not in b"".join(pages.values())


@pytest.fixture
def spec() -> Spec:
    seconds = ("prefill", "pull", "first-byte", "answer", "idle")
    return Spec(flags=(("--log-level", "debug"), *((f"--{name}-timeout", "1") for name in seconds)))


@pytest.mark.parametrize("name", BODIES)
async def test_requests(deploy: Any, spec: Spec, name: str) -> None:
    deployment = await deploy(spec)
    path, body = BODIES[name]
    for _ in range(2):
        await send(deployment, body, HEADERS, path=path)
    await assert_silent(deployment)


def quoting(status: int) -> Fault:
    """An engine that quotes the prompt, as a validation error or a stack trace does."""
    message = f"Cannot do {texts('user')} for you: canary-session"
    return Fault(Kind.STATUS, status=status, body=json.dumps({"error": {"message": message}}).encode())


FAULTS: dict[str, Callable[[], Fault]] = {
    "400 that quotes": lambda: quoting(400),
    "422 that quotes": lambda: quoting(422),
    "500 that quotes": lambda: quoting(500),
    "503 that quotes": lambda: quoting(503),
    "reset": lambda: Fault(Kind.RESET),
    "close": lambda: Fault(Kind.CLOSE),
    "error event": lambda: Fault(Kind.ERROR_EVENT),
    "error finish": lambda: Fault(Kind.FINISH_ERROR),
    "cut": lambda: Fault(Kind.TRUNCATE),
    "hang": lambda: Fault(Kind.HANG),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engines_that_fail(deploy: Any, spec: Spec, role: str, stream: bool) -> None:
    deployment = await deploy(spec, breaks=True)
    engine = deployment.prefill if role == "prefill" else deployment.decode
    for name, fault in FAULTS.items():
        for _ in range(2):
            engine.next(Behaviour(fault=fault()))
        # Of a scope of its own, so that no handle is found, which would be a third try.
        body = {**CHAT_BODY, "stream": stream, "cache_salt": f"canary-{name}-{role}-{stream}"}
        turn = await send(deployment, body, HEADERS)
        assert turn.status != 200 or stream or turn.error, name
        engine.plan.clear()
        # The breaker must not open, or nothing would reach the engine any more.
        assert (await send(deployment, CHAT_BODY, HEADERS)).status == 200
    await assert_silent(deployment)


async def test_clients_that_leave(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec)
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    turn = asyncio.create_task(Talk(deployment, stream=True, headers=HEADERS).say(texts("left")))
    await gate.reached.wait()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    gate.open()
    await until(lambda: _at_rest(deployment))
    await assert_silent(deployment)


async def _at_rest(deployment: Deployment) -> bool:
    return (await deployment.metrics())["pd_router_inflight"] == 0


async def test_requests_that_are_none(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec)
    good = post(CHAT, CHAT_BODY, *(f"{name}: {value}" for name, value in HEADERS.items()))
    for data in (
        b"GET /canary HTTP/1.1\r\ncanary\r\n\r\n",
        b"canary\r\n\r\n",
        good.replace(b"Content-Length", b"Content-Length: canary\r\nX"),
        good.replace(b"Host:", b"Host: canary/\r\nX:"),
        good + b"canary-garbage",
        good[:-40],
        b"POST /canary HTTP/1.1\r\nHost: x\r\nX: " + b"canary" * 30_000 + b"\r\n\r\n",
    ):
        async with RawConnection(deployment.router.port) as raw:
            await raw.send(data)
            if data != good[:-40]:
                await raw.some()
    await assert_silent(deployment)
