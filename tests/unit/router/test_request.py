"""Opening a request: what is refused with which words, what is read from it, and that the rest stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.history import make_reply
from pd_router.core.request import Api, Prepared, prepare

MODELS = frozenset({"m", "adapter"})
USER = {"role": "user", "content": "hello"}


def chat(headers: dict[str, str] | None = None, **fields: Any) -> Prepared:
    return prepare(Api.CHAT, json.dumps({"model": "m", "messages": [USER], **fields}).encode(), headers or {}, MODELS)


def completion(**fields: Any) -> Prepared:
    return prepare(Api.COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), {}, MODELS)


def sent(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(body)
    return value


# -- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":1e999}]}',
        b'{"model":"m","temperature":NaN,"messages":[]}',
        b"\xef\xbb\xbf{}",
        b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":' + b"[" * 1000 + b"]" * 1000 + b"}",
    ],
)
def test_malformed_bodies_are_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        prepare(Api.CHAT, raw, {}, MODELS)
    assert refused.value.status == 400
    error = sent(refused.value.body())["error"]
    assert error["code"] == "malformed_json"
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


WRONG: list[tuple[str, Any]] = [
    ("model", 3),
    ("model", ["m"]),
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {"role": "user"}),
    ("stream", "true"),
    ("stream", 1),
    ("n", "2"),
    ("n", 2.0),
    ("n", True),
    ("best_of", "2"),
    ("use_beam_search", "yes"),
    ("echo", 1),
    ("prompt_logprobs", "1"),
    ("truncate_prompt_tokens", "5"),
    ("conversation_id", {"a": 1}),
    ("conversation_id", True),
    ("session_id", [1]),
    ("prompt_cache_key", 1.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_names_the_field_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**{name: value})
    assert refused.value.status == 400
    assert refused.value.param == name
    assert refused.value.message.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, "x"], "messages[1]"),
        ([USER, {"content": "x"}], "messages[1]"),
        ([{"role": 1, "content": "x"}], "messages[0]"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
    ],
)
def test_a_bad_message_is_named_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        {"a": 1},
        True,
        [{"a": 1}],
        [None],
        [1.5],
        [1, {"kv_transfer_params": {}}],
        ["a", {"kv_transfer_params": {}}],
        [[1, {"kv_transfer_params": {}}]],
        [[1], {"kv_transfer_params": {}}],
        [[1], [2, {"kv_transfer_params": {}}]],
        [1, "a"],
        ["a", 1],
        [1, True],
        [[1, True]],
        [["a"]],
        [[1], 2],
        [[[1]]],
        [1, None],
    ],
)
def test_a_bad_prompt_is_400(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt)
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert "list of" in refused.value.message


@pytest.mark.parametrize("prompt", ["", [], "a", ["a", "b"], [1, 2], [[1, 2], [3]], [[]], [2**64 - 1]])
def test_good_prompts_pass_as_they_are(prompt: Any) -> None:
    prepared = completion(prompt=prompt)
    assert [sent(body)["prompt"] for body in (prepared.prefill_body(None), prepared.decode_body(None))] == [prompt] * 2


BIG = 2**64 + 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a", "x": BIG},
        {"role": "user", "content": "a", "x": -BIG},
        {"role": "user", "content": "a", "x": {"y": [[BIG]]}},
        {"role": "user", "content": [{"type": "text", "text": "a", "seed": BIG}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"id": BIG}}}]},
    ],
)
def test_integers_of_any_size_in_a_message_reach_both_engines(message: Any) -> None:
    prepared = chat(messages=[message])
    for body in (prepared.prefill_body(None), prepared.decode_body(None)):
        assert str(BIG).encode() in body
        assert sent(body)["messages"] == [message]


def test_integers_of_any_size_at_the_top_reach_decode() -> None:
    for name in ("seed", "priority", "unknown"):
        assert sent(chat(**{name: BIG}).decode_body(None))[name] == BIG


def test_an_unknown_model_is_404_and_lists_what_there_is() -> None:
    with pytest.raises(ApiError) as refused:
        chat(model="gpt")
    assert refused.value.status == 404
    assert refused.value.code == "model_not_found"
    assert "adapter, m" in refused.value.message


def test_a_model_may_be_left_out_only_where_there_is_one() -> None:
    raw = json.dumps({"messages": [USER]}).encode()
    assert prepare(Api.CHAT, raw, {}, frozenset({"only"})).model == "only"
    for known in (MODELS, frozenset()):
        with pytest.raises(ApiError) as refused:
            prepare(Api.CHAT, raw, {}, known)
        assert (refused.value.status, refused.value.param) == (400, "model")


def test_any_model_passes_while_none_is_known() -> None:
    assert prepare(Api.CHAT, json.dumps({"model": "x", "messages": [USER]}).encode(), {}, frozenset()).model == "x"


# -- what is read --------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [None, False])
def test_null_booleans_are_false(value: Any) -> None:
    assert chat(stream=value).stream is False
    assert chat(use_beam_search=value, echo=value, n=None, best_of=None).two_legs


def test_ids_come_in_order_of_precedence_and_unknown_ones_stay_here() -> None:
    headers = {"x-session-id": "hs", "x-conversation-id": "hc"}
    fields = {"previous_response_id": "p", "prompt_cache_key": "k", "session_id": "s", "conversation_id": 7}
    prepared = chat(headers, **fields)
    assert prepared.ids == (
        ("conversation_id", "7"),
        ("session_id", "s"),
        ("prompt_cache_key", "k"),
        ("previous_response_id", "p"),
        ("x-conversation-id", "hc"),
        ("x-session-id", "hs"),
    )
    for body in (prepared.prefill_body(None), prepared.decode_body({}), prepared.decode_body(None)):
        assert sent(body).keys() & fields.keys() == {"session_id"}


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_id_is_no_id(value: Any) -> None:
    assert chat({"x-session-id": ""}, conversation_id=value).ids == ()


ALONE: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n > 1"),
    ({"best_of": 3}, "best_of > 1"),
    ({"use_beam_search": True}, "beam search"),
    ({"echo": True}, "echo"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"prompt_logprobs": 5}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": -1}, "truncation to the model's limit"),
]


@pytest.mark.parametrize(("fields", "reason"), ALONE)
def test_turns_for_decode_alone_are_not_linked_either(fields: dict[str, Any], reason: str) -> None:
    for prepared in (chat(**fields), completion(**fields)):
        assert not prepared.two_legs
        assert prepared.link_fault == reason
        assert prepared.history == ()
        assert "kv_transfer_params" not in sent(prepared.decode_body(None))


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_several_prompts_are_for_decode_alone(prompt: Any) -> None:
    assert (completion(prompt=prompt).two_legs, completion(prompt=prompt).link_fault) == (False, "several prompts")


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("x" * 400, 100), ([5] * 300, 300), (["x" * 400], 100), ([[5] * 20], 20), ([], None)]
)
def test_one_prompt_takes_two_legs(prompt: Any, tokens: int | None) -> None:
    prepared = completion(prompt=prompt)
    assert prepared.two_legs
    assert prepared.link_fault is None
    if tokens is not None:
        assert abs(prepared.prompt_tokens_estimate - tokens) <= 15


def test_embeddings_are_for_decode_alone() -> None:
    assert completion(prompt=None, prompt_embeds="AAAA").link_fault == "prompt_embeds"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"image_url": "http://x"},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "image_embeds", "image_embeds": ""},
        5,
    ],
)
def test_media_takes_two_legs_and_is_never_linked(part: Any) -> None:
    prepared = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
    assert prepared.two_legs
    assert prepared.link_fault == "media"


def test_truncation_to_a_number_takes_two_legs_and_is_not_linked() -> None:
    prepared = chat(truncate_prompt_tokens=100)
    assert (prepared.two_legs, prepared.link_fault) == (True, "truncate_prompt_tokens")


INEXACT: list[dict[str, Any]] = [
    {"continue_final_message": True, "add_generation_prompt": False},
    {"add_generation_prompt": False},
    {"chat_template": "{{ messages }}"},
    {"ignore_eos": True},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"documents": [{"text": "x"}]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "low"},
    {"include_reasoning": False},
    {"messages": [USER, {"role": "assistant", "content": "a", "reasoning": "hm"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "<think>hm</think>a"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}, USER]},
]


@pytest.mark.parametrize("fields", INEXACT)
def test_inexact_turns_may_be_linked_only_with_a_proof(fields: dict[str, Any]) -> None:
    prepared = chat(**fields)
    assert prepared.inexact
    assert prepared.link_fault is None


def test_plain_turns_are_exact_and_completions_never() -> None:
    assert chat(messages=[USER, {"role": "assistant", "content": "a", "reasoning": None}, USER]).inexact is None
    assert completion().inexact
    assert completion().history == ()
    assert completion().history_with(make_reply({"role": "assistant", "content": "a"}, "stop", None)) is None


# -- what stays as it was ------------------------------------------------------------------------
def test_the_decode_body_is_the_clients_plus_params() -> None:
    fields: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "min_tokens": 2,
        "temperature": 0.1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": [1.5, None, "é漢😀"]}}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "stop": ["a"],
        "unknown": {"deep": [{}]},
        "session_id": "s",
    }
    prepared = chat(**fields)
    original = {"model": "m", "messages": [USER], **fields}
    assert sent(prepared.decode_body(None)) == original
    params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "x": {"y": None}}
    assert sent(prepared.decode_body({**params, "pd_report": {"a": 1}})) == {**original, "kv_transfer_params": params}
    kept = {**params, "pd_retain": False}
    assert sent(prepared.decode_body(params, retain=False)) == {**original, "kv_transfer_params": kept}
    prepared.prefill_body(None)
    assert sent(prepared.decode_body(None)) == original


def test_numbers_keep_their_value() -> None:
    big = 123456789012345678901234567890
    schema = {"maximum": big, "minimum": -big, "f": 0.1, "e": 1e30, "u": 18446744073709551615, "i": -(2**63)}
    prepared = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    for body in (prepared.decode_body(None), prepared.prefill_body(None)):
        assert sent(body)["tools"][0]["function"]["parameters"] == schema
    with_handle = prepared.prefill_body({"a": big})
    assert sent(with_handle)["kv_transfer_params"] == {"a": big}


def test_a_change_beyond_64_bits_changes_the_scope() -> None:
    one, other = 10**30, 10**30 + 1
    assert chat(chat_template_kwargs={"x": one}).scope != chat(chat_template_kwargs={"x": other}).scope


def test_the_last_of_duplicate_keys_is_the_only_one_that_is_sent() -> None:
    raw = b'{"model":"x","model":"m","n":2,"n":1,"messages":[{"role":"user","content":"a","content":"b"}]}'
    prepared = prepare(Api.CHAT, raw, {}, MODELS)
    assert prepared.decode_body(None).count(b'"model"') == 1
    assert sent(prepared.decode_body(None)) == {"model": "m", "n": 1, "messages": [{"role": "user", "content": "b"}]}


def test_deep_but_honest_nesting_passes() -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    prepared = chat(chat_template_kwargs={"deep": deep})
    assert sent(prepared.decode_body(None))["chat_template_kwargs"] == {"deep": deep}


def test_new_tokens_are_those_after_the_last_answer() -> None:
    first = [{"role": "user", "content": "x" * 4000}]
    talk = [*first, {"role": "assistant", "content": "y" * 400}]
    for messages, tokens in ((first, 1000), (talk, 0), ([*talk, {"role": "user", "content": "z" * 80}], 20)):
        raw = json.dumps({"model": "m", "messages": messages}).encode()
        assert prepare(Api.CHAT, raw, {}, frozenset()).new_tokens_estimate == tokens
    raw = json.dumps({"model": "m", "prompt": [5] * 300}).encode()
    assert prepare(Api.COMPLETIONS, raw, {}, frozenset()).new_tokens_estimate == 300
