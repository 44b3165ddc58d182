"""Keys keep tenants and scopes apart (IS-03, IS-04), and spelling does not matter."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pd_router.core.facts import id_text
from pd_router.core.history import make_reply
from pd_router.core.linking import HISTORY, Keyring, is_id_key, kind_of, tenant_of
from pd_router.core.request import Api, Prepared, prepare
from pd_wire.names import ID_FIELDS, ID_HEADERS

RING = Keyring(b"s" * 32)
USER = {"role": "user", "content": "hi"}
REPLY = make_reply({"role": "assistant", "content": "yo"}, "stop", None)
ECHO = {"role": "assistant", "content": "yo"}


def chat(headers: dict[str, str] | None = None, **fields: Any) -> Prepared:
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    return prepare(Api.CHAT, raw, headers or {}, frozenset({"m", "adapter"}))


def completion(**fields: Any) -> Prepared:
    raw = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    return prepare(Api.COMPLETIONS, raw, {}, frozenset({"m", "adapter"}))


# -- scope ---------------------------------------------------------------------------------------
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1, "b": [1, 2]}}}
SHAPING: list[tuple[str, Any]] = [
    ("model", "adapter"),
    ("tools", [TOOL]),
    ("tools", [TOOL, TOOL]),
    ("tools", [{**TOOL, "function": {**TOOL["function"], "description": "e"}}]),  # type: ignore[dict-item]
    ("tools", [{**TOOL, "function": {**TOOL["function"], "parameters": {"a": 1, "b": [2, 1]}}}]),  # type: ignore[dict-item]
    ("tool_choice", "none"),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("chat_template_kwargs", {"enable_thinking": True}),
    ("documents", [{"text": "x"}]),
    ("reasoning_effort", "high"),
    ("reasoning_effort", "low"),
    ("add_generation_prompt", False),
    ("continue_final_message", True),
    ("add_special_tokens", True),
    ("cache_salt", "a"),
    ("cache_salt", "b"),
    ("mm_processor_kwargs", {"num_crops": 4}),
    ("media_io_kwargs", {"video": {"num_frames": 4}}),
    ("truncation_side", "left"),
    ("vllm_xargs", {"a": 1}),
    ("a_field_of_the_future", 1),
    ("a_field_of_the_future", 2),
]
NOT_SHAPING: list[tuple[str, Any]] = [
    ("temperature", 0.5),
    ("seed", 7),
    ("max_tokens", 5),
    ("stream", True),
    ("stream_options", {"include_usage": True}),
    ("stop", ["x"]),
    ("logprobs", True),
    ("structured_outputs", {"regex": "a"}),
    ("user", "u"),
    ("metadata", {"a": "b"}),
    ("conversation_id", "c"),
    ("session_id", "s"),
    ("request_id", "r"),
    ("min_tokens", 3),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {"type": "json_object"}),
    ("tools", None),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("add_special_tokens", False),
    ("kv_transfer_params", {"a": 1}),
]


RENDERED: list[tuple[str, Any]] = [
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {"type": "json_object"}),
]


@pytest.mark.parametrize(("name", "value"), RENDERED)
def test_what_some_renderers_write_counts_where_a_deployment_says_so(name: str, value: Any) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], name: value}).encode()
    scopes = {
        prepare(Api.CHAT, raw, {}, frozenset({"m"}), rendered).scope for rendered in (frozenset(), frozenset({name}))
    }
    assert len(scopes) == 2
    assert prepare(Api.CHAT, raw, {}, frozenset({"m"})).inexact == name


def test_no_two_shaping_fields_meet() -> None:
    scopes = [chat().scope, *(chat(**{name: value}).scope for name, value in SHAPING)]
    assert len(set(scopes)) == len(scopes)
    keys = [RING.key("t", scope, "session_id", "x") for scope in scopes]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("name", "value"), NOT_SHAPING)
def test_what_does_not_shape_the_prompt_is_not_in_the_scope(name: str, value: Any) -> None:
    # Stream options need a stream, which shapes nothing itself.
    assert chat(**{"stream": True, name: value}).scope == chat().scope


def test_a_model_left_out_is_the_only_one_there_is() -> None:
    raw = json.dumps({"messages": [USER]}).encode()
    assert prepare(Api.CHAT, raw, {}, frozenset({"m"})).scope == chat().scope


def test_the_apis_do_not_meet() -> None:
    assert chat().scope != completion().scope
    assert completion(add_special_tokens=True).scope == completion().scope
    assert completion(add_special_tokens=False).scope != completion().scope


def test_key_order_and_spacing_do_not_matter() -> None:
    fields: list[tuple[str, Any]] = [
        ("model", "m"),
        ("messages", [USER]),
        ("tools", [TOOL]),
        ("cache_salt", "a"),
        ("chat_template_kwargs", {"a": {"x": 1, "y": 2}, "b": 3}),
    ]
    backwards = dict(reversed(list(fields[4][1].items())))
    seen = set()
    for order in itertools.permutations(fields):
        for indent in (None, 3):
            raw = json.dumps(dict(order) | {"chat_template_kwargs": backwards}, indent=indent).encode()
            prepared = prepare(Api.CHAT, raw, {}, frozenset())
            seen.add((prepared.scope, RING.lookup_keys("t", prepared)))
    assert len(seen) == 1


# -- keys ----------------------------------------------------------------------------------------
def test_tenant_scope_kind_value_and_secret_all_count() -> None:
    parts: list[tuple[str, bytes, str, str]] = [
        ("t", b"s", "session_id", "v"),
        ("u", b"s", "session_id", "v"),
        ("t", b"z", "session_id", "v"),
        ("t", b"s", "conversation_id", "v"),
        ("t", b"s", HISTORY, "v"),
        ("t", b"s", "session_id", "w"),
        ("t1:s", b"", "session_id", "v"),
        ("", b"ts", "session_id", "v"),
        ("t", b"sv", "session_id", ""),
    ]
    keys = [RING.key(*part) for part in parts] + [Keyring(b"z" * 32).key(*part) for part in parts]
    assert len(set(keys)) == len(keys)
    assert all(key[1:] != other[1:] for key, other in itertools.combinations(keys, 2))


def test_keys_show_neither_tenant_nor_value() -> None:
    key = RING.key("tenant-a", b"scope", "session_id", "value")
    assert len(key) == 17
    assert b"tenant" not in key
    assert b"value" not in key


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Keyring(b"short")


@pytest.mark.parametrize("name", [*ID_FIELDS, *ID_HEADERS])
def test_each_id_links_one_turn_to_the_next(name: str) -> None:
    def turn(text: str) -> Prepared:
        messages = [{"role": "user", "content": text}]
        return chat({name: "c1"}, messages=messages) if name in ID_HEADERS else chat(messages=messages, **{name: "c1"})

    stored = RING.store_keys("t", turn("first"), None)
    found = RING.lookup_keys("t", turn("second, edited beyond recognition"))
    assert len(stored) == 1
    assert stored[0] in found
    assert is_id_key(stored[0])
    assert kind_of(stored[0]) == name.removeprefix("x-").replace("-", "_")
    assert not set(stored) & set(RING.lookup_keys("u", turn("second")))


@pytest.mark.parametrize("name", ["c1", "ünïcode", "会話", "a b"])
@pytest.mark.parametrize("header", ID_HEADERS)
def test_an_id_in_a_header_is_that_of_a_body_and_of_a_path(header: str, name: str) -> None:
    field = header.removeprefix("x-").replace("-", "_")
    for coding in ("utf-8", "latin-1") if name != "会話" else ("utf-8",):
        sent = chat({header: name.encode(coding).decode("latin-1")})
        told = chat(**{field: name})
        assert RING.lookup_keys("t", sent) == RING.lookup_keys("t", told)
        assert RING.conversations("t", sent) == (RING.conversation("t", id_text(name.encode(coding))),)


def test_what_is_no_text_of_bytes_is_taken_as_it_is() -> None:
    assert chat({"x-session-id": "会話"}).ids == (("x-session-id", "会話"),)
    assert id_text(b"\xff") == "ÿ"


def test_a_header_is_the_field_of_its_name() -> None:
    assert RING.store_keys("t", chat({"x-session-id": "c"}), None) == RING.store_keys("t", chat(session_id="c"), None)
    assert len(RING.store_keys("t", chat({"x-session-id": "c"}, session_id="c"), None)) == 1


def test_history_links_one_turn_to_the_next_within_tenant_and_scope() -> None:
    stored = RING.store_keys("t", chat(), REPLY)
    longer = [USER, ECHO, {"role": "user", "content": "more"}]
    found = RING.lookup_keys("t", chat(messages=longer))
    assert len(stored) == 1
    assert kind_of(stored[0]) == HISTORY
    assert not is_id_key(stored[0])
    assert stored[0] in found
    assert stored[0] not in RING.lookup_keys("u", chat(messages=longer))
    assert stored[0] not in RING.lookup_keys("t", chat(messages=longer, tools=[TOOL]))
    assert stored[0] not in RING.lookup_keys("t", chat(messages=[USER, {**ECHO, "content": "no"}]))


def test_history_is_tried_before_ids_and_longest_first() -> None:
    messages = [USER, ECHO, USER, ECHO, USER]
    prepared = chat({"x-session-id": "h"}, messages=messages, conversation_id="c")
    kinds = [kind_of(key) for key in RING.lookup_keys("t", prepared)]
    assert kinds == [HISTORY, HISTORY, HISTORY, "conversation_id", "session_id"]
    long, short = (RING.store_keys("t", chat(messages=messages[:end]), REPLY)[0] for end in (3, 1))
    keys = RING.lookup_keys("t", prepared)
    assert keys.index(long) < keys.index(short)


def test_a_response_id_leads_to_the_turn_that_gave_it() -> None:
    stored = RING.store_keys("t", chat(), REPLY, "chatcmpl-9")
    assert set(stored) & set(RING.lookup_keys("t", chat(previous_response_id="chatcmpl-9")))


def test_keys_are_empty_exactly_when_nothing_can_be_linked() -> None:
    assert RING.lookup_keys("t", chat())
    assert RING.lookup_keys("t", chat(n=2, conversation_id="c")) == ()
    assert RING.store_keys("t", chat(n=2, conversation_id="c"), REPLY) == ()
    assert RING.lookup_keys("t", completion()) == ()
    assert RING.store_keys("t", completion(), None) == ()
    assert RING.lookup_keys("t", completion(conversation_id="c")) == RING.store_keys(
        "t", completion(conversation_id="c", prompt=[1, 2]), None
    )


# -- tenants -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "mode", "anonymous", "tenant"),
    [
        ({}, "authorization", False, None),
        ({}, "authorization", True, "anonymous"),
        ({"authorization": "Bearer "}, "authorization", False, None),
        ({"authorization": "  "}, "authorization", True, "anonymous"),
        ({"x-pd-tenant": "a"}, "authorization", False, None),
        ({"x-pd-tenant": "a"}, "header", False, "name:a"),
        ({"x-pd-tenant": " "}, "header", False, None),
        ({"authorization": "Bearer k"}, "header", False, None),
        ({"authorization": "Bearer k"}, "header", True, "anonymous"),
    ],
)
def test_tenants(headers: dict[str, str], mode: str, anonymous: bool, tenant: str | None) -> None:
    assert tenant_of(headers, mode, anonymous) == tenant


def test_a_credential_is_one_tenant_and_not_kept() -> None:
    same = [
        {"authorization": "Bearer sk-secret"},
        {"authorization": "bearer   sk-secret "},
        {"authorization": "sk-secret"},
        {"x-api-key": "sk-secret"},
    ]
    tenants = {tenant_of(headers, "authorization", False) for headers in same}
    assert len(tenants) == 1
    tenant = tenants.pop()
    assert tenant is not None
    assert "secret" not in tenant
    others = [{"authorization": "Bearer sk-other"}, {"authorization": "Basic sk-secret"}]
    assert tenant not in {tenant_of(headers, "authorization", True) for headers in others}


def test_no_name_can_imitate_a_credential_or_nobody() -> None:
    key = tenant_of({"authorization": "Bearer k"}, "authorization", False)
    assert key is not None
    for name in (key, "anonymous", key.removeprefix("key:")):
        assert tenant_of({"x-pd-tenant": name}, "header", True) not in (key, "anonymous")


# -- what ends a conversation ----------------------------------------------------------------------
def test_a_conversation_is_the_same_under_all_options_and_any_of_its_names() -> None:
    name = RING.conversation("t", "c")
    for prepared in (
        chat(conversation_id="c"),
        chat(conversation_id="c", tools=[TOOL], model="adapter"),
        chat(session_id="c"),
        chat({"x-conversation-id": "c"}),
        chat({"x-session-id": "c"}, conversation_id="c"),
        completion(session_id="c"),
    ):
        assert RING.conversations("t", prepared) == (name,)


def test_what_names_no_conversation_ends_none() -> None:
    """A prompt's cache key may be that of many, and an answer's id is another one each turn."""
    assert RING.conversations("t", chat()) == ()
    assert RING.conversations("t", chat(prompt_cache_key="c")) == ()
    assert RING.conversations("t", chat(conversation_id="a", session_id="b", prompt_cache_key="c")) == (
        RING.conversation("t", "a"),
        RING.conversation("t", "b"),
    )


def test_conversations_of_two_tenants_or_two_keys_never_meet() -> None:
    found = [
        RING.conversation("t", "c"),
        RING.conversation("u", "c"),
        RING.conversation("t", "d"),
        RING.conversation("tc", ""),
        RING.conversation("", "tc"),
        Keyring(b"x" * 32).conversation("t", "c"),
    ]
    assert len(set(found)) == len(found)
