"""No `kv_transfer_params` from a client in any place and spelling (IS-01), and no client's text lost on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.fields import Api
from pd_router.core.request import prepare

BAD = {"do_remote_decode": True, "remote_host": "169.254.169.254", "remote_block_ids": [[1]]}
SPELLINGS = (
    "kv_transfer_params",
    "KV_TRANSFER_PARAMS",
    "Kv_Transfer_Params",
    "kvTransferParams",
    "kv-transfer-params",
    "kv transfer params",
    "ec_transfer_params",
)
TEXT = 'please explain "kv_transfer_params": {"remote_host": "x"}'
PLACES: dict[str, Any] = {
    "top level": lambda name: {name: BAD},
    "extra_body": lambda name: {"extra_body": {name: BAD}},
    "vllm_xargs": lambda name: {"vllm_xargs": {name: BAD, "keep": 1}},
    "xargs as text": lambda name: {"vllm_xargs": {name: json.dumps(BAD)}},
    "sampling_params": lambda name: {"sampling_params": {"extra_args": {name: BAD}}},
    "deep": lambda name: {"a": [{"b": [[{"c": {name: BAD}}]]}]},
    "metadata": lambda name: {"metadata": {name: "x"}},
    "stream_options": lambda name: {"stream_options": {name: BAD}},
    "tool schema": lambda name: {"tools": [{"type": "function", "function": {"name": "f", name: BAD}}]},
    "message": lambda name: {"messages": [{"role": "user", "content": TEXT, name: BAD}]},
    "part": lambda name: {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT, name: BAD}]}]},
    "tool call": lambda name: {
        "messages": [{"role": "assistant", "content": TEXT, "tool_calls": [{"function": {name: BAD}}]}]
    },
}


def bodies(api: Api, raw: bytes) -> list[bytes]:
    prepared = prepare(api, raw, {}, frozenset({"m"}))
    return [prepared.prefill_body(None), prepared.decode_body(None), prepared.decode_body({"ours": 1})]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("api", Api)
def test_the_field_is_removed_from_every_place(api: Api, place: str, spelling: str) -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "prompt": TEXT, **PLACES[place](spelling)}
    request["max_tokens"] = 9
    if api is Api.COMPLETIONS:
        request["messages"] = "ignored by this API"
    if api is Api.RESPONSES:
        del request["prompt"]
        request["input"] = request.pop("messages")
    for body in bodies(api, json.dumps(request).encode()):
        assert b"169.254" not in body
        assert json.dumps(TEXT, ensure_ascii=False).encode() in body
        seen = json.loads(body)
        seen.pop("kv_transfer_params", None)
        assert _keys(seen).isdisjoint(SPELLINGS)
        if place == "vllm_xargs":
            assert seen["vllm_xargs"] == {"keep": 1}


def test_escapes_in_the_key_do_not_hide_it() -> None:
    raw = b'{"model":"m","prompt":"p","kv\\u005ftransfer\\u005Fparams":{"remote_host":"169.254.169.254"}}'
    assert all(b"169.254" not in body for body in bodies(Api.COMPLETIONS, raw))


def test_duplicates_do_not_hide_it() -> None:
    raw = b'{"model":"m","prompt":"p","kv_transfer_params":null,"kv_transfer_params":{"remote_host":"169.254.169.254"}}'
    assert all(b"169.254" not in body for body in bodies(Api.COMPLETIONS, raw))


@pytest.mark.parametrize("carrier", ["", "extra_body", "vllm_xargs"])
def test_our_own_keys_are_removed(carrier: str) -> None:
    own = {"pd_retain": False, "pd_proof": {"v": 1}}
    request = {"model": "m", "prompt": "p", **({carrier: own} if carrier else own)}
    assert all(b"pd_" not in body for body in bodies(Api.COMPLETIONS, json.dumps(request).encode()))


_VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.sampled_from([TEXT, "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SPELLINGS, "a", "b"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(extra=st.dictionaries(st.sampled_from(["tools", "extra_body", "x", *SPELLINGS]), _VALUES, max_size=4))
def test_what_is_left_is_the_input_without_those_keys(extra: dict[str, Any]) -> None:
    request = {"model": "m", "prompt": TEXT, **extra}
    sent = json.loads(prepare(Api.COMPLETIONS, json.dumps(request).encode(), {}, frozenset({"m"})).decode_body(None))
    assert sent == _without(request)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in SPELLINGS}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()
