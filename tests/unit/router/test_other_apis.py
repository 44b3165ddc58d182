"""Turns of the Responses and the Messages API: found by their history however it is spelt, and told apart otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError
from pd_router.core.fields import Api
from pd_router.core.history import Reply
from pd_router.core.request import Prepared, prepare

QUESTION = {"role": "user", "content": "What is new?"}
NEXT = {"role": "user", "content": "And then?"}


def opened(api: Api, **fields: Any) -> Prepared:
    needed = {"max_tokens": 50} if api is Api.MESSAGES else {}
    return prepare(api, json.dumps({"model": "m", **needed, **fields}).encode(), {}, frozenset({"m"}))


def reply_of(api: Api, answer: dict[str, Any]) -> Reply:
    reply = DIALECTS[api].parse_answer(json.dumps(answer).encode()).reply()
    assert reply is not None
    return reply


def response(*items: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": list(items), "usage": None, **more}


def message(*blocks: dict[str, Any], stop: str | None = "end_turn") -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "content": list(blocks), "stop_reason": stop}


TEXT_ITEM: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Nothing.", "annotations": [], "logprobs": None}],
}
THOUGHT: dict[str, Any] = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
CALL: dict[str, Any] = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"a":1}',
    "status": "completed",
}

ITEM_ECHOES: list[tuple[list[Any], list[Any]]] = [
    ([TEXT_ITEM], [TEXT_ITEM]),
    ([TEXT_ITEM], [{"role": "assistant", "content": "Nothing."}]),
    ([TEXT_ITEM], [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Nothing."}]}]),
    ([THOUGHT, TEXT_ITEM], [THOUGHT, TEXT_ITEM]),
    ([THOUGHT, TEXT_ITEM], [TEXT_ITEM]),
    ([CALL], [{**CALL, "id": "other", "status": None}]),
    ([CALL], [{"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a":1}'}]),
    ([TEXT_ITEM, CALL], [TEXT_ITEM, CALL]),
]


@pytest.mark.parametrize(("said", "echoed"), ITEM_ECHOES)
def test_items_that_come_back(said: list[Any], echoed: list[Any]) -> None:
    key = opened(Api.RESPONSES, input=[QUESTION]).history_with(reply_of(Api.RESPONSES, response(*said)))
    assert key in opened(Api.RESPONSES, input=[QUESTION, *echoed, NEXT]).history


ITEM_OTHERS: list[list[Any]] = [
    [{"role": "assistant", "content": "Nothing"}],
    [{"role": "user", "content": "Nothing."}],
    [CALL],
    [TEXT_ITEM, CALL],
    [],
]


@pytest.mark.parametrize("echoed", ITEM_OTHERS)
def test_items_that_are_others(echoed: list[Any]) -> None:
    key = opened(Api.RESPONSES, input=[QUESTION]).history_with(reply_of(Api.RESPONSES, response(TEXT_ITEM)))
    assert key not in opened(Api.RESPONSES, input=[QUESTION, *echoed, NEXT]).history


def test_one_text_is_one_item_however_it_is_wrapped() -> None:
    wrapped = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    ways = ["hi", [{"role": "user", "content": "hi"}], wrapped]
    assert len({opened(Api.RESPONSES, input=way).prompt_digest() for way in ways}) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "Be kind."},
        {"reasoning": {"effort": "high"}},
        {"tools": [{"type": "function", "name": "f"}]},
        {"tool_choice": "none"},
        {"cache_salt": "x"},
    ],
)
def test_what_is_in_the_scope_of_a_response(more: dict[str, Any]) -> None:
    assert opened(Api.RESPONSES, input="x", **more).scope != opened(Api.RESPONSES, input="x").scope


@pytest.mark.parametrize(
    "more",
    [
        {"text": {"format": {"type": "json_object"}}},
        {"store": False},
        {"metadata": {"a": "b"}},
        {"max_output_tokens": 5},
        {"tool_choice": "auto"},
        {"truncation": "disabled"},
        {"prompt_cache_key": "k"},
    ],
)
def test_what_is_not(more: dict[str, Any]) -> None:
    assert opened(Api.RESPONSES, input="x", **more).scope == opened(Api.RESPONSES, input="x").scope


TEXT_BLOCK = {"type": "text", "text": "Nothing."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": 1, "a": [2]}}
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
MARK = {"cache_control": {"type": "ephemeral"}}

BLOCK_ECHOES: list[tuple[list[Any], Any]] = [
    ([TEXT_BLOCK], "Nothing."),
    ([TEXT_BLOCK], [TEXT_BLOCK]),
    ([TEXT_BLOCK], [{**TEXT_BLOCK, **MARK, "citations": None}]),
    ([THINKING, TEXT_BLOCK], [THINKING, TEXT_BLOCK]),
    ([THINKING, TEXT_BLOCK], "Nothing."),
    ([TEXT_BLOCK, USE], [TEXT_BLOCK, USE]),
    ([USE], [{**USE, "input": {"a": [2], "b": 1}, **MARK}]),
]


@pytest.mark.parametrize(("said", "echoed"), BLOCK_ECHOES)
def test_blocks_that_come_back(said: list[Any], echoed: Any) -> None:
    key = opened(Api.MESSAGES, messages=[QUESTION]).history_with(reply_of(Api.MESSAGES, message(*said)))
    assistant = {"role": "assistant", "content": echoed}
    assert key in opened(Api.MESSAGES, messages=[QUESTION, assistant, NEXT]).history


@pytest.mark.parametrize("echoed", ["Nothing", [TEXT_BLOCK, USE], [USE], [], [{**TEXT_BLOCK, "text": "Nothing.\n"}]])
def test_blocks_that_are_others(echoed: Any) -> None:
    key = opened(Api.MESSAGES, messages=[QUESTION]).history_with(reply_of(Api.MESSAGES, message(TEXT_BLOCK)))
    assistant = {"role": "assistant", "content": echoed}
    assert key not in opened(Api.MESSAGES, messages=[QUESTION, assistant, NEXT]).history


def test_results_of_tools_are_told_apart() -> None:
    def asked(text: str) -> bytes | None:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": text}
        return opened(Api.MESSAGES, messages=[QUESTION, {"role": "user", "content": [result]}]).prompt_digest()

    assert asked("rain") == asked("rain") != asked("sun")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"system": "Be kind."}, {"system": [{"type": "text", "text": "Be kind."}]}),
        ({"system": "Be kind."}, {"system": [{"type": "text", "text": "Be kind.", **MARK}]}),
        (
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "A"}]},
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: 2"}, {"type": "text", "text": "A"}]},
        ),
        ({"tools": [{"name": "f", "input_schema": {}}]}, {"tools": [{"name": "f", "input_schema": {}, **MARK}]}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"thinking": {"type": "adaptive"}}),
        ({"output_config": {"format": {"type": "json_schema"}}}, {}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"metadata": {"user_id": "a"}}, {"metadata": {"user_id": "b"}}),
        ({"max_tokens": 9}, {"max_tokens": 10}),
        (MARK, {"diagnostics": {"previous_message_id": "msg_1"}, "speed": "fast"}),
    ],
)
def test_one_scope(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (
        opened(Api.MESSAGES, messages=[QUESTION], **one).scope
        == opened(Api.MESSAGES, messages=[QUESTION], **other).scope
    )


@pytest.mark.parametrize(
    "more",
    [
        {"system": "Be kind."},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "high"}},
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"tool_choice": {"type": "none"}},
    ],
)
def test_another_scope(more: dict[str, Any]) -> None:
    assert opened(Api.MESSAGES, messages=[QUESTION], **more).scope != opened(Api.MESSAGES, messages=[QUESTION]).scope


def test_the_apis_do_not_meet() -> None:
    scopes = [
        opened(Api.CHAT, messages=[QUESTION]).scope,
        opened(Api.MESSAGES, messages=[QUESTION]).scope,
        opened(Api.RESPONSES, input=[QUESTION]).scope,
    ]
    assert len(set(scopes)) == 3


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES])
def test_history_alone_is_no_proof_where_the_engine_converts(api: Api) -> None:
    how = {"messages": [QUESTION]} if api is Api.MESSAGES else {"input": [QUESTION]}
    assert opened(api, **how).inexact is not None


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        (
            Api.RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        ),
        (Api.MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (
            Api.MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        ),
    ],
)
def test_media(api: Api, fields: dict[str, Any]) -> None:
    prepared = opened(api, **fields)
    assert prepared.link_fault == "media"
    assert prepared.history == ()


def test_items_behind_an_id_are_put_before_the_new_ones() -> None:
    def recall(name: str) -> list[Any] | None:
        return [QUESTION, TEXT_ITEM] if name == "resp_1" else None

    raw = json.dumps({"model": "m", "input": "And then?", "previous_response_id": "resp_1"}).encode()
    prepared = prepare(Api.RESPONSES, raw, {}, frozenset({"m"}), recall=recall)
    sent = json.loads(prepared.decode_body(None))
    assert sent == {"model": "m", "input": [QUESTION, TEXT_ITEM, {"type": "message", **NEXT}]}
    assert prepared.items == ({"type": "message", **NEXT},)
    assert ("previous_response_id", "resp_1") in prepared.ids
    assert prepared.prompt_digest() == opened(Api.RESPONSES, input=[QUESTION, TEXT_ITEM, NEXT]).prompt_digest()
    with pytest.raises(ApiError) as refused:
        prepare(Api.RESPONSES, raw.replace(b"resp_1", b"resp_2"), {}, frozenset({"m"}), recall=recall)
    assert refused.value.status == 404


def test_what_a_client_does_not_want_kept_is_not() -> None:
    assert opened(Api.RESPONSES, input="x", store=False).items is None
    assert opened(Api.RESPONSES, input="x", store=None).items is not None
    assert opened(Api.CHAT, messages=[QUESTION]).items is None
