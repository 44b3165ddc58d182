"""Scope, proven length, spent handles, chunks, versions, NIXL's log."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector import compat
from pd_connector.core.backend_log import failure_reason, network_fault
from pd_connector.core.chunk import handle_of, message_with_handle, with_handle
from pd_connector.core.scope import Shape, proof_obstacle, proven_length, pull_obstacle, scope_bytes
from pd_connector.core.spent import SpentHandles
from pd_connector.core.verdicts import Check, lines

SHAPES = st.builds(
    Shape,
    st.none() | st.text(max_size=6),
    st.none() | st.integers(1, 3),
    st.none() | st.text(max_size=6),
)


@given(SHAPES, SHAPES)
def test_other_adapters_and_salts_have_another_scope(one: Shape, other: Shape) -> None:
    plain = one.adapter_name is None and one.cache_salt is None
    same = (one.adapter_name, one.cache_salt) == (other.adapter_name, other.cache_salt)
    if scope_bytes(one) == scope_bytes(other):
        assert same
        assert plain or one.adapter_id == other.adapter_id


def test_media_and_embeddings_are_obstacles() -> None:
    assert proof_obstacle(Shape()) is None
    assert proof_obstacle(Shape(media_items=1)) == pull_obstacle(Shape(media_items=1)) == "the prompt holds media"
    assert proof_obstacle(Shape(has_embeddings=True)) == "the prompt holds embeddings"
    assert pull_obstacle(Shape(reads_no_cache=True)) == "the request wants every prompt token computed"
    # Such a request may not read, but what it computed can be proven.
    assert proof_obstacle(Shape(reads_no_cache=True)) is None


@pytest.mark.parametrize(
    ("computed", "in_flight", "known", "expected"),
    [(99, 0, 100, 99), (102, 2, 100, 100), (102, 0, 100, 100), (100, 1, 100, 99), (1, 5, 100, 0)],
)
def test_only_settled_tokens_are_proven(computed: int, in_flight: int, known: int, expected: int) -> None:
    assert proven_length(computed, in_flight, known) == expected


def test_spent_handles_are_forgotten_oldest_first() -> None:
    spent = SpentHandles(capacity=2)
    assert [spent.spend("d", name) for name in ("a", "b", "a", "c")] == [True, True, False, True]
    assert spent.spend("d", "b")
    assert not spent.spend("d", "c")
    assert spent.spend("another", "c")


FINISH = 'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
HANDLE: dict[str, Any] = {"remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1", "text": '日本 "q"'}


def test_the_handle_goes_onto_the_finish_chunk() -> None:
    edited = with_handle(FINISH, HANDLE)
    assert edited is not None
    assert edited.startswith(FINISH[: -len("}\n\n")])
    assert json.loads(edited.removeprefix("data: "))["kv_transfer_params"] == HANDLE


@pytest.mark.parametrize(
    "chunk",
    [
        'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}\n\n',
        'data: {"choices":[],"usage":{"total_tokens":3}}\n\n',
        "data: [DONE]\n\n",
        'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""},"finish_reason":null}]}\n\n',
        'event: response.completed\ndata: {"finish_reason":"stop"}\n\n',
        "",
    ],
)
def test_other_chunks_are_left_alone(chunk: str) -> None:
    assert with_handle(chunk, HANDLE) is None


@given(text=st.text(), reason=st.sampled_from([None, "stop", "length", "tool_calls"]))
def test_generated_text_never_looks_like_a_finish(text: str, reason: str | None) -> None:
    for ascii_only in (True, False):
        body = {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}
        chunk = f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=ascii_only)}\n\n"
        edited = with_handle(chunk, HANDLE)
        assert (edited is None) == (reason is None)
        if edited is not None:
            assert json.loads(edited.removeprefix("data: ")) == {**body, "kv_transfer_params": HANDLE}


@given(text=st.text())
def test_the_handle_of_a_chunk_is_read_back(text: str) -> None:
    handle = {**HANDLE, "text": text, "remote_num_tokens": 2**63}
    edited = with_handle(FINISH, handle)
    assert edited is not None
    assert handle_of(edited) == handle


@given(text=st.text())
def test_generated_text_never_looks_like_a_handle(text: str) -> None:
    for content in (text, json.dumps({"kv_transfer_params": {"text": text}})):
        body = {"choices": [{"delta": {"content": content}, "finish_reason": None}]}
        assert handle_of(f"data: {json.dumps(body, separators=(',', ':'))}\n\n") is None


@pytest.mark.parametrize("chunk", ["data: [DONE]\n\n", "", 'data: {"kv_transfer_params":null}\n\n', FINISH])
def test_a_chunk_without_a_handle_gives_none(chunk: str) -> None:
    assert handle_of(chunk) is None


STOPPED = 'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{}}\n\n'


def test_the_handle_goes_onto_the_event_with_the_stop_reason() -> None:
    edited = message_with_handle(STOPPED, HANDLE)
    assert edited is not None
    assert edited.startswith(STOPPED[: -len("}\n\n")])
    assert json.loads(edited.removeprefix("event: message_delta\ndata: "))["kv_transfer_params"] == HANDLE


@given(text=st.text())
def test_no_other_event_of_a_message_takes_it(text: str) -> None:
    for kind in ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_stop"):
        body = {"type": kind, "delta": {"text": text + STOPPED}}
        for ascii_only in (True, False):
            event = f"event: {kind}\ndata: {json.dumps(body, separators=(',', ':'), ensure_ascii=ascii_only)}\n\n"
            assert message_with_handle(event, HANDLE) is None
    assert message_with_handle(STOPPED.removeprefix("event: message_delta\n"), HANDLE) is None


@pytest.mark.parametrize("text", ["0.29.0", "0.30.1", "0.33.1rc2", "0.33.0+cu130", "0.32.0.post1"])
def test_supported_versions_pass(text: str) -> None:
    assert compat.OLDEST <= compat.require_supported(text) <= compat.NEWEST


@pytest.mark.parametrize("text", ["0.28.1", "0.34.0", "0.34.0.dev12", "1.0.0", "0.3.0"])
def test_other_versions_are_refused_by_name(text: str) -> None:
    with pytest.raises(compat.UnsupportedVllm, match=f"vLLM {text} is not supported.*0.29 to 0.33"):
        compat.require_supported(text)


@pytest.mark.parametrize("text", ["dev", "", "v0.32"])
def test_an_unreadable_version_is_refused(text: str) -> None:
    with pytest.raises(compat.UnsupportedVllm, match="can't be read"):
        compat.require_supported(text)


@pytest.mark.parametrize(("text", "native"), [("0.29.0", False), ("0.32.9", False), ("0.33.0", True)])
def test_the_stream_needs_us_below_0_33(text: str, native: bool) -> None:
    assert compat.handle_in_stream(compat.parse_version(text)) is native


def test_hooks_that_moved_are_named() -> None:
    class Moved:
        def on_new_request(self, request: object, extra: object) -> None: ...

    found = compat.hook_faults(Moved, {"on_new_request": ("request",), "request_finished": ("request", "block_ids")})
    assert found == [
        "Moved.on_new_request takes request, extra instead of request",
        "Moved.request_finished does not exist",
    ]
    assert len(compat.state_faults(SimpleNamespace(block_size=16))) == len(compat.SCHEDULER_STATE) - 1


def test_a_release_notice_has_the_items_of_its_version() -> None:
    class Older:
        def add_new_req_to_recv(self, request_id: str, local_block_ids: object, kv_transfer_params: object) -> None: ...

    class Newer:
        def add_new_req_to_recv(self, request_id: str, local_block_ids: object, awaiting_kvs: bool) -> None: ...

    request = object()
    assert compat.release_notice(request, Older) == (request, [], ())
    assert compat.release_notice(request, Newer) == (request, [], (), False)


LOADING = (
    "I1130 04:20:10.1 9 nixl_plugin_manager.cpp:352] Failed to load plugin from /w/plugins/libplugin_LIBFABRIC.so: "
)
UNSUPPORTED = "\nE1130 04:20:10.2 9 nixl_agent.cpp:334] createBackend: unsupported backend 'LIBFABRIC'\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            f"{LOADING}libfabric.so.1: cannot open shared object file: No such file or directory{UNSUPPORTED}",
            "libfabric.so.1: cannot open shared object file: No such file or directory",
        ),
        (
            f"{LOADING}/lib/libfabric.so.1: version `FABRIC_1.10' not found{UNSUPPORTED}",
            "/lib/libfabric.so.1: version `FABRIC_1.10' not found",
        ),
        (
            "E libfabric_common.cpp:68] fi_getinfo failed No data available\n"
            "E backend_plugin.h:102] Failed to create engine: Failed to discover system topology\n"
            "E nixl_agent.cpp:342] createBackend: backend creation failed for 'LIBFABRIC'",
            "Failed to discover system topology (the libfabric provider named by FI_PROVIDER found no device)",
        ),
        (UNSUPPORTED, "unsupported backend 'LIBFABRIC'"),
        ("no plugin for LIBFABRIC; plugins found: UCX", "no plugin for LIBFABRIC; plugins found: UCX"),
        (
            "Traceback\n  File x\nModuleNotFoundError: No module named 'nixl'",
            "ModuleNotFoundError: No module named 'nixl'",
        ),
        ("Killed\n\n", "Killed"),
        ("", "NIXL said nothing"),
    ],
)
def test_the_real_reason_is_found(output: str, expected: str) -> None:
    assert failure_reason(output, "LIBFABRIC") == expected


def test_another_plugins_failure_is_not_the_reason() -> None:
    output = f"Failed to load plugin from /w/libplugin_GDS.so: libcufile.so.0: missing{UNSUPPORTED}"
    assert failure_reason(output, "LIBFABRIC") == "unsupported backend 'LIBFABRIC'"


@pytest.mark.parametrize(
    ("provider", "wanted", "fault"),
    [("efa", None, False), ("efa", "efa", False), ("tcp", None, True), ("tcp", "efa", True), ("tcp", "tcp", False)],
)
def test_a_silent_fallback_is_a_fault(provider: str, wanted: str | None, fault: bool) -> None:
    output = f"I libfabric_rail_manager.cpp:232] Created 1 rails using provider={provider}\n"
    assert bool(network_fault(output, wanted)) is fault
    assert network_fault("Backend UCX was instantiated", wanted) is None


def test_the_self_test_prints_one_line_per_check() -> None:
    shown = lines([Check("vLLM", "0.32.0"), Check("backend", fault="no device")])
    assert shown == ["ok    vLLM     0.32.0", "FAIL  backend  no device", "self-test: 1 of 2 checks failed"]
    assert lines([Check("a")])[-1] == "self-test: all 1 checks passed"
