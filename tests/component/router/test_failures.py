"""An engine fails at some point of a leg: retry clean before the first byte, one valid error event after it.

Aspects: prefill with and without a handle, decode before and after the first byte, stream and not, refusals passed
through once, what is counted as upstream calls. Engines that die or restart are in `test_engine_lifecycle`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.chat import Talk, assert_right, send
from support.deployment import Spec
from support.fake_engine import Behaviour, Fault, Gate, Kind, Point, with_handle
from support.specs import QUICK

TOO_LONG = json.dumps({"error": {"message": "too long, says P", "type": "BadRequestError", "param": None, "code": 400}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(Behaviour(fault=Fault(Kind.STATUS, status=500)), id="500"),
        pytest.param(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status=503)), id="503"),
        pytest.param(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status=429)), id="429"),
        pytest.param(Behaviour(fault=Fault(Kind.FINISH_ERROR)), id="200 with finish reason error"),
        pytest.param(Behaviour(fault=Fault(Kind.CLOSE)), id="socket closed"),
        pytest.param(Behaviour(fault=Fault(Kind.RESET)), id="socket reset"),
        pytest.param(Behaviour(fault=Fault(Kind.CLOSE, Point.AFTER_HEADERS)), id="half an answer"),
        pytest.param(Behaviour(fault=Fault(Kind.HANG)), id="silence"),
        pytest.param(Behaviour(fault=Fault(Kind.STATUS, body=b"<html>gateway</html>", status=502)), id="not json"),
        pytest.param(Behaviour(fault=Fault(Kind.STATUS, body=b'{"choices":[null]}', status=200)), id="no completion"),
    ],
)
async def test_prefill_fails_with_a_handle_attached(deploy: Any, behaviour: Behaviour, stream: bool) -> None:
    deployment = await deploy(QUICK, breaks=True)
    talk = Talk(deployment, stream=stream)
    await talk.say()
    for engine in deployment.prefills:
        engine.next(behaviour, when=with_handle)
    turn = await talk.say("Go on.")
    assert sorted(record.handle_id is not None for record in turn.prefills) == [False, True]
    for engine in deployment.engines:
        engine.forget()
    assert len((await talk.say("And then?")).attached) == 1


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.CLOSE, Kind.RESET, Kind.HANG])
async def test_prefill_fails_without_a_handle(deploy: Any, kind: Kind) -> None:
    deployment = await deploy(QUICK)
    talk = Talk(deployment)
    for engine in deployment.prefills:
        engine.next(Behaviour(fault=Fault(kind)), when=_once(deployment))
    turn = await talk.say()
    assert len(turn.prefills) == 2


def _once(deployment: Any) -> Any:
    """Fits the first request that reaches any prefill engine."""
    return lambda _record: len(deployment.records(deployment.prefills)) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("attached", [False, True])
async def test_prefill_refuses(deploy: Any, attached: bool, stream: bool, status: int) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=stream)
    if attached:
        await talk.say()
    lost = 'pd_router_handles_lost_total{leg="prefill"}'
    before = (await deployment.metrics())[lost]
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status, TOO_LONG.encode())))
    turn = await talk.say("Go on.", check=False)
    assert (turn.status, turn.json) == (status, json.loads(TOO_LONG))
    assert (len(turn.prefills), len(turn.decodes)) == (1, 0)
    assert (await deployment.metrics())[lost] == before + attached
    if attached:
        assert (await talk.say("Go on.")).attached == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("attached", [False, True])
async def test_decode_refuses(deploy: Any, attached: bool, stream: bool) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=stream)
    if attached:
        await talk.say()
    decodes = len(deployment.records(deployment.decodes))
    deployment.decode.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 400, TOO_LONG.encode())))
    turn = await talk.say("Go on.", check=False)
    assert (turn.status, turn.json) == (400, json.loads(TOO_LONG))
    assert len(deployment.records(deployment.decodes)) == decodes + 1
    told = (await deployment.explain())[-1]
    assert (told["attached"], told["engine_status"]) == (attached, 400)
    if attached:
        assert (told["reason"], told["handle_lost"]) == ("decode_refused", "decode")
    else:
        assert "handle_lost" not in told
    # What prefill holds for a decode that never came ends with its lease.
    deployment.fabric.clock.advance(31)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503),
        Fault(Kind.STATUS, Point.BEFORE_HEADERS, 500),
        Fault(Kind.CLOSE),
        Fault(Kind.RESET),
        Fault(Kind.HANG),
        Fault(Kind.FINISH_ERROR, Point.AFTER_HEADERS),
        Fault(Kind.ERROR_EVENT, Point.AFTER_HEADERS),
        Fault(Kind.CLOSE, Point.AFTER_HEADERS),
        Fault(Kind.TRUNCATE, Point.AFTER_HEADERS),
        Fault(Kind.HANG, Point.AFTER_HEADERS),
        Fault(Kind.CLOSE, Point.AFTER_FIRST_EVENT),
        Fault(Kind.ERROR_EVENT, Point.AFTER_FIRST_EVENT),
        Fault(Kind.HANG, Point.AFTER_FIRST_EVENT),
    ],
    ids=lambda fault: f"{fault.kind.value}, {fault.at.value}",
)
async def test_decode_fails_before_the_first_content(deploy: Any, fault: Fault, stream: bool) -> None:
    if not stream and fault.kind is Kind.TRUNCATE:
        fault = Fault(Kind.CLOSE, Point.AFTER_HEADERS)
    deployment = await deploy(QUICK, breaks=True)
    talk = Talk(deployment, stream=stream)
    await talk.say()
    handles = len(deployment.records(deployment.prefills))
    assert handles == 1
    for engine in deployment.decodes:
        engine.next(Behaviour(fault=fault), when=lambda record: record.handle_id is not None, times=1)
    first = deployment.decodes[0].plan[-1]
    second = deployment.decodes[1].plan[-1]
    first.when = second.when = lambda _record: len(deployment.records(deployment.decodes)) == 2
    turn = await talk.say("Go on.")
    assert len(turn.decodes) == 2
    carried = [record.handle_id for record in turn.prefills if record.handle_id]
    assert len(carried) == len(set(carried)) <= 1
    deployment.fabric.clock.advance(31)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.CLOSE, Point.AFTER_FIRST_CONTENT),
        Fault(Kind.RESET, Point.AFTER_FIRST_CONTENT),
        Fault(Kind.HANG, Point.AFTER_FIRST_CONTENT),
        Fault(Kind.TRUNCATE, Point.AFTER_FIRST_CONTENT),
        Fault(Kind.CLOSE, Point.BEFORE_FINISH),
        Fault(Kind.TRUNCATE, Point.BEFORE_FINISH),
        Fault(Kind.FINISH_ERROR, Point.BEFORE_FINISH),
        Fault(Kind.ERROR_EVENT, Point.BEFORE_FINISH),
        Fault(Kind.ERROR_EVENT, Point.AFTER_FIRST_CONTENT),
    ],
    ids=lambda fault: f"{fault.kind.value}, {fault.at.value}",
)
async def test_decode_fails_after_the_first_content(deploy: Any, fault: Fault) -> None:
    deployment = await deploy(QUICK)
    talk = Talk(deployment, stream=True)
    await talk.say()
    # The fault comes when the client has the first content for sure; until then the router may try again.
    gate = Gate(2)
    for engine in deployment.decodes:
        engine.next(Behaviour(fault=fault, gate=gate))
    turn = await talk.say("Go on.", check=False, at_content=gate.open)
    assert (turn.status, turn.error) == (200, None)
    assert len(turn.decodes) == 1
    errors = [event for event in turn.events if event != "[DONE]" and "error" in event]
    ended = [
        event
        for event in turn.events
        if event != "[DONE]" and event.get("choices") and event["choices"][0].get("finish_reason")
    ]
    if fault.kind is Kind.FINISH_ERROR:
        assert [event["choices"][0]["finish_reason"] for event in ended] == ["error"]
    else:
        assert ended == []
        assert len(errors) == 1
        assert set(errors[0]["error"]) >= {"message", "type", "code"}
    assert deployment.right(turn.body).content.startswith(turn.text)
    assert turn.text
    # A broken turn leaves nothing to attach.
    for engine in deployment.engines:
        engine.forget()
    del talk.messages[2:]
    assert (await talk.say("Go on.")).attached == []


@pytest.mark.parametrize("kind", [Kind.CLOSE, Kind.TRUNCATE])
async def test_a_stream_without_done_that_says_why_it_finished(deploy: Any, kind: Kind) -> None:
    # TRUNCATE ends the body in order after the finish reason, which is complete; CLOSE breaks it.
    deployment = await deploy(QUICK)
    talk = Talk(deployment, stream=True)
    for engine in deployment.decodes:
        engine.next(Behaviour(fault=Fault(kind, Point.BEFORE_DONE)))
    turn = await talk.say(check=False)
    assert turn.text == deployment.right(turn.body).content
    for engine in deployment.engines:
        engine.forget()
    after = await talk.say("Go on.")
    assert len(after.attached) == (1 if kind is Kind.TRUNCATE else 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_helps(deploy: Any, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    deployment.decode.default = Behaviour(fault=Fault(Kind.STATUS, status=500))
    talk = Talk(deployment, stream=stream)
    turn = await talk.say(check=False)
    assert turn.status in (500, 502, 503)
    assert turn.json["error"]["message"]
    assert 2 <= len(turn.decodes) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_that_offers_no_blocks(deploy: Any, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    deployment.prefill.default = Behaviour(handle_on="none")
    talk = Talk(deployment, stream=stream)
    for _ in range(2):
        turn = await talk.say()
        assert turn.decodes[0].params is None
        assert turn.attached == []
    deployment.fabric.clock.advance(31)


async def test_an_engine_drops_idle_connections(deploy: Any) -> None:
    deployment = await deploy(Spec(engine=(("keepalive_timeout", 1.0),)), fresh=True)
    talk = Talk(deployment, stream=True)
    for _ in range(2):
        turn = await talk.say()
        assert len(turn.decodes) == 1
        await asyncio.sleep(1.1)


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_full_says_when_to_come_back(deploy: Any, status: int) -> None:
    deployment = await deploy()
    full = Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status, TOO_LONG.encode(), {"Retry-After": "7"})
    deployment.prefill.default = Behaviour(fault=full)
    turn = await Talk(deployment).say(check=False)
    assert turn.status == status
    assert turn.headers["Retry-After"] == "7"
    if status == 429:
        assert turn.json == json.loads(TOO_LONG)
    else:
        # Of its own faults an engine's words are not passed on.
        assert (turn.json["error"]["code"], "says P" in turn.raw.decode()) == ("no_engine", False)
    assert len(turn.prefills) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 9, "max_tokens": 3},
        {"stream_options": {"include_usage": True}},
        {"stop": [1]},
        {"max_tokens": -1},
        {"bad_words": [1]},
        {"logprobs": True, "top_logprobs": 1_000_000},
        {"n": 0},
    ],
    ids=json.dumps,
)
async def test_output_options_that_no_engine_takes_cost_no_leg_and_no_handle(deploy: Any, fields: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    legs = len(deployment.records())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields}
    turn = await send(deployment, body)
    assert (turn.status, turn.json["error"]["code"]) == (400, "invalid_value")
    assert len(deployment.records()) == legs
    turn = await talk.say("Go on.", check=False, **fields)
    assert turn.status == 400
    assert len(deployment.records()) == legs
    assert len((await talk.say("Go on.")).attached) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_completion_tokens": 40},
        {"max_tokens": 40, "max_completion_tokens": 30},
        {"max_tokens": None},
        {"min_tokens": 5, "max_tokens": 40},
        {"stop": ["zzz"], "stop_token_ids": [5]},
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"logit_bias": {"5": 1}, "bad_words": ["x"]},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda fields: "+".join(fields),
)
async def test_client_limits_stay_off_the_prefill_leg(deploy: Any, fields: dict[str, Any]) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    for _ in range(2):
        turn = await talk.say(**fields)
        sent = turn.decodes[0].body
        assert {key: sent.get(key) for key in turn.body} == turn.body
        assert sent.keys() - turn.body.keys() == {"kv_transfer_params"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, "auto", "none"])
async def test_forced_tool_choice_does_not_reach_prefill(deploy: Any, choice: Any) -> None:
    deployment = await deploy()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    turn = await Talk(deployment, tools=tools, tool_choice=choice).say()
    assert turn.decodes[0].body["tool_choice"] == choice
    assert turn.prefills[0].body["tools"] == tools


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"use_beam_search": True}, {"prompt_logprobs": 1}, {"echo": True}],
    ids=lambda fields: next(iter(fields)),
)
async def test_requests_that_one_engine_must_serve_alone(deploy: Any, fields: dict[str, Any]) -> None:
    deployment = await deploy()
    for stream in (False, True):
        talk = Talk(deployment, stream=stream, conversation_id=f"alone-{fields}-{stream}")
        turn = await talk.say(**fields)
        assert turn.prefills == []
        assert turn.decodes[0].params is None
        assert (await talk.say("Go on.")).attached == []


async def test_several_prompts(deploy: Any) -> None:
    deployment = await deploy()
    turn = await send(deployment, {"model": "tiny", "prompt": ["one " * 30, "two " * 30], "session_id": "several"})
    assert turn.prefills == []
    for number, choice in enumerate(turn.json["choices"]):
        style_free = deployment.right(turn.body, prompt=number, choice=0).content
        assert choice["text"].split()[0] == style_free.split()[0]


async def test_a_turn_after_a_bypassed_one(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="bypass")
    await talk.say()
    bypassed = await talk.say("Twice, please.", n=2, check=False)
    assert bypassed.status == 200
    turn = await talk.say("Go on.")
    assert_right(deployment, turn)
