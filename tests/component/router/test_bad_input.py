"""What the router refuses by itself, with which status and OpenAI-style body, before any engine sees it (RP-21)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, Talk, Turn, send
from support.deployment import Deployment
from support.fake_engine import Behaviour, Gate
from support.specs import NARROW
from support.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def assert_error(turn: Turn, status: int, *words: str) -> None:
    """An OpenAI-style error with this status whose message or param holds these words."""
    assert turn.status == status, turn.raw
    assert turn.headers["Content-Type"].startswith("application/json")
    error = turn.json["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    for word in words:
        assert word in error["message"] or word == error["param"], error


async def refused(deployment: Deployment, body: Any, status: int, *words: str, path: str = CHAT) -> None:
    turn = await send(deployment, body, path=path)
    assert_error(turn, status, *words)
    assert deployment.records() == []
    # The connection and the router go on.
    assert (await send(deployment, {"model": "tiny", "messages": MESSAGES})).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}]} trailing',
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b"\xef\xbb\xbf{}",
        b"NaN",
        b"[" * 100_00,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"null",
        b"[]",
        b'"text"',
        b"17",
    ],
    ids=lambda raw: repr(raw[:24]),
)
async def test_malformed_json(deploy: Any, raw: bytes) -> None:
    await refused(await deploy(), raw, 400)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1]"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content"),
        ({"model": 5}, "model"),
        ({"model": ["tiny"]}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"conversation_id": {"a": 1}}, "conversation_id"),
        ({"session_id": ["x"]}, "session_id"),
        ({"prompt_cache_key": True}, "prompt_cache_key"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"use_beam_search": "no"}, "use_beam_search"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
async def test_wrong_types_name_the_field(deploy: Any, fields: dict[str, Any], name: str) -> None:
    await refused(await deploy(), {"model": "tiny", "messages": MESSAGES, **fields}, 400, name)


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [None], [{"a": 1}], [1.5]], ids=json.dumps)
async def test_wrong_prompts_name_the_field(deploy: Any, prompt: Any) -> None:
    await refused(await deploy(), {"model": "tiny", "prompt": prompt}, 400, "prompt", path="/v1/completions")


@pytest.mark.parametrize("fields", [{"stream": None}, {"n": None}, {"stop": None, "user": None, "tools": None}])
async def test_null_is_the_same_as_absent(deploy: Any, fields: dict[str, Any]) -> None:
    deployment = await deploy()
    assert (await send(deployment, {"model": "tiny", "messages": MESSAGES, **fields})).status == 200


async def test_the_only_model_may_be_left_out(deploy: Any) -> None:
    deployment = await deploy()
    body = {"messages": [{"role": "user", "content": TEXT}]}
    turn = await send(deployment, body)
    assert turn.text == deployment.right(body).content
    assert turn.json["model"] == "tiny"


@pytest.mark.parametrize("count", [0, -1])
async def test_no_choices_at_all(deploy: Any, count: int) -> None:
    turn = await send(await deploy(), {"model": "tiny", "messages": MESSAGES, "n": count})
    assert_error(turn, 400)


async def test_unknown_model(deploy: Any) -> None:
    await refused(await deploy(), {"model": "huge", "messages": MESSAGES}, 404, "huge", "model")


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat/completion", "/v2/chat/completions", "/debug/explain", "/metrics"]
)
async def test_unknown_path(deploy: Any, path: str) -> None:
    await refused(await deploy(), {"model": "tiny", "messages": MESSAGES}, 404, path=path)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_wrong_method(deploy: Any, method: str) -> None:
    deployment = await deploy()
    async with aiohttp.ClientSession() as session, session.request(method, deployment.router.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_body_over_the_limit(deploy: Any, declared: bool) -> None:
    deployment = await deploy(NARROW)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 30000}]}).encode()

    async def pieces() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    async with (
        aiohttp.ClientSession() as session,
        session.post(deployment.router.url + CHAT, data=body if declared else pieces()) as response,
    ):
        assert response.status == 413
        assert "20000" in (await response.json())["error"]["message"]
    assert deployment.records() == []
    assert (await send(deployment, {"model": "tiny", "messages": MESSAGES})).status == 200


async def test_body_just_under_the_limit(deploy: Any) -> None:
    deployment = await deploy(NARROW)
    empty = len(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": ""}]}))
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (20000 - empty)}]}
    assert len(json.dumps(talk)) == 20000
    assert (await send(deployment, talk)).status == 200


async def test_a_large_body_is_fine_by_default(deploy: Any) -> None:
    deployment = await deploy()
    padding = {"metadata": {"padding": "é" * 2_000_000}}
    turn = await send(deployment, {"model": "tiny", "messages": MESSAGES, **padding})
    assert turn.status == 200


async def test_queue_full(deploy: Any) -> None:
    deployment = await deploy(NARROW)
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    talks = [Talk(deployment, stream=True) for _ in range(3)]
    running = asyncio.create_task(talks[0].say())
    await gate.reached.wait()
    queued = asyncio.create_task(talks[1].say())

    async def waiting() -> bool:
        return bool((await deployment.metrics())["pd_router_queued"] == 1)

    await until(waiting)
    turn = await talks[2].say(check=False)
    assert_error(turn, 429)
    assert int(turn.headers["Retry-After"]) >= 1
    gate.open()
    await asyncio.gather(running, queued)
    await talks[2].say()


async def test_no_engine(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    await deployment.prefill.kill()
    await deployment.decode.kill()
    await deployment.router.wait_ready(False)
    turn = await Talk(deployment).say(check=False)
    assert_error(turn, 503)
    assert int(turn.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    "content",
    ["", " ", "\u0000", "🙂 漢字 \u2028", "\\", '"', TEXT * 20, "data: [DONE]\n\n"],
    ids=lambda text: repr(text[:12]),
)
async def test_odd_text_is_just_text(deploy: Any, content: str) -> None:
    deployment = await deploy()
    await Talk(deployment, stream=True, opening="").say(content)


async def test_lone_surrogates_do_not_break_the_router(deploy: Any) -> None:
    deployment = await deploy()
    raw = b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800 alone"}],"conversation_id":"\\udfff"}'
    assert (await send(deployment, raw)).status in (200, 400)
    assert (await send(deployment, {"model": "tiny", "messages": MESSAGES})).status == 200


async def test_large_numbers_survive(deploy: Any) -> None:
    deployment = await deploy()
    huge = 123456789012345678901234567890
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"number": huge, "small": 0.1}}
    turn = await send(deployment, body)
    assert turn.text == deployment.right(body).content
    assert all(record.body["chat_template_kwargs"]["number"] == huge for record in deployment.records())
