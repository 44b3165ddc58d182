"""Merging tokens before parsing says the same as parsing every event, for streams of every shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core import transcript
from pd_router.core.cutting import strip_json
from pd_router.core.errors import ApiError
from pd_router.core.transcript import Transcript, parse_answer, read

_LETTERS = st.sampled_from(["a", " b", "漢", "😀", '"', "\\", "\n\n", "data: ", '","extra":"x', "}", ""])
_DELTAS = st.one_of(
    st.lists(_LETTERS, max_size=6).map(lambda parts: [{"content": part} for part in parts]),
    st.lists(_LETTERS, max_size=6).map(lambda parts: [{"reasoning": part} for part in parts]),
    _LETTERS.map(lambda part: [{"content": part, "reasoning": "r"}]),
    _LETTERS.map(lambda part: [{"content": part, "extra": part}]),
    _LETTERS.map(
        lambda part: [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": part}}]}]
    ),
    st.just([{"role": "assistant", "content": ""}]),
    st.just([{}]),
)


def event(delta: dict[str, Any], finish: str | None = None, ascii_only: bool = False, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = {"id": "i", "choices": [choice], **more}
    return b"data: " + json.dumps(body, ensure_ascii=ascii_only, separators=(",", ":")).encode() + b"\n\n"


def facts(read_out: Transcript) -> Any:
    reply = read_out.reply()
    message = (reply.message, reply.inexact) if reply is not None else None
    return (
        message,
        read_out.finish_reasons,
        read_out.finished,
        read_out.done,
        read_out.usage,
        read_out.error,
        read_out.id,
    )


def read_plainly(stream: bytes) -> Transcript:
    """Without merging: one chunk per event would be merged, so the parsing loop is fed by hand."""
    merge, transcript._merge_tokens = transcript._merge_tokens, b"".join  # type: ignore[assignment]
    try:
        return read([stream])
    finally:
        transcript._merge_tokens = merge


@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(_DELTAS, max_size=5),
    finish=st.sampled_from(["stop", "length", None]),
    done=st.booleans(),
    usage=st.booleans(),
    ascii_only=st.booleans(),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30),
)
def test_merging_changes_nothing(
    groups: list[list[dict[str, Any]]],
    finish: str | None,
    done: bool,
    usage: bool,
    ascii_only: bool,
    sizes: list[int],
) -> None:
    more = {"usage": {"prompt_tokens": 1}} if usage else {}
    events = [event(delta, None, ascii_only, **more) for group in groups for delta in group]
    events.append(event({"content": ""}, finish, ascii_only))
    if done:
        events.append(b"data: [DONE]\n\n")
    stream = b"".join(events)
    chunks, rest = [], list(events)
    while rest:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(b"".join(rest[:size]))
        rest = rest[size:]
    expected = facts(read_plainly(stream))
    assert facts(read(events)) == expected
    assert facts(read(chunks)) == expected
    assert facts(read([stream])) == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_plain_stream_is_merged_to_a_handful_of_events(together: bool) -> None:
    tokens = [event({"content": f" {n}"}) for n in range(500)]
    events = [event({"role": "assistant", "content": ""}), *tokens, event({"content": ""}, "stop"), b"data: [DONE]\n\n"]
    merged = transcript._merge_tokens([b"".join(events)] if together else events)
    assert merged.count(b"\n\n") == 4


def test_continuous_usage_and_token_ids_are_read_without_merging() -> None:
    events = [event({"content": f"{n}"}, usage={"completion_tokens": n}) for n in range(30)]
    seen = read([*events, event({}, "stop"), b"data: [DONE]\n\n"])
    assert seen.usage == {"completion_tokens": 29}
    reply = seen.reply()
    assert reply is not None
    assert reply.message["content"] == "".join(map(str, range(30)))


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"\n\n\n\n",
        b"data: {\n\n",
        b"data: [1,2]\n\ndata: 5\n\ndata: null\n\n",
        b'data: {"choices":5}\n\n',
        b'data: {"choices":[5,{"delta":7},{"delta":{"tool_calls":[3,{"function":9}]}}]}\n\n',
        b'data: {"choices":[{"index":"x","delta":{"content":5,"role":3},"finish_reason":7}],"usage":4}\n\n',
        b"data: [DONE]\n\n" * 3,
        b"\xff\xfe\x00",
    ],
)
def test_nothing_breaks_the_reader(stream: bytes) -> None:
    seen = read([stream])
    assert seen.reply() is None
    assert not seen.finished


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_do_not_break_the_reader(noise: bytes) -> None:
    read([noise, b"data: ", noise, b"\n\n"])
    parse_answer(noise)


# -- whole answers -------------------------------------------------------------------------------
HANDLE = {"remote_host": "MARKER", "x": [1, {"kv_transfer_params": 2}]}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('{"choices":[],"kv_transfer_params":%s,"metrics":null}', '{"choices":[],"metrics":null}'),
        ('{"choices":[],"kv_transfer_params":%s}', '{"choices":[]}'),
        ('{"kv_transfer_params":%s}', "{}"),
        (
            '{"a":{"kv_transfer_params":%s},"b":"\\"kv_transfer_params\\":1"}',
            '{"a":{},"b":"\\"kv_transfer_params\\":1"}',
        ),
        ('[{"kv_transfer_params":%s},{"kv_transfer_params" :\n%s , "z":"漢"}]', '[{},{ "z":"漢"}]'),
    ],
)
def test_whole_answers_lose_the_member_and_nothing_else(body: str, left: str) -> None:
    raw = body.replace("%s", json.dumps(HANDLE))
    clean, handle = strip_json(raw.encode())
    assert clean == left.encode()
    assert handle == HANDLE


def test_null_is_cut_and_no_handle() -> None:
    assert strip_json(b'{"a":1,"kv_transfer_params":null,"b":2}') == (b'{"a":1,"b":2}', None)


@pytest.mark.parametrize("body", [b"", b"not json", b'{"text":"kv_transfer_params"}', b'{"a":', b"\xff"])
def test_answers_without_the_member_come_back_as_they_are(body: bytes) -> None:
    assert strip_json(body) == (body, None)


@pytest.mark.parametrize("body", [b'{"kv_transfer_params":{"remote_host":"MARKER"', b'{"kv_transfer_params":MARKER}'])
def test_an_unreadable_member_is_an_error_of_the_engine(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        strip_json(body)
    assert refused.value.status == 502
    assert b"MARKER" not in refused.value.body()


@pytest.mark.parametrize(
    "body",
    [
        {
            "error": {
                "message": "1 validation error: 'kv_transfer_params': {'remote_host': 'MARKER'}",
                "type": "T",
                "code": 400,
            }
        },
        {"object": "error", "message": 'input: {"kv_transfer_params": {"remote_host": "MARKER"}}', "code": 400},
        {"error": "kv_transfer_params MARKER"},
        {"error": {"message": "kv_transfer_params MARKER", "kv_transfer_params": {"remote_host": "MARKER"}}},
    ],
)
def test_errors_that_quote_the_handle_are_rewritten(body: dict[str, Any]) -> None:
    clean, _ = strip_json(json.dumps(body).encode())
    assert b"MARKER" not in clean
    assert json.loads(clean)["error"]["message"]


def test_a_whole_answer_is_read_like_a_stream() -> None:
    message = {"role": "assistant", "content": "B", "tool_calls": []}
    usage = {"prompt_tokens": 3}
    body = {"id": "i", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    seen = parse_answer(json.dumps(body).encode())
    assert (seen.id, seen.usage, seen.finish_reasons, seen.finished) == ("i", usage, ("stop",), True)
    reply = seen.reply()
    assert reply is not None
    assert reply.message == {"role": "assistant", "content": "B"}


def test_legacy_function_calls_and_several_choices_have_no_reply() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}
    one = {"index": 0, "message": call, "finish_reason": "function_call"}
    assert parse_answer(json.dumps({"choices": [one]}).encode()).reply() is None
    two = [{"index": n, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"} for n in range(2)]
    assert parse_answer(json.dumps({"choices": two}).encode()).reply() is None
