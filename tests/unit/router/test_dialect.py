"""Answers of the Responses and the Messages API: how they begin, how they end, what they said, how errors look."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError, internal, malformed, no_engine
from pd_router.core.fields import Api
from pd_router.core.sse import Ending, SseFilter

HANDLE = {"remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1]]}


def event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def response_events(status: str = "completed", last: str = "response.completed", **more: Any) -> list[bytes]:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    whole = {"id": "resp_1", "object": "response", "status": status, "output": [item], "usage": {"input_tokens": 3}}
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "kv_transfer_params": None}
    return [
        event({"type": "response.created", "response": begun}),
        event({"type": "response.in_progress", "response": begun}),
        event({"type": "response.output_item.added", "item": {}}),
        event({"type": "response.output_text.delta", "delta": "Hello."}),
        event({"type": last, "response": {**whole, "kv_transfer_params": HANDLE, **more}}),
    ]


def message_events(stop: str | None = "end_turn") -> list[bytes]:
    start = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 3}}
    return [
        event({"type": "message_start", "message": start}),
        event({"type": "ping"}),
        event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo."}}),
        event({"type": "content_block_stop", "index": 0}),
        event({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 2}}),
        event({"type": "message_stop"}),
    ]


def relay(api: Api, parts: list[bytes]) -> tuple[bytes, SseFilter]:
    stream = SseFilter(dialect=DIALECTS[api])
    return b"".join([*map(stream.feed, parts), stream.flush()]), stream


EVENTS = {Api.RESPONSES: response_events(), Api.MESSAGES: message_events()}
SILENT = 2


@pytest.mark.parametrize("api", EVENTS)
@given(data=st.data())
def test_any_cut_gives_the_same(api: Api, data: st.DataObject) -> None:
    whole = b"".join(EVENTS[api])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shown, stream = relay(api, parts)
    assert shown == relay(api, [whole])[0]
    assert b"remote_" not in shown
    assert b"kv_transfer_params" not in shown
    assert stream.ending() is Ending.CLEAN
    assert stream.handle == (HANDLE if api is Api.RESPONSES else None)
    reply = stream.reply()
    assert reply is not None
    assert reply.message["content"] == "Hello."


@pytest.mark.parametrize("api", EVENTS)
def test_what_comes_before_content_can_still_be_taken_back(api: Api) -> None:
    stream = SseFilter(dialect=DIALECTS[api])
    for one in EVENTS[api][:SILENT]:
        stream.feed(one)
        assert not stream.started
    stream.feed(EVENTS[api][SILENT])
    assert stream.started


@pytest.mark.parametrize("api", EVENTS)
def test_a_stream_that_stops_is_truncated(api: Api) -> None:
    for count in range(1, len(EVENTS[api]) - 1):
        _, stream = relay(api, EVENTS[api][:count])
        assert stream.ending() is (Ending.TRUNCATED), count


@pytest.mark.parametrize(
    ("api", "events", "ending"),
    [
        (Api.RESPONSES, response_events("incomplete"), Ending.CLEAN),
        (Api.RESPONSES, response_events("incomplete", "response.incomplete"), Ending.CLEAN),
        (Api.RESPONSES, response_events("failed"), Ending.ERROR_FINISH),
        (Api.RESPONSES, response_events("cancelled"), Ending.ABORTED),
        (Api.RESPONSES, response_events("failed", "response.failed", error={"message": "x"}), Ending.ERROR_EVENT),
        (Api.RESPONSES, [*response_events()[:3], b'data: {"error":{"message":"x"}}\n\n'], Ending.ERROR_EVENT),
        (Api.MESSAGES, message_events("max_tokens"), Ending.CLEAN),
        (Api.MESSAGES, message_events("tool_use"), Ending.CLEAN),
        (Api.MESSAGES, message_events(None), Ending.ERROR_FINISH),
        (
            Api.MESSAGES,
            [*message_events()[:4], event({"type": "error", "error": {"message": "x"}})],
            Ending.ERROR_EVENT,
        ),
    ],
)
def test_endings(api: Api, events: list[bytes], ending: Ending) -> None:
    assert relay(api, events)[1].ending() is ending


@pytest.mark.parametrize("api", EVENTS)
def test_a_whole_answer_says_what_the_stream_said(api: Api) -> None:
    content = {
        "content": [{"type": "text", "text": "Hello."}],
        "type": "message",
        "stop_reason": "end_turn",
        "id": "msg_1",
    }
    last = json.loads(EVENTS[Api.RESPONSES][-1].split(b"data: ")[1])["response"]
    whole = DIALECTS[api].parse_answer(json.dumps(last if api is Api.RESPONSES else content).encode())
    _, stream = relay(api, EVENTS[api])
    assert whole.finished
    assert whole.id == stream.response_id
    assert whole.finish_reasons == stream.finish_reasons
    assert whole.reply() == stream.reply()


@pytest.mark.parametrize("api", EVENTS)
@pytest.mark.parametrize(
    "noise", [b"", b"{", b"[]", b"null", b'{"object":"response"}', b'{"type":"message","content":5}']
)
def test_noise_is_no_answer(api: Api, noise: bytes) -> None:
    assert not DIALECTS[api].parse_answer(noise).finished
    assert not DIALECTS[api].read([b"data: " + noise + b"\n\n"]).finished


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["message", "response", "text", "tool_use", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "response",
                    "object",
                    "status",
                    "output",
                    "content",
                    "message",
                    "delta",
                    "content_block",
                    "role",
                    "text",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(
    st.sampled_from([Api.RESPONSES, Api.MESSAGES]),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "response.completed",
                    "message_start",
                    "content_block_start",
                    "content_block_delta",
                    "message_delta",
                    "error",
                ]
            ),
            st.dictionaries(
                st.sampled_from(["response", "message", "content_block", "delta", "error"]), _JSON, max_size=4
            ),
        ),
        max_size=6,
    ),
)
def test_nothing_that_an_engine_says_raises(api: Api, events: list[tuple[str, dict[str, Any]]]) -> None:
    parts = [event({"type": kind, **fields}) for kind, fields in events]
    _, stream = relay(api, parts)
    stream.ending()
    stream.reply()
    assert stream.calls_tools in (True, False)
    DIALECTS[api].parse_answer(json.dumps([fields for _, fields in events][:1] or {}).encode())
    for _, fields in events:
        DIALECTS[api].parse_answer(json.dumps({"object": "response", "type": "message", **fields}).encode()).reply()


def test_tool_use_is_put_together_from_its_pieces() -> None:
    head = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    events = [
        event({"type": "message_start", "message": {"id": "m", "content": []}}),
        event({"type": "content_block_start", "index": 0, "content_block": head}),
        event(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": '{"b":1,'},
            }
        ),
        event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '"a":2}'}}
        ),
        event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
        event({"type": "message_stop"}),
    ]
    stream = relay(Api.MESSAGES, events)[1]
    assert stream.calls_tools
    reply = stream.reply()
    assert reply is not None
    assert reply.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":2,"b":1}'}


_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]}
_TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat_answer(finish: str, **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}]}


def response(*output: Any) -> dict[str, Any]:
    return {"object": "response", "status": "completed", "output": list(output)}


def message_answer(stop: str, *content: Any) -> dict[str, Any]:
    return {"type": "message", "stop_reason": stop, "content": list(content)}


@pytest.mark.parametrize(
    ("api", "answer", "calls"),
    [
        (Api.CHAT, chat_answer("stop", content="a"), False),
        (Api.CHAT, chat_answer("tool_calls", content=None, tool_calls=[_TOOL_CALL]), True),
        (Api.CHAT, chat_answer("stop", content=None, tool_calls=[_TOOL_CALL]), True),  # a tool that the client chose
        (Api.CHAT, chat_answer("stop", content="a", tool_calls=[]), False),
        (Api.CHAT, chat_answer("function_call", content=None, function_call={"name": "f"}), True),
        (Api.COMPLETIONS, {"choices": [{"index": 0, "finish_reason": "stop", "text": "a"}]}, False),
        (Api.RESPONSES, response(_SAID), False),
        (Api.RESPONSES, response(_CALL), True),
        (Api.RESPONSES, response(_SAID, _CALL, _SAID), True),
        (Api.RESPONSES, response({"type": "reasoning"}, _SAID), False),
        (Api.MESSAGES, message_answer("end_turn", {"type": "text", "text": "a"}), False),
        (Api.MESSAGES, message_answer("tool_use", {"type": "tool_use", "id": "t", "name": "f", "input": {}}), True),
    ],
)
def test_whether_an_answer_calls_tools(api: Api, answer: dict[str, Any], calls: bool) -> None:
    assert DIALECTS[api].parse_answer(json.dumps(answer).encode()).calls_tools is calls


def test_a_stream_that_is_too_long_to_be_kept_still_says_that_it_calls_tools() -> None:
    stream = SseFilter(max_kept=2000)
    letters = {"index": 0, "function": {"arguments": "x" * 500}}
    for _ in range(20):
        stream.feed(b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [letters]}}]}).encode() + b"\n\n")
    stream.feed(b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\n')
    stream.feed(b"data: [DONE]\n\n")
    assert stream.reply() is None
    assert stream.calls_tools


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (malformed("x"), "invalid_request_error"),
        (no_engine("decode", 5), "overloaded_error"),
        (internal(), "api_error"),
    ],
)
def test_errors_of_the_messages_api(error: ApiError, kind: str) -> None:
    shown = json.loads(DIALECTS[Api.MESSAGES].error_body(error.body(), error.status))
    assert shown == {"type": "error", "error": {"type": kind, "message": error.message}}
    streamed = DIALECTS[Api.MESSAGES].error_event(error.body())
    assert streamed.startswith(b"event: error\ndata: {")
    assert streamed.endswith(b"}\n\n")


def test_errors_of_the_responses_api() -> None:
    error = malformed("x")
    assert DIALECTS[Api.RESPONSES].error_body(error.body(), 400) == error.body()
    shown = json.loads(DIALECTS[Api.RESPONSES].error_event(error.body()).split(b"data: ")[1])
    assert shown["type"] == "error"
    assert shown["message"] == shown["error"]["message"] == error.message


def test_the_error_inside_a_failed_response_tells_nothing_of_a_handle() -> None:
    inner = {"code": "server_error", "message": "NIXL handshake with 10.1.2.3:5600 failed"}
    shown, _ = relay(Api.RESPONSES, response_events("failed", "response.failed", error=inner))
    assert b"10.1.2.3" not in shown
    assert shown.split(b"\n\n")[-2].startswith(b"event: error\n")
