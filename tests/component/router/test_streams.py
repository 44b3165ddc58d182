"""What the client reads is what the engine wrote, minus the handle: streamed and whole, cut anywhere (RP-01 … 15)."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from pd_wire import names
from support.chat import TEXT, Talk, assert_right, send
from support.fake_engine import AnswerStyle, Behaviour, Gate
from support.legs import events_of
from support.rawhttp import RawConnection, post

WIDE = ' 🙂👩‍👩‍👧 漢字かな \u2028 é \\ud83d "quoted" \n\n data: {"a": 1} '
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
VOLATILE = ("id", "created", "usage")


def stable(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what differs between two requests, and without the handle."""
    return {key: value for key, value in body.items() if key not in (*VOLATILE, names.KV_PARAMS)}


GOLDEN = [
    pytest.param({}, AnswerStyle(tail=WIDE), id="text"),
    pytest.param({"logprobs": True}, AnswerStyle(), id="logprobs"),
    pytest.param({"tools": TOOLS}, AnswerStyle(calls_tool=True), id="tool call"),
    pytest.param({}, AnswerStyle(reasoning="field"), id="reasoning"),
    pytest.param({"n": 3}, AnswerStyle(), id="choices"),
    pytest.param({"max_tokens": 5}, AnswerStyle(), id="length"),
    pytest.param({}, AnswerStyle(tail="x" * 300_000), id="large"),
]


@pytest.mark.parametrize(("fields", "style"), GOLDEN)
async def test_a_whole_body_is_the_engines_body(deploy: Any, fields: dict[str, Any], style: AnswerStyle) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=style)
    talk = Talk(deployment, style=style, **fields)
    turn = await talk.say(check=False)
    async with (
        aiohttp.ClientSession() as session,
        session.post(deployment.decode.url + "/v1/chat/completions", json=turn.body) as response,
    ):
        direct = await response.json()
    assert stable(turn.json) == stable(direct)
    assert list(turn.json) == [key for key in direct if key != names.KV_PARAMS]


@pytest.mark.parametrize(("fields", "style"), GOLDEN)
async def test_a_stream_is_the_engines_stream(deploy: Any, fields: dict[str, Any], style: AnswerStyle) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=style, piece_chars=5000 if len(style.tail) > 1000 else 3)
    options: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    talk = Talk(deployment, stream=True, style=style, **fields, **options)
    turn = await talk.say(check=False)
    async with (
        aiohttp.ClientSession() as session,
        session.post(deployment.decode.url + "/v1/chat/completions", json=turn.body) as response,
    ):
        direct = await response.read()
    assert [stable(event) for event in turn.events[:-1]] == [stable(event) for event in events_of(direct)[:-1]]
    assert turn.events[-1] == "[DONE]"
    assert turn.events[-2]["usage"]["completion_tokens"] > 0
    assert turn.events[-2]["choices"] == []


@pytest.mark.parametrize("place", ["first", "finish", "usage", "extra"])
@pytest.mark.parametrize("step", [1, 3, 17])
async def test_a_stream_cut_everywhere(deploy: Any, step: int, place: Any) -> None:
    deployment = await deploy()
    style = AnswerStyle(tail=WIDE)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}}
    deployment.decode.default = Behaviour(style=style, handle_on=place, piece_chars=2, cuts=tuple(range(1, 9000, step)))
    talk = Talk(deployment, stream=True, style=style, **options)
    await talk.say()
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    assert turn.raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("place", ["first", "finish", "extra"])
@pytest.mark.parametrize(
    "dialect",
    [
        {"line_end": b"\r\n"},
        {"data_space": False},
        {"comments": True},
        {"line_end": b"\r\n", "comments": True, "data_space": False, "cuts": tuple(range(1, 9000, 2))},
    ],
    ids=["crlf", "no space", "comments", "all, cut"],
)
async def test_dialects(deploy: Any, dialect: dict[str, Any], place: Any) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(handle_on=place, **dialect)
    talk = Talk(deployment, stream=True)
    await talk.say()
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    if dialect.get("comments"):
        assert b": keep-alive" in turn.raw
    assert (b"\r\n" in turn.raw) == (dialect.get("line_end") == b"\r\n")


async def test_bytes_are_identical_but_for_the_handle(deploy: Any) -> None:
    deployment = await deploy()
    written: list[bytes] = []
    behaviour = Behaviour(style=AnswerStyle(tail=WIDE), piece_chars=4, comments=True)
    deployment.decode.default = behaviour
    deployment.decode.tap = written.append
    talk = Talk(deployment, stream=True, style=behaviour.style)
    turn = await talk.say()
    deployment.decode.tap = None
    events = b"".join(written).split(b"\n\n")
    got = turn.raw.split(b"\n\n")
    changed = [(sent, seen) for sent, seen in zip(events, got, strict=True) if sent != seen]
    assert len(changed) == 1
    sent, seen = (json.loads(event.removeprefix(b"data: ")) for event in changed[0])
    assert seen == {key: value for key, value in sent.items() if key != names.KV_PARAMS}


async def test_the_first_token_does_not_wait_for_the_second(deploy: Any) -> None:
    deployment = await deploy()
    gate = Gate(2)
    deployment.decode.default = Behaviour(gate=gate)
    talk = Talk(deployment, stream=True)
    body = talk.body(TEXT)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post("/v1/chat/completions", body))
        got = b""
        while b"kv=" not in got:
            got += await raw.some()
        assert not gate.opened
        gate.open()
        while b"[DONE]" not in got:
            got += await raw.some()


@pytest.mark.parametrize("stream", [False, True])
async def test_huge_events(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    style = AnswerStyle(tail="漢" * 100_000)
    deployment.decode.default = Behaviour(style=style, piece_chars=200_000, cuts=tuple(range(1000, 400_000, 4001)))
    talk = Talk(deployment, stream=stream, style=style)
    await talk.say()
    turn = await talk.say("Go on.")
    assert_right(deployment, turn, style)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    style = AnswerStyle(tail=WIDE)
    deployment.decode.default = Behaviour(style=style, piece_chars=2)
    body = {"model": "tiny", "prompt": TEXT, "stream": stream, "logprobs": 1}
    turn = await send(deployment, body)
    assert_right(deployment, turn, style)
    assert len(turn.prefills) == len(turn.decodes) == 1


async def test_cached_tokens_come_from_the_engine(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    turn = await talk.say("Go on.")
    assert turn.json["usage"]["prompt_tokens"] == turn.decodes[0].prompt_tokens
