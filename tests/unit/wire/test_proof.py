"""The proof: two sides agree on exactly the leading blocks whose tokens are equal."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_wire import proof

KEY = bytes(range(16))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)
SIZES = st.integers(1, 9)


@given(tokens=TOKENS, size=SIZES)
def test_a_proof_survives_the_wire(tokens: list[int], size: int) -> None:
    shown = proof.prove(tokens, size, KEY, b"scope")
    assert proof.decode(json.loads(json.dumps(proof.encode(shown)))) == shown
    assert shown.tokens == len(tokens)
    assert shown.blocks == len(tokens) // size


@given(common=TOKENS, theirs=TOKENS, mine=TOKENS, size=SIZES)
def test_matching_blocks_are_the_common_whole_blocks(
    common: list[int], theirs: list[int], mine: list[int], size: int
) -> None:
    there, here = common + theirs, common + mine
    shown = proof.prove(there, size, KEY)
    equal = 0
    while equal < min(len(there), len(here)) and there[equal] == here[equal]:
        equal += 1
    assert proof.matching_blocks(shown, here) == equal // size


@given(tokens=TOKENS, more=TOKENS, size=SIZES)
def test_an_extension_is_covered_whole(tokens: list[int], more: list[int], size: int) -> None:
    assert proof.covers_all(proof.prove(tokens, size, KEY), tokens + more)


@given(tokens=st.lists(st.integers(0, 99), min_size=1, max_size=40), at=st.integers(0, 39), size=SIZES)
def test_one_changed_token_is_not_covered(tokens: list[int], at: int, size: int) -> None:
    at %= len(tokens)
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    shown = proof.prove(tokens, size, KEY)
    assert not proof.covers_all(shown, changed)
    assert proof.matching_blocks(shown, changed) == at // size


def test_a_shorter_prompt_is_not_covered() -> None:
    shown = proof.prove(range(10), 4, KEY)
    assert not proof.covers_all(shown, range(9))
    assert proof.matching_blocks(shown, range(9)) == 2
    assert proof.matching_blocks(shown, range(7)) == 1


@pytest.mark.parametrize(("key", "scope"), [(bytes(16), b""), (KEY, b"adapter"), (KEY, b"\0")])
def test_another_key_or_scope_matches_nothing(key: bytes, scope: bytes) -> None:
    shown = proof.prove(range(40), 8, KEY)
    other = proof.Proof(8, key, shown.fingerprints, shown.tail_tokens, shown.tail)
    assert proof.matching_blocks(other, range(40), scope) == 0
    assert not proof.covers_all(other, range(40), scope)


def test_scope_and_tokens_do_not_run_into_each_other() -> None:
    # A scope that holds the bytes of the first token must not stand for that token.
    assert proof.fingerprint_blocks([7], 1, KEY) != proof.fingerprint_blocks([], 1, KEY, (7).to_bytes(4, "little"))
    inside = proof.fingerprint_blocks([7, 7], 1, KEY)
    scoped = proof.fingerprint_blocks([7], 1, KEY, (7).to_bytes(4, "little"))
    assert scoped not in (inside[:8], inside[8:])


def test_equal_blocks_at_other_positions_have_other_fingerprints() -> None:
    chained = proof.fingerprint_blocks([5] * 6, 2, KEY)
    assert len({chained[:8], chained[8:16], chained[16:]}) == 3


def test_bad_sizes_and_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        proof.prove([1], 0, KEY)
    with pytest.raises(ValueError, match="key must be 16 bytes"):
        proof.fingerprint_blocks([1], 1, b"short")


GOOD = proof.encode(proof.prove(range(20), 8, KEY))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "must be an object"),
        ([], "must be an object"),
        ({}, "v must be 1"),
        ({**GOOD, "v": 2}, "v must be 1"),
        ({**GOOD, "block_tokens": 0}, "block_tokens"),
        ({**GOOD, "block_tokens": True}, "block_tokens"),
        ({**GOOD, "block_tokens": "8"}, "block_tokens"),
        ({**GOOD, "key": "AAAA"}, "key must be 16 bytes"),
        ({**GOOD, "key": 7}, "key must be a base64 string"),
        ({**GOOD, "fp": "not base64!"}, "fp is not base64"),
        ({**GOOD, "fp": "AAAA"}, "fp must be 8 bytes per block"),
        ({**GOOD, "fp": "é"}, "fp is not base64"),
        ({**GOOD, "tail_tokens": 8}, "tail_tokens"),
        ({**GOOD, "tail_tokens": -1}, "tail_tokens"),
        ({**GOOD, "tail_fp": "AAAA"}, "tail_fp must be 8 bytes"),
        ({**GOOD, "tail_fp": None}, "tail_fp must be a base64 string"),
    ],
)
def test_what_can_not_be_read_is_named(value: object, words: str) -> None:
    with pytest.raises(proof.ProofError, match=words):
        proof.decode(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*GOOD, "other"]), inner),
    )
)
def test_anything_else_is_a_proof_error_or_a_proof(value: object) -> None:
    with contextlib.suppress(proof.ProofError):
        assert isinstance(proof.decode(value), proof.Proof)
