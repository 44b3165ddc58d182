"""What is written in a shared store, and that anything else found there is refused and raises nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.linking import Keyring
from pd_router.core.store_value import DamagedEntry, Seal, key_name, prefix, read_entry, write_entry
from unit.router.store_behaviour import PROCESS, entry, handle

NAME = key_name(b"h" + b"1" * 16)
OTHER = key_name(b"0" + b"2" * 16)
SEAL = Keyring(b"the routers' key of 32 characters").seal


def no_seal(_data: bytes) -> bytes:
    """For what the seal would hide: that each field is looked at all the same."""
    return b"seal"


def written(seal: Seal = no_seal, names: Sequence[bytes] = (NAME,)) -> bytes:
    return write_entry(entry(7), list(names), 3, 1000, 900, "me", seal)


def test_an_entry_comes_back() -> None:
    text = json.dumps(handle(x=[1, {"ü": "🙂\n"}]), indent=1, ensure_ascii=False).encode()
    kept = entry(7)
    kept.raw, kept.inexact, kept.behind = text, "edited", 4
    found = read_entry(write_entry(kept, [OTHER, NAME], 3, 1000, 900, "me", SEAL), NAME, SEAL)
    assert found.handle.raw == text
    assert found.handle["x"] == [1, {"ü": "🙂\n"}]
    assert (found.holder, found.identity, found.generation) == ("d1", PROCESS, "g")
    assert (found.inexact, found.behind, found.writer) == ("edited", 4, "me")


def test_the_first_line_is_for_the_scripts() -> None:
    assert written().split(b"\n")[0] == b"1|3|1000|900|hMTExMTExMTExMTExMTExMQ"


def test_nobody_else_can_write_an_entry_or_change_one() -> None:
    value = written(SEAL)
    assert read_entry(value, NAME, SEAL).holder == "d1"
    for at in range(len(value)):
        changed = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        with pytest.raises(DamagedEntry):
            read_entry(changed, NAME, SEAL)
    with pytest.raises(DamagedEntry, match="no router with this key"):
        read_entry(value, NAME, Keyring(b"another key of some 32 characters").seal)


def test_an_entry_counts_under_its_own_keys_only() -> None:
    value = written(SEAL, [NAME, OTHER])
    for name in (NAME, OTHER):
        assert read_entry(value, name, SEAL).holder == "d1"
    with pytest.raises(DamagedEntry, match="under a key that is not its own"):
        read_entry(value, key_name(b"h" + b"2" * 16), SEAL)


def test_a_seal_is_no_key() -> None:
    ring = Keyring(b"the routers' key of 32 characters")
    assert ring.seal(b"x") != Keyring(b"another key of some 32 characters").seal(b"x")
    assert ring.seal(b"1:t1:sh" + b"x") not in ring.key("t", b"s", "history", b"x").hex().encode()


@given(st.binary())
def test_noise_is_refused(value: bytes) -> None:
    with pytest.raises(DamagedEntry):
        read_entry(value, NAME, SEAL)


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_a_value_with_other_bytes_in_it_is_an_entry_or_refused(at: int, noise: bytes) -> None:
    value = written()
    try:
        found = read_entry(value[:at] + noise + value[at + len(noise) :], NAME, no_seal)
    except DamagedEntry:
        return
    assert isinstance(found.holder, str)
    assert type(found.behind) is int


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"holder":"d1"', b'"holder":1'),
        (b'"holder":"d1"', b'"other":"d1"'),
        (b'"identity":"uid/start"', b'"identity":null'),
        (b'"inexact":null', b'"inexact":[]'),
        (b'"behind":0', b'"behind":-1'),
        (b'"behind":0', b'"behind":true'),
        (b'"remote_block_ids":[[1,2]]', b'"remote_block_ids":[1,2]'),
        (b'"remote_host":"10.0.0.1"', b'"remote_host":"a b"'),
        (b'"do_remote_decode":true', b'"do_remote_decode":1'),
    ],
    ids=lambda value: value.decode(),
)
def test_a_field_of_another_kind_is_refused(old: bytes, new: bytes) -> None:
    value = written()
    assert value.count(old) == 1
    with pytest.raises(DamagedEntry):
        read_entry(value.replace(old, new), NAME, no_seal)


def test_prefixes_differ_by_deployment_and_server() -> None:
    found = {prefix(realm, run) for realm in ("", "a/b", "a/bc") for run in ("", "c", "run")}
    assert len(found) == 9
    assert all(one.startswith(b"pd:") and one.endswith(b":") and len(one) == 16 for one in found)
