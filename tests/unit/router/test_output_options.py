"""Output options that P never sees: what no engine takes is refused at once, what any engine may take is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.request import Api, Prepared, prepare

PROMPTS: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Api.COMPLETIONS: {"prompt": "hi"},
    Api.RESPONSES: {"input": "hi"},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
OPENAI = [Api.CHAT, Api.COMPLETIONS]


def opened(api: Api, **fields: Any) -> Prepared:
    return prepare(api, json.dumps({"model": "m", **PROMPTS[api], **fields}).encode(), {}, frozenset({"m"}))


BAD: dict[str, list[Any]] = {
    "n": [0, -1, "1"],
    "best_of": [0, -1],
    "max_tokens": [-1, "5", 1.5, True, [1], {}],
    "min_tokens": [-1, "5", 1.5, [1]],
    "stop": [1, [1], ["a", 1], ["a", None], {}, {"a": 1}, True, "", ["a", ""]],
    "stop_token_ids": ["a", 5, ["a"], [1.5], [None], [True], {}],
    "allowed_token_ids": [["a"], 5, "a"],
    "logprob_token_ids": [["a"], 5],
    "bad_words": [[1], "a", 5, [""], [["a"]], {}],
    "logit_bias": [[1], 5, "a", {"1": "a"}, {"a": 1}, {"1": None}, {"1.5": 1}, {"": 1}],
    "stream_options": [5, "a", [1], True],
    "stream_interval": [0, -1, "a", 1.5],
    "structured_outputs": [5, "a", [1]],
    "response_format": [5, "json_object", [], {}, {"type": 5}],
    "thinking_token_budget": [-2, "a", 1.5],
    "logprobs": ["a", [1], {}, 1_000_000, -2],
}
BAD_IN_CHAT: dict[str, list[Any]] = {
    "max_tokens": [0],
    "max_completion_tokens": [0, -1, "5", 1.5, [1]],
    "logprobs": [2, 1.0],
    "top_logprobs": [1_000_000, -2, "a", 1.5, [1], True],
    "tool_choice": ["any", "", 5, [1], True],
}


def rows(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


def refused(api: Api, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        opened(api, **fields)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize("api", OPENAI)
@pytest.mark.parametrize(("name", "value"), rows(BAD))
def test_what_no_engine_takes_is_refused_and_named(api: Api, name: str, value: Any) -> None:
    error = refused(api, **{name: value, "stream": True})
    assert error.param == name
    assert error.message.startswith(f"{name} must be ")


@pytest.mark.parametrize(("name", "value"), rows(BAD_IN_CHAT))
def test_so_are_options_of_chat_alone(name: str, value: Any) -> None:
    extra = {"logprobs": True} if name == "top_logprobs" else {}
    assert refused(Api.CHAT, **{name: value, **extra}).param == name


BAD_IN_RESPONSES: dict[str, list[Any]] = {
    "max_output_tokens": [0, -1, "5", 1.5, [1]],
    "top_logprobs": [1_000_000, "a", True],
    "text": ["json", 5, []],
    "tool_choice": ["any", 5],
    "tools": ["web_search", {}, [5]],
    "background": [True],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "previous_response_id": [5, {}],
    "input": [None, 5, {}, ["a"], [{"type": 5}], [{"content": "no role"}], [{"role": 5, "content": "x"}]],
}
BAD_IN_MESSAGES: dict[str, list[Any]] = {
    "max_tokens": [None, 0, -1, "5", 1.5],
    "stop_sequences": ["a", [1], [""]],
    "thinking": [True, "enabled"],
    "output_config": ["low"],
    "tool_choice": ["auto", {}, {"type": "required"}],
    "system": [5, ["a"]],
    "messages": [None, [], "hi", ["hi"], [{"content": "no role"}]],
}


@pytest.mark.parametrize(("name", "value"), rows(BAD_IN_RESPONSES))
def test_what_the_responses_api_does_not_have(name: str, value: Any) -> None:
    error = refused(Api.RESPONSES, **{name: value})
    assert (error.param or "").partition("[")[0] == name
    assert error.message.startswith(f"{error.param} must be ")


@pytest.mark.parametrize(("name", "value"), rows(BAD_IN_MESSAGES))
def test_what_the_messages_api_does_not_have(name: str, value: Any) -> None:
    error = refused(Api.MESSAGES, **{name: value})
    assert (error.param or "").partition("[")[0] == name
    assert error.message.startswith(f"{error.param} must be ")


@pytest.mark.parametrize("content", [None, 5, {}, ["a"], [{"text": "no type"}], [{"type": 5}]])
def test_content_that_is_none(content: Any) -> None:
    assert refused(Api.MESSAGES, messages=[{"role": "user", "content": content}]).param == "messages[0].content"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 6, "max_completion_tokens": 5, "max_tokens": 10}, "min_tokens"),
    ],
)
def test_options_that_do_not_go_together(fields: dict[str, Any], name: str) -> None:
    assert refused(Api.CHAT, **fields).param == name


def test_no_token_at_all_is_only_for_an_echo() -> None:
    assert refused(Api.COMPLETIONS, max_tokens=0).param == "max_tokens"
    assert refused(Api.COMPLETIONS, max_tokens=0, echo=False).param == "max_tokens"


GOOD: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 5.0},
    {"max_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5},
    {"min_tokens": 0},
    {"stop": "a"},
    {"stop": []},
    {"stop": ["a", "b"]},
    {"stop_token_ids": []},
    {"stop_token_ids": [1, 2]},
    {"bad_words": ["a"]},
    {"logit_bias": {}},
    {"logit_bias": {"1": 1, "2": -0.5}},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 20},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": 200_000},
    {"logprobs": 1},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream_options": {}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"thinking_token_budget": -1},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"min_tokens": 6, "max_completion_tokens": 10, "max_tokens": 5},
]


@pytest.mark.parametrize("fields", GOOD, ids=repr)
def test_what_an_engine_may_take_reaches_decode_as_it_is(fields: dict[str, Any]) -> None:
    sent = json.loads(opened(Api.CHAT, **fields).decode_body(None))
    assert {name: sent[name] for name in fields} == fields


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0, "echo": True}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": -1}]
)
def test_completions_have_their_own_rules(fields: dict[str, Any]) -> None:
    sent = json.loads(opened(Api.COMPLETIONS, **fields).decode_body(None))
    assert {name: sent[name] for name in fields} == fields


@pytest.mark.parametrize("name", sorted(BAD.keys() | BAD_IN_CHAT.keys()))
@pytest.mark.parametrize("api", OPENAI)
def test_null_is_the_same_as_absent(api: Api, name: str) -> None:
    assert json.loads(opened(api, **{name: None}).decode_body(None))[name] is None
