"""What a legal promise in a handle is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_wire import lease
from pd_wire.handle import decoder_handle_fault, is_unpinned
from pd_wire.lease import Lease

TOKEN = "0123456789abcdef" * 2
HANDLE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [[10, 11]],
    "remote_engine_id": "holder",
    "remote_request_id": "turn",
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "remote_num_tokens": 30,
    "pd_mode": "Leased",
    "pd_moment": "0123456789abcdef-0",
}


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, lease.MAX_SECONDS))
def test_a_lease_is_read_as_it_was_written(token: str, seconds: int) -> None:
    assert lease.parse(str(Lease(token, seconds))) == Lease(token, seconds)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", 7, TOKEN, f"{TOKEN}-", f"{TOKEN}-0", f"{TOKEN}-060", f"{TOKEN}-3601", f"{TOKEN}-99999"),
        *(f"{TOKEN}-60\n", f"{TOKEN}-6e1", f"{TOKEN}--60", f"{TOKEN}-٦٠", f"{TOKEN[1:]}-60", f"{TOKEN.upper()}-60"),
    ],
)
def test_anything_else_is_none(value: object) -> None:
    assert lease.parse(value) is None


def test_a_leased_handle_needs_its_moment_and_may_lack_its_lease() -> None:
    for good in (HANDLE, {**HANDLE, "pd_lease": f"{TOKEN}-60"}, {**HANDLE, "pd_lease": None}):
        assert is_unpinned(good)
        assert decoder_handle_fault(good) is None
    for key, value in (("pd_moment", None), ("pd_lease", f"{TOKEN}-0"), ("pd_lease", "")):
        assert str(decoder_handle_fault({**HANDLE, key: value})).startswith(key)
