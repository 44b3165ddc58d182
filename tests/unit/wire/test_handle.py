"""The handle's shape: what may be sent to, and read by, an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_wire.handle import (
    address_fault,
    data_parallel_rank,
    decoder_handle_fault,
    group_count,
    prefill_handle_fault,
)

ADDRESS: dict[str, Any] = {
    "remote_engine_id": "5f0c",
    "remote_request_id": "cmpl-1-0-ab",
    "remote_host": "10.0.3.17",
    "remote_port": 5600,
}
DECODER: dict[str, Any] = {
    **ADDRESS,
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[4, 5, 6]],
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": 123.5,
    "tp_size": 8,
}
PREFILL: dict[str, Any] = {**DECODER, "do_remote_prefill": True, "do_remote_decode": False}


def test_genuine_handles_pass() -> None:
    assert decoder_handle_fault(DECODER) is None
    assert prefill_handle_fault(PREFILL) is None
    assert address_fault(ADDRESS) is None
    assert group_count(DECODER) == 1
    assert decoder_handle_fault({**DECODER, "remote_registration_generation": 3, "anything": {"else": []}}) is None


@pytest.mark.parametrize("host", ["10.0.3.17", "fe80::1%eth0", "[::1]", "pod-0.svc.cluster.local", "node_1"])
def test_every_form_of_a_host_passes(host: str) -> None:
    assert decoder_handle_fault({**DECODER, "remote_host": host}) is None


@pytest.mark.parametrize("key", ["remote_block_ids", "remote_num_tokens", *ADDRESS])
def test_a_missing_field_is_named(key: str) -> None:
    without = {name: value for name, value in DECODER.items() if name != key}
    assert decoder_handle_fault(without) == f"{key} is missing"
    assert decoder_handle_fault({**DECODER, key: None}) == f"{key} is missing"


WRONG = [
    ("remote_host", "", "remote_host"),
    ("remote_host", "a b", "remote_host"),
    ("remote_host", "host/path", "remote_host"),
    ("remote_host", 7, "remote_host"),
    ("remote_engine_id", 7, "remote_engine_id"),
    ("remote_request_id", "x" * 1025, "remote_request_id"),
    ("remote_port", "5600", "remote_port"),
    ("remote_port", 0, "remote_port"),
    ("remote_port", 65536, "remote_port"),
    ("remote_port", True, "remote_port"),
    ("remote_num_tokens", 0, "remote_num_tokens"),
    ("remote_num_tokens", 40.0, "remote_num_tokens"),
    ("remote_num_tokens", 1 << 31, "remote_num_tokens"),
    ("remote_block_ids", [], "remote_block_ids"),
    ("remote_block_ids", [1, 2], "remote_block_ids"),
    ("remote_block_ids", [[]], "remote_block_ids is empty"),
    ("remote_block_ids", [["1"]], "remote_block_ids"),
    ("remote_block_ids", [[-1]], "remote_block_ids"),
    ("remote_block_ids", [[1 << 31]], "remote_block_ids"),
    ("remote_block_ids", [[True]], "remote_block_ids"),
    ("remote_block_ids", [list(range(41))], "more blocks than"),
    ("remote_block_ids", [[1, 1, 1]], "a block twice"),
    ("remote_block_ids", [[4, 5, 6, 5]], "a block twice"),
    ("remote_block_ids", [[0, 0, 5, 5]], "a block twice"),
    ("remote_block_ids", [[0, 0, 0]], "a block twice"),
    ("remote_block_ids", [[4, 5, 6], [7, 7]], "a block twice"),
    ("remote_num_tokens", 10**9, "for each of the blocks"),
    ("remote_num_tokens", 3 * 4096 + 1, "for each of the blocks"),
    ("tp_size", 0, "tp_size"),
    ("tp_size", "8", "tp_size"),
    ("dcp_size", 1 << 20, "dcp_size"),
    ("pp_size", None, "pp_size"),
    ("remote_registration_generation", -1, "remote_registration_generation"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG)
def test_a_wrong_field_is_named_for_both_directions(key: str, value: object, words: str) -> None:
    assert words in str(decoder_handle_fault({**DECODER, key: value}))
    assert words in str(prefill_handle_fault({**PREFILL, key: value}))


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ([[4, 5, 6]], 3),
        ([[4, 5, 6]], 3 * 4096),
        ([[0, 1, 2]], 48),
        ([[9]], 1_000_000),
        ([[0, 0, 7, 8]], 64),
        ([[4, 5, 6, 7], [0, 0, 8, 9]], 64),
        ([[4, 5, 6, 7], [9], []], 4 * 2096),
        ([[9], [8]], 1_000_000),
        ([[1, 2], [3, 4]], 100_000),
    ],
    ids=repr,
)
def test_windows_states_and_several_groups_pass(groups: list[list[int]], tokens: int) -> None:
    assert decoder_handle_fault({**DECODER, "remote_block_ids": groups, "remote_num_tokens": tokens}) is None
    assert prefill_handle_fault({**PREFILL, "remote_block_ids": groups, "remote_num_tokens": tokens}) is None


@pytest.mark.parametrize("value", [None, "soon", float("nan"), float("inf"), float("-inf"), 10**400, True])
def test_a_deadline_must_be_a_time(value: object) -> None:
    assert "remote_blocks_expiry_time" in str(decoder_handle_fault({**DECODER, "remote_blocks_expiry_time": value}))


def test_a_deadline_may_be_waived_but_not_be_nonsense() -> None:
    without = {name: value for name, value in DECODER.items() if name != "remote_blocks_expiry_time"}
    assert decoder_handle_fault(without, require_expiry=False) is None
    nonsense = {**DECODER, "remote_blocks_expiry_time": float("nan")}
    assert decoder_handle_fault(nonsense, require_expiry=False) is not None


def test_the_two_directions_are_not_exchangeable() -> None:
    assert "do_remote_prefill" in str(prefill_handle_fault(DECODER))
    assert "do_remote_decode" in str(decoder_handle_fault(PREFILL))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(value=JSON | st.fixed_dictionaries({}, optional={key: JSON | st.just(DECODER[key]) for key in DECODER}))
def test_whatever_comes_the_answer_is_a_sentence_or_none(value: Any) -> None:
    for fault in (decoder_handle_fault(value), prefill_handle_fault(value)):
        assert fault is None or (fault and "\n" not in fault)


@pytest.mark.parametrize(
    ("engine_id", "rank"),
    [("5f0c", None), ("5f0c_dp0", 0), ("5f0c_dp11", 11), ("_dp1_x", None), ("5f0c_dp", None), ("5f0c_dp99999", None)],
)
def test_the_rank_is_the_end_of_the_engine_id(engine_id: str, rank: int | None) -> None:
    assert data_parallel_rank({**DECODER, "remote_engine_id": engine_id}) == rank
