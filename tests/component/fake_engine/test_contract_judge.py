"""Everything that must never reach an engine is recorded; everything that a right router sends is not."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from support.legs import FIRST_TURN, hand_turn, post

PLAIN: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 30}]}
PREFILL = {**PLAIN, "max_tokens": 1, "kv_transfer_params": FIRST_TURN}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({**PREFILL, "conversation_id": "c"}, "conversation_id"),
        ({**PREFILL, "prompt_cache_key": "c"}, "prompt_cache_key"),
        ({**PREFILL, "previous_response_id": "c"}, "previous_response_id"),
        ({**PREFILL, "KV_Transfer_Params": {}}, "KV_Transfer_Params"),
        ({**PREFILL, "vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
        ({**PREFILL, "vllm_xargs": {"a": '{"kv_transfer_params": 1}'}}, "vllm_xargs"),
        ({**PREFILL, "extra_body": {"deep": [{"kv_transfer_params": {}}]}}, "extra_body"),
        ({**PREFILL, "sampling_params": {"extra_args": {"do_remote_decode": True}}}, "do_remote_decode"),
        ({**PREFILL, "max_tokens": 7}, "one token"),
        ({**PREFILL, "max_completion_tokens": 50}, "one token"),
        ({**PREFILL, "stream": True}, "stream"),
        ({**PREFILL, "logprobs": True}, "logprobs"),
        ({**PREFILL, "n": 2}, "choices"),
        ({**PREFILL, "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False}}, "flags"),
        ({**PREFILL, "kv_transfer_params": "x"}, "object"),
        ({**PREFILL, "kv_transfer_params": {**FIRST_TURN, "remote_block_ids": [[1]]}}, "malformed"),
    ],
)
async def test_a_breach_is_recorded(make_pair: Any, body: dict[str, Any], word: str) -> None:
    pair = await make_pair()
    async with aiohttp.ClientSession(pair.prefill.url) as session:
        await session.post("/v1/chat/completions", json=body)
    violations = pair.fabric.take_violations()
    assert any(word in violation for violation in violations), violations


async def test_a_doubled_field_is_recorded(make_pair: Any) -> None:
    pair = await make_pair()
    raw = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1,"max_tokens":1}'
    async with aiohttp.ClientSession() as session:
        await session.post(pair.prefill.url + "/v1/chat/completions", data=raw)
    assert "stands twice" in pair.fabric.take_violations()[0]


@pytest.mark.parametrize(
    "key", ["remote_block_ids", "remote_num_tokens", "remote_blocks_expiry_time", "tp_size", "x_new"]
)
async def test_a_handle_that_lost_or_changed_a_key_is_recorded(make_pair: Any, key: str) -> None:
    pair = await make_pair(handle_extras={"x_new": [[1.5, None], {"ü": 2**60}]})
    one = await hand_turn(pair.prefill, pair.decode, PLAIN)
    assert one.handle is not None
    cut = {name: value for name, value in one.handle.items() if name != key}
    await hand_turn(pair.prefill, pair.decode, PLAIN, cut)
    violations = pair.fabric.take_violations()
    assert any(key in violation for violation in violations), violations


async def test_an_invented_handle_is_recorded(make_pair: Any) -> None:
    pair = await make_pair()
    one = await hand_turn(pair.prefill, pair.decode, PLAIN)
    assert one.handle is not None
    await hand_turn(pair.prefill, pair.decode, PLAIN, {**one.handle, "remote_request_id": "guess"})
    assert any("no engine gave" in violation for violation in pair.fabric.take_violations())


async def test_a_decode_prompt_that_differs_is_recorded(make_pair: Any) -> None:
    pair = await make_pair()
    _, answer = await post(pair.prefill.url + "/v1/chat/completions", PREFILL)
    other = {"model": "tiny", "messages": [{"role": "user", "content": "jello " * 30}]}
    await post(pair.decode.url + "/v1/chat/completions", {**other, "kv_transfer_params": answer["kv_transfer_params"]})
    assert any("prompt differs" in violation for violation in pair.fabric.take_violations())
