"""The prefill leg as a table (RP-08, RP-09): one token, nothing that constrains or parses output, the same prompt."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.cutting import strip_json
from pd_router.core.fields import Api
from pd_router.core.jsontext import RawJson
from pd_router.core.request import FIRST_PREFILL, Prepared, prepare

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PROMPTS: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Api.COMPLETIONS: {"prompt": "hi"},
    Api.RESPONSES: {"input": [{"role": "user", "content": "hi"}]},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "hi"}]},
}
NEEDED_ALWAYS: dict[Api, dict[str, Any]] = {Api.MESSAGES: {"max_tokens": 64}}
LIMITS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 64},
    {"max_completion_tokens": 64},
    {"max_tokens": 64, "max_completion_tokens": 32},
    {"max_tokens": None},
    {"max_completion_tokens": None},
    {"min_tokens": 16},
    {"max_tokens": 64, "min_tokens": 16},
    {"min_tokens": None, "max_tokens": 1},
]
OUTPUT: dict[str, Any] = {
    "stream_options": {"include_usage": True},
    "stream_interval": 4,
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
    "stop": ["x"],
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "logprobs": 1,
    "top_logprobs": 3,
    "logprob_token_ids": [1],
    "logit_bias": {"1": 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["b"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "g",
    "guided_decoding_backend": "b",
    "guided_whitespace_pattern": "w",
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 5,
    "echo": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_prompt_text": True,
    "min_tokens": 2,
}
NEEDED: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": 1},
}
SHAPING: dict[str, Any] = {
    "tools": TOOLS,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "high",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": True,
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"video": {"n": 1}},
    "cache_salt": "salt",
    "truncate_prompt_tokens": 100,
    "truncation_side": "left",
    "vllm_xargs": {"a": 1},
    "unknown_extension": {"a": [1]},
}


def opened(api: Api, rendered: frozenset[str] = frozenset(), **fields: Any) -> Prepared:
    raw = json.dumps({"model": "m", **PROMPTS[api], **NEEDED_ALWAYS.get(api, {}), **fields}).encode()
    return prepare(api, raw, {}, frozenset({"m"}), rendered)


def prefill(api: Api, handle: Any = None, **fields: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(opened(api, **fields).prefill_body(handle))
    return value


@pytest.mark.parametrize(
    ("api", "limits", "stream"),
    list(itertools.product([Api.CHAT, Api.COMPLETIONS], LIMITS, [True, False, None])),
)
def test_limits_become_one_and_decode_keeps_the_originals(
    api: Api, limits: dict[str, Any], stream: bool | None
) -> None:
    fields = {**limits, "stream": stream}
    body = prefill(api, **fields)
    assert body["max_tokens"] == 1
    assert body.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in body) is (api is Api.CHAT)
    assert "min_tokens" not in body
    assert body["stream"] is False
    assert json.loads(opened(api, **fields).decode_body(None)) == {"model": "m", **PROMPTS[api], **fields}


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize(
    ("api", "limits", "on_prefill"),
    [
        (Api.RESPONSES, {}, {"max_output_tokens": 1}),
        (Api.RESPONSES, {"max_output_tokens": 64}, {"max_output_tokens": 1}),
        (Api.RESPONSES, {"max_output_tokens": None}, {"max_output_tokens": 1}),
        (Api.RESPONSES, {"store": True}, {"max_output_tokens": 1}),
        (Api.MESSAGES, {"max_tokens": 64}, {"max_tokens": 1}),
    ],
)
def test_limits_of_the_other_apis(
    api: Api, limits: dict[str, Any], on_prefill: dict[str, Any], stream: bool | None
) -> None:
    fields = {**limits, "stream": stream}
    body = prefill(api, **fields)
    assert {name: body[name] for name in body if name.startswith("max_")} == on_prefill
    assert body["stream"] is False
    assert body.get("store", False) is False
    assert json.loads(opened(api, **fields).decode_body(None)) == {"model": "m", **PROMPTS[api], **fields}


@pytest.mark.parametrize(
    ("api", "fields", "on_prefill"),
    [
        (Api.RESPONSES, {"text": {"format": {"type": "json_object"}}, "include": []}, {}),
        (Api.RESPONSES, {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low"}}),
        (Api.RESPONSES, {"instructions": "Be kind."}, {"instructions": "Be kind."}),
        (Api.RESPONSES, {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, {"tools": TOOLS}),
        (Api.MESSAGES, {"stop_sequences": ["x"]}, {}),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, {}),
        (Api.MESSAGES, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        (Api.MESSAGES, {"output_config": {"effort": "low", "format": {}}}, {"output_config": {"effort": "low"}}),
        (Api.MESSAGES, {"system": "Be kind."}, {"system": "Be kind."}),
        (Api.MESSAGES, {"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": TOOLS}),
        (Api.MESSAGES, {"tool_choice": {"type": "none"}}, {"tool_choice": {"type": "none"}}),
    ],
)
def test_options_of_the_other_apis(api: Api, fields: dict[str, Any], on_prefill: dict[str, Any]) -> None:
    body = prefill(api, **fields)
    assert {name: body[name] for name in fields if name in body} == on_prefill
    sent = json.loads(opened(api, **fields).decode_body(None))
    assert {name: sent[name] for name in fields} == fields


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES])
def test_no_client_chooses_the_id_of_an_answer(api: Api) -> None:
    assert b"chosen" not in opened(api, request_id="chosen").decode_body(None)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("name", OUTPUT)
def test_nothing_that_shapes_output_is_on_the_prefill_leg(api: Api, name: str) -> None:
    assert name not in prefill(api, **{name: OUTPUT[name], **NEEDED.get(name, {})})


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("name", SHAPING)
def test_everything_that_shapes_the_prompt_is(api: Api, name: str) -> None:
    body = prefill(api, **{name: SHAPING[name]})
    assert body[name] == SHAPING[name]
    assert {key: body[key] for key in PROMPTS[api]} == PROMPTS[api]


@pytest.mark.parametrize(
    ("choice", "on_prefill"),
    [
        ("required", None),
        ({"type": "function", "function": {"name": "f"}}, None),
        ("auto", "auto"),
        ("none", "none"),
        (None, None),
    ],
)
def test_a_forced_tool_choice_is_dropped_and_the_tools_stay(choice: Any, on_prefill: Any) -> None:
    body = prefill(Api.CHAT, tools=TOOLS, tool_choice=choice)
    assert body["tools"] == TOOLS
    assert body.get("tool_choice") == on_prefill


def test_a_renderer_that_writes_output_options_into_the_prompt_keeps_them_on_both_legs() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    prepared = opened(Api.CHAT, frozenset({"tool_choice", "response_format"}), **fields)
    body = json.loads(prepared.prefill_body(None))
    assert {name: body[name] for name in fields} == fields


@pytest.mark.parametrize("api", Api)
def test_without_a_handle_the_leg_asks_for_blocks(api: Api) -> None:
    params = prefill(api)["kv_transfer_params"]
    assert params == FIRST_PREFILL
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert {name for name, value in params.items() if value is None} == {
        "remote_engine_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(handle=st.dictionaries(st.text(max_size=12), _JSON, max_size=8))
def test_every_key_of_a_handle_reaches_the_prefill_body_unchanged(handle: dict[str, Any]) -> None:
    assert prefill(Api.CHAT, handle)["kv_transfer_params"] == handle


@settings(deadline=None)
@given(handle=st.dictionaries(st.text(max_size=12), _JSON, min_size=1, max_size=8), api=st.sampled_from(Api))
def test_golden_way_of_a_handle_through_answer_and_next_prefill(handle: dict[str, Any], api: Api) -> None:
    text = json.dumps(handle, ensure_ascii=False)
    answer = f'{{"id":"x","choices":[],"kv_transfer_params":{text},"metrics":null}}'.encode()
    clean, found = strip_json(answer)
    assert clean == b'{"id":"x","choices":[],"metrics":null}'
    assert found is not None
    body = opened(api).prefill_body(RawJson(found.raw))
    assert text.encode() in body
    assert json.loads(body)["kv_transfer_params"] == handle


def test_integers_of_any_size_survive_from_prefill_to_decode() -> None:
    big = 2**80 + 1
    answer = f'{{"choices":[],"kv_transfer_params":{{"a":{big},"b":[{big}],"pd_report":{{}}}},"x":0}}'.encode()
    params = strip_json(answer)[1]
    assert json.loads(opened(Api.CHAT).decode_body(params))["kv_transfer_params"] == {"a": big, "b": [big]}
