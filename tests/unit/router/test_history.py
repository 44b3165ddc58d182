"""The next turn finds its conversation however the client echoes the reply, and takes no other for it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pd_router.core.history import MAX_PREFIXES, Reply, make_reply, read_messages
from pd_router.core.request import Api, Prepared, prepare
from pd_router.core.sse import SseFilter, parse_answer

USER = {"role": "user", "content": "What is 漢?"}
NEXT = {"role": "user", "content": "And then?"}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "漢"}'}},
    {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
]


def chat(messages: list[Any], **fields: Any) -> Prepared:
    raw = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return prepare(Api.CHAT, raw, {}, frozenset({"m"}))


def answer(message: dict[str, Any], finish: str = "stop") -> bytes:
    """As vLLM answers: every field of its message class, and some of its own."""
    full = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None}
    full |= {"function_call": None, "reasoning": None, **message}
    choice = {"index": 0, "message": full, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    return json.dumps(
        {"id": "i", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    ).encode()


def as_stream(deltas: list[dict[str, Any]], finish: str = "stop") -> list[bytes]:
    chunks = []
    for number, delta in enumerate(deltas):
        reason = finish if number == len(deltas) - 1 else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunks.append({"id": "i", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def reply_of_stream(events: list[bytes]) -> Reply:
    seen = SseFilter()
    for event in events:
        seen.feed(event)
    reply = seen.reply()
    assert reply is not None
    return reply


def echoes(message: dict[str, Any], finish: str) -> list[tuple[str, dict[str, Any]]]:
    """What clients put into their next request."""
    parsed = ChatCompletion.model_validate_json(answer(message, finish)).choices[0].message
    plain = {name: value for name, value in message.items() if value}
    return [
        ("openai model_dump", parsed.model_dump()),
        ("openai model_dump without none", parsed.model_dump(exclude_none=True)),
        ("openai model_dump unset", parsed.model_dump(exclude_unset=True)),
        ("by hand", {"role": "assistant", **plain}),
        ("by hand, in another order", dict(reversed([*plain.items(), ("role", "assistant")]))),
        ("by hand, with empties", {"role": "assistant", "content": "", "refusal": None, "annotations": [], **plain}),
    ]


MESSAGES: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"content": "It is a letter 漢 😀."}, "stop"),
    ("calls", {"content": None, "tool_calls": CALLS}, "tool_calls"),
    ("text and calls", {"content": "Let me look.", "tool_calls": CALLS}, "tool_calls"),
    ("refusal", {"content": None, "refusal": "No."}, "stop"),
    ("empty", {"content": ""}, "stop"),
]


@pytest.mark.parametrize(("name", "message", "finish"), MESSAGES)
def test_the_next_turn_finds_the_stored_one(name: str, message: dict[str, Any], finish: str) -> None:
    turn = chat([USER])
    reply = parse_answer(answer(message, finish)).reply()
    assert reply is not None
    stored = turn.history_with(reply)
    for how, echo in echoes(message, finish):
        assert chat([USER, echo, NEXT]).history == (stored,), how


@pytest.mark.parametrize(("name", "message", "finish"), MESSAGES[:3])
def test_streamed_and_whole_answers_give_the_same_digest(name: str, message: dict[str, Any], finish: str) -> None:
    text = message["content"] or ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": letter} for letter in text)]
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        head = {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [{"index": index, **head}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in function["arguments"]
        ]
    events = as_stream([*deltas, {"content": ""}], finish)
    whole = parse_answer(answer(message, finish)).reply()
    assert whole is not None
    streamed = reply_of_stream(events)
    assert chat([USER]).history_with(streamed) == chat([USER]).history_with(whole)
    assert chat([USER, _assembled(events), NEXT]).history == (chat([USER]).history_with(streamed),)


def _assembled(events: list[bytes]) -> dict[str, Any]:
    """A client's own assembly of a stream, from the official library's chunk objects."""
    content, calls = "", {}
    for event in events[:-1]:
        delta = ChatCompletionChunk.model_validate_json(event[6:]).choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            made = calls.setdefault(
                call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            if call.function is not None:
                made["function"]["name"] += call.function.name or ""
                made["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content or None, **({"tool_calls": list(calls.values())} if calls else {})}


def test_three_turns_with_tools_are_a_chain() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    calls = {"role": "assistant", "content": None, "tool_calls": CALLS}
    first = chat([USER]).history_with(make_reply(calls, "tool_calls", None))
    second_turn = chat([USER, calls, tool, tool | {"tool_call_id": "c2"}])
    assert second_turn.history == (first,)
    done = {"role": "assistant", "content": "It is sunny."}
    second = second_turn.history_with(make_reply(done, "stop", None))
    third_turn = chat([USER, calls, tool, tool | {"tool_call_id": "c2"}, done, NEXT])
    assert third_turn.history == (second, first)


BASE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "A", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "look"},
    {"role": "assistant", "content": "B"},
    NEXT,
]


def _edits() -> list[tuple[str, list[dict[str, Any]]]]:
    out = []

    def edit(name: str, index: int, /, **fields: Any) -> None:
        messages = copy.deepcopy(BASE)
        messages[index].update(fields)
        out.append((name, messages))

    edit("system text", 0, content="Be long.")
    edit("system role", 0, role="developer")
    edit("user text", 1, content="What is  漢?")
    edit("user name", 1, name="bob")
    edit("parts instead of text", 1, content=[{"type": "text", "text": USER["content"]}])
    edit("assistant text", 2, content="A ")
    edit("fewer calls", 2, tool_calls=CALLS[:1])
    edit("call order", 2, tool_calls=CALLS[::-1])
    edit("call id", 2, tool_calls=[CALLS[0] | {"id": "c9"}, CALLS[1]])
    edit(
        "call arguments", 2, tool_calls=[CALLS[0] | {"function": {"name": "look", "arguments": '{"q":"漢"}'}}, CALLS[1]]
    )
    edit("call name", 2, tool_calls=[CALLS[0] | {"function": {"name": "see", "arguments": '{"q": "漢"}'}}, CALLS[1]])
    edit("call type", 2, tool_calls=[CALLS[0] | {"type": "custom"}, CALLS[1]])
    edit("unknown in a call", 2, tool_calls=[CALLS[0] | {"custom": {"input": "x"}}, CALLS[1]])
    edit("tool text", 3, content="rainy")
    edit("tool call id", 3, tool_call_id="c2")
    edit("tool name", 3, name="see")
    edit("refusal", 4, refusal="no")
    edit("unknown field", 4, extra={"a": 0})
    edit("false is a value", 4, extra=False)
    out.append(("one message less", BASE[1:]))
    out.append(("two swapped", [BASE[0], BASE[2], BASE[1], *BASE[3:]]))
    return out


EDITS = _edits()


@pytest.mark.parametrize(("name", "messages"), EDITS)
def test_an_edit_is_another_conversation(name: str, messages: list[dict[str, Any]]) -> None:
    assert chat(messages).history[0] != chat(BASE).history[0]


def test_no_two_edits_meet() -> None:
    digests = [chat(messages).history[0] for _, messages in [*EDITS, ("base", BASE)]]
    assert len(set(digests)) == len(digests)


def test_text_cannot_imitate_the_border_between_messages() -> None:
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for border in ("4:user1:b", "\n", "9:assistant1:b", "a9:assistant1:b"):
        other = [{"role": "user", "content": "a" + border}, {"role": "assistant", "content": ""}]
        assert chat(one).history != chat(other).history


def test_fields_cannot_imitate_messages() -> None:
    two = [{"role": "a", "content": "b", "x": 1}, {"role": "c", "content": "d", "y": 1}]
    three = [
        {"role": "a", "content": "b"},
        {"role": '{"x":1}', "content": "c"},
        {"role": "d", "content": '{"y":1}'},
    ]
    assert read_messages(two).chain.digest() != read_messages(three).chain.digest()


@settings(deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=5)), min_size=1, max_size=8
    )
)
def test_equal_digests_mean_equal_messages(messages: list[tuple[str, str]]) -> None:
    plain = [{"role": role, "content": text} for role, text in messages]
    found = read_messages(plain)
    shorter = read_messages(plain[:-1]) if len(plain) > 1 else None
    assert found.chain.digest() == read_messages(copy.deepcopy(plain)).chain.digest()
    assert shorter is None or shorter.chain.digest() != found.chain.digest()
    assert len(found.prefixes) == sum(role == "assistant" for role, _ in messages)
    ends = [index for index, (role, _) in enumerate(messages) if role == "assistant"]
    assert found.prefixes == tuple(read_messages(plain[: end + 1]).chain.digest() for end in reversed(ends))


def test_only_the_newest_prefixes_are_tried() -> None:
    long = [USER, {"role": "assistant", "content": "a"}] * 40
    prefixes = read_messages(long).prefixes
    assert len(prefixes) == MAX_PREFIXES
    assert prefixes[0] == read_messages(long).chain.digest()
    assert prefixes[1] == read_messages(long[:-2]).chain.digest()


def test_reasoning_does_not_change_the_digest_and_is_noted() -> None:
    silent = {"role": "assistant", "content": "B"}
    for loud in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": None, "reasoning_content": ""}):
        turn = chat([USER, {**silent, **loud}, NEXT])
        assert turn.history == chat([USER, silent, NEXT]).history
        assert (turn.inexact is not None) is any(loud.values())


def test_an_assistant_text_in_parts_is_found_and_noted() -> None:
    parts = chat([USER, {"role": "assistant", "content": [{"type": "text", "text": "B"}]}, NEXT])
    assert parts.history == chat([USER, {"role": "assistant", "content": "B"}, NEXT]).history
    assert parts.inexact == "assistant content in parts"


EXACT: list[tuple[dict[str, Any], str | None, Any, bool]] = [
    ({"content": "B"}, "stop", None, True),
    ({"content": "B"}, "length", None, True),
    ({"content": "B"}, "stop", 151645, True),
    ({"content": "B"}, "stop", "\n\n", False),
    ({"content": " B"}, "stop", None, False),
    ({"content": "B\n"}, "length", None, False),
    ({"content": ""}, "stop", None, False),
    ({"content": None}, "stop", None, False),
    ({"content": "B�"}, "length", None, False),
    ({"content": "B", "reasoning": "hm"}, "stop", None, False),
    ({"content": "B", "reasoning_content": "hm"}, "stop", None, False),
    ({"content": "<think>\nhm</think>B"}, "stop", None, False),
    ({"content": "B", "tool_calls": CALLS}, "tool_calls", None, False),
    ({"content": "B"}, "content_filter", None, False),
    ({"content": "B"}, None, None, False),
]


@pytest.mark.parametrize(("message", "finish", "stop", "exact"), EXACT)
def test_when_the_text_of_a_reply_fixes_its_tokens(
    message: dict[str, Any], finish: str | None, stop: Any, exact: bool
) -> None:
    assert (make_reply({"role": "assistant", **message}, finish, stop).inexact is None) is exact


def test_reasoning_that_only_the_usage_shows_makes_the_reply_inexact() -> None:
    whole = json.loads(answer({"content": "B"}))
    whole["usage"]["completion_tokens_details"] = {"reasoning_tokens": 5}
    hidden, shown = parse_answer(json.dumps(whole).encode()).reply(), parse_answer(answer({"content": "B"})).reply()
    assert hidden is not None
    assert shown is not None
    assert (hidden.inexact, shown.inexact) == ("reasoning in the reply", None)
    assert chat([USER]).history_with(hidden) == chat([USER]).history_with(shown)


def test_reasoning_in_a_stream_makes_the_reply_inexact() -> None:
    reply = reply_of_stream(as_stream([{"role": "assistant"}, {"reasoning": "hm"}, {"content": "B"}, {}]))
    assert reply.inexact == "reasoning in the reply"
    assert chat([USER]).history_with(reply) == chat([USER, {"role": "assistant", "content": "B"}, NEXT]).history[0]
