"""Refused configurations: each with a sentence that says what to change, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.core.startup import Configuration, HandleInStream, configuration_faults
from pd_wire import names

GOOD = Configuration(
    connector="PDConnector",
    role="kv_consumer",
    engine_id="609b80e0-9261-4a1e-8113-fa0b7b619496_dp3",
    buffer_device="cuda",
    device="cuda",
    extra={
        "backends": ["LIBFABRIC"],
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": 480,
        "kv_recompute_threshold": 64,
    },
    stream=HandleInStream.PATCHED,
)


def faults(**changes: Any) -> list[str]:
    return configuration_faults(replace(GOOD, **changes))


def with_extra(**changes: Any) -> list[str]:
    return faults(extra={**GOOD.extra, **changes})


def test_a_good_configuration_starts() -> None:
    assert faults() == []
    assert faults(role="kv_producer", stream=HandleInStream.UNKNOWN) == []
    assert faults(device="cpu", buffer_device="cpu") == []
    assert faults(extra={}) == []


@given(st.uuids(version=4), st.sampled_from(["", "_dp0", "_dp12"]))
def test_ids_that_vllm_draws_are_accepted(drawn: UUID, rank: str) -> None:
    assert faults(engine_id=f"{drawn}{rank}") == []


@pytest.mark.parametrize("fixed", ["decode-1", "", "1", "609b80e0-9261-1a1e-8113-fa0b7b619496"])
def test_a_fixed_engine_id_is_refused(fixed: str) -> None:
    (fault,) = faults(engine_id=fixed)
    assert "remove it" in fault


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("bidirectional_kv_transfer", "bidirectional_kv_xfer"),
        ("bidirectional", "bidirectional_kv_xfer"),
        ("decoder_kv_block_ttl", "decoder_kv_blocks_ttl"),
        ("recompute_threshold", "kv_recompute_threshold"),
        ("backend", "backends"),
        ("engine_TTL", "engine_ttl"),
    ],
)
def test_a_misspelt_key_names_the_nearest(key: str, near: str) -> None:
    (fault,) = with_extra(**{key: 1})
    assert f"kv_connector_extra_config.{key} is unknown" in fault
    assert f"did you mean {near}?" in fault


def test_a_key_far_from_all_lists_them() -> None:
    (fault,) = with_extra(zzz=1)
    assert all(key in fault for key in names.EXTRA_CONFIG_KEYS)


def test_push_is_refused() -> None:
    (fault,) = faults(connector="NixlPushConnector")
    assert "pull mode" in fault
    (fault,) = with_extra(push_registration_timeout=3)
    assert "only pull is supported" in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bidirectional_kv_xfer", "true"),
        ("bidirectional_kv_xfer", 1),
        ("enforce_handshake_compat", "no"),
        ("kv_recompute_threshold", -1),
        ("kv_recompute_threshold", "64"),
        ("kv_recompute_threshold", True),
        ("decoder_kv_blocks_ttl", 5),
        ("decoder_kv_blocks_ttl", "480"),
        ("decoder_kv_blocks_ttl", float("nan")),
        ("decoder_kv_blocks_ttl", float("inf")),
        ("backends", "UCX"),
        ("backends", []),
        ("backends", [None]),
    ],
)
def test_a_value_that_vllm_would_misread_is_refused(key: str, value: object) -> None:
    (fault,) = with_extra(**{key: value})
    assert f"kv_connector_extra_config.{key}" in fault
    assert repr(value) in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("pd_lease_seconds", value) for value in (0, -1, 3601, 60.0, "60", True, None)),
        *(("pd_lease_share", value) for value in (0, 1, 1.5, -0.5, float("nan"), "0.5", True, None)),
    ],
)
def test_a_lease_option_out_of_range_is_refused(key: str, value: object) -> None:
    (fault,) = with_extra(pd_retention="Leased", **{key: value})
    assert f"kv_connector_extra_config.{key} must be" in fault
    assert repr(value) in fault


def test_lease_options_need_leases() -> None:
    options = {"pd_lease_seconds": 3600, "pd_lease_share": 0.9}
    assert with_extra(pd_retention="Leased", **options) == []
    for other in ({}, {"pd_retention": "Unpinned"}, {"pd_retention": "Pinned"}):
        assert len(with_extra(**options, **other)) == 2
        (fault,) = with_extra(pd_lease_share=0.5, **other)
        assert "means nothing without pd_retention Leased" in fault
    (fault,) = with_extra(pd_retention="Lease")
    assert "Unpinned or Pinned or Leased" in fault


def test_a_host_buffer_can_not_read_back() -> None:
    (fault,) = faults(buffer_device="cpu")
    assert "set kv_buffer_device to cuda" in fault
    assert faults(buffer_device="cpu", extra={"bidirectional_kv_xfer": False}) == []


def test_a_missing_stream_patch_stops_a_decode_engine() -> None:
    (fault,) = faults(stream=HandleInStream.MISSING)
    assert "streamed answers would carry no handle" in fault
    assert faults(stream=HandleInStream.MISSING, role="kv_producer") == []
    assert faults(stream=HandleInStream.MISSING, extra={"bidirectional_kv_xfer": False}) == []


def test_without_the_patch_of_messages_alone_an_engine_starts() -> None:
    assert faults(stream=HandleInStream.NOT_IN_MESSAGES) == []


def test_another_frontend_can_not_be_patched() -> None:
    (fault,) = faults(rust_frontend=True)
    assert "VLLM_USE_RUST_FRONTEND" in fault
    for stream in (HandleInStream.NATIVE, HandleInStream.NOT_IN_MESSAGES):
        assert faults(rust_frontend=True, stream=stream) == []


@pytest.mark.parametrize("role", [None, "kv_both", "prefill"])
def test_the_role_must_be_one_of_two(role: str | None) -> None:
    (fault,) = faults(role=role)
    assert "kv_producer or kv_consumer" in fault


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*"])
def test_peers_can_not_dial_any_address(host: str) -> None:
    (fault,) = faults(side_channel_host=host)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in fault
    assert faults(side_channel_host="10.0.3.17") == []


def test_all_faults_come_at_once() -> None:
    found = faults(role="kv_both", engine_id="x", extra={"bckends": [], "backends": [], "decoder_kv_blocks_ttl": 0})
    assert len(found) == 5
