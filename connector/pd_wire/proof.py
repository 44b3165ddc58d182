"""The proof: fingerprints of the tokens in a holder's blocks, carried in the handle and checked by the reader.

D→P reads are positional and vLLM never compares tokens, so a wrong handle is a fluent wrong answer. The holder (D)
therefore fingerprints the tokens of every *whole* block that it retains; the reader (P) fingerprints its own prompt the
same way and keeps the leading blocks that agree.

Format, as it stands in the handle under ``pd_proof``::

    {"v": 1, "block_tokens": 128, "key": "<base64, 16 bytes>", "fp": "<base64, 8 bytes per block>",
     "tail_tokens": 17, "tail_fp": "<base64, 8 bytes>"}

* Chained: fingerprint *i* covers the scope and all tokens of blocks ``0..i``, so equality at *i* implies an equal
  prefix.
* Keyed: the key is drawn once per engine start. A client never sees a handle, so it cannot search for two texts
  with the same fingerprints.
* Tail: tokens of the last block when it is not full; both keys are absent otherwise. A reader that may trim ignores it;
  one that must take all or nothing (several KV groups) needs it.
* Scope: bytes for everything besides token ids that changes the KV of a block (adapter, cache salt). Each side computes
  it from its own request.

This module does no I/O and draws no randomness: the key is an argument.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

VERSION: Final = 1
KEY_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 8
MAX_BLOCKS: Final = 1 << 20


class ProofError(ValueError):
    """A proof that cannot be read. The reader treats it as "nothing is proven", never as a crash."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A parsed proof. ``fingerprints`` is the concatenation of ``FINGERPRINT_BYTES`` per whole block."""

    block_tokens: int
    key: bytes
    fingerprints: bytes
    tail_tokens: int = 0
    tail: bytes = b""

    @property
    def blocks(self) -> int:
        """Number of whole blocks covered."""
        return len(self.fingerprints) // FINGERPRINT_BYTES

    @property
    def tokens(self) -> int:
        """Number of tokens covered, the tail included."""
        return self.blocks * self.block_tokens + self.tail_tokens


def fingerprint_blocks(tokens: Sequence[int], block_tokens: int, key: bytes, scope: bytes = b"") -> bytes:
    """Fingerprint the whole blocks of ``tokens``.

    Args:
        tokens: token ids, each in ``[0, 2**31)``; a trailing part of a block is not covered.
        block_tokens: tokens per block, at least 1.
        key: ``KEY_BYTES`` bytes.
        scope: what besides the ids shapes the KV; part of every fingerprint.

    Returns:
        ``FINGERPRINT_BYTES * (len(tokens) // block_tokens)`` bytes.

    Raises:
        ValueError: for a bad block size or key length.
    """
    chained, _ = _fingerprints(tokens, block_tokens, key, scope)
    return chained


def prove(tokens: Sequence[int], block_tokens: int, key: bytes, scope: bytes = b"") -> Proof:
    """The proof for a holder whose blocks hold exactly ``tokens``; same arguments as `fingerprint_blocks`.

    Raises:
        ValueError: for a bad block size or key length.
    """
    chained, tail = _fingerprints(tokens, block_tokens, key, scope)
    return Proof(block_tokens, key, chained, len(tokens) % block_tokens, tail)


def covers_all(proof: Proof, tokens: Sequence[int], scope: bytes = b"") -> bool:
    """Whether ``tokens`` starts with every token that the proof covers, the tail included."""
    if len(tokens) < proof.tokens:
        return False
    mine = prove(tokens[: proof.tokens], proof.block_tokens, proof.key, scope)
    return (mine.fingerprints, mine.tail) == (proof.fingerprints, proof.tail)


def matching_blocks(proof: Proof, tokens: Sequence[int], scope: bytes = b"") -> int:
    """Number of leading whole blocks of ``tokens`` that the proof vouches for."""
    mine = fingerprint_blocks(tokens[: proof.blocks * proof.block_tokens], proof.block_tokens, proof.key, scope)
    theirs = proof.fingerprints
    size = FINGERPRINT_BYTES
    # The chain makes agreement a prefix property, so the last agreeing block can be found from the front.
    limit = min(len(mine), len(theirs))
    if mine[:limit] == theirs[:limit]:
        return limit // size
    count = 0
    while mine[count * size : (count + 1) * size] == theirs[count * size : (count + 1) * size]:
        count += 1
    return count


def encode(proof: Proof) -> dict[str, Any]:
    """The JSON value that goes under ``pd_proof``."""
    value: dict[str, Any] = {
        "v": VERSION,
        "block_tokens": proof.block_tokens,
        "key": base64.b64encode(proof.key).decode("ascii"),
        "fp": base64.b64encode(proof.fingerprints).decode("ascii"),
    }
    if proof.tail_tokens:
        value["tail_tokens"] = proof.tail_tokens
        value["tail_fp"] = base64.b64encode(proof.tail).decode("ascii")
    return value


def decode(value: Any) -> Proof:
    """Parse what stands under ``pd_proof``.

    Raises:
        ProofError: naming the field that is wrong. Never any other error, whatever the value is.
    """
    if not isinstance(value, Mapping):
        raise ProofError(f"proof must be an object, got {type(value).__name__}")
    if value.get("v") != VERSION:
        raise ProofError(f"v must be {VERSION}, got {value.get('v')!r}")
    block_tokens = value.get("block_tokens")
    if not isinstance(block_tokens, int) or isinstance(block_tokens, bool) or not 1 <= block_tokens <= 65536:
        raise ProofError(f"block_tokens must be an integer from 1 to 65536, got {block_tokens!r}")
    key = _base64_field(value, "key")
    if len(key) != KEY_BYTES:
        raise ProofError(f"key must be {KEY_BYTES} bytes, got {len(key)}")
    fingerprints = _base64_field(value, "fp")
    if len(fingerprints) % FINGERPRINT_BYTES or len(fingerprints) > MAX_BLOCKS * FINGERPRINT_BYTES:
        raise ProofError(f"fp must be {FINGERPRINT_BYTES} bytes per block for at most {MAX_BLOCKS} blocks")
    tail_tokens = value.get("tail_tokens", 0)
    if not isinstance(tail_tokens, int) or isinstance(tail_tokens, bool) or not 0 <= tail_tokens < block_tokens:
        raise ProofError(f"tail_tokens must be an integer from 0 to block_tokens - 1, got {tail_tokens!r}")
    tail = _base64_field(value, "tail_fp") if tail_tokens else b""
    if tail_tokens and len(tail) != FINGERPRINT_BYTES:
        raise ProofError(f"tail_fp must be {FINGERPRINT_BYTES} bytes, got {len(tail)}")
    return Proof(block_tokens, key, fingerprints, tail_tokens, tail)


def _fingerprints(tokens: Sequence[int], block_tokens: int, key: bytes, scope: bytes) -> tuple[bytes, bytes]:
    """Fingerprints of the whole blocks, and of the tail (empty when the last block is full)."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key must be {KEY_BYTES} bytes, got {len(key)}")
    ids = array("i", tokens[:])
    if ids.itemsize != 4:  # pragma: no cover - every platform that vLLM supports has 4-byte ints
        ids = array("l", ids)
    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    raw = memoryview(ids.tobytes())
    chain = hashlib.blake2b(len(scope).to_bytes(8, "little") + scope, key=key, digest_size=FINGERPRINT_BYTES)
    step = block_tokens * 4
    whole = len(raw) // step * step
    out = bytearray()
    for start in range(0, whole, step):
        chain.update(raw[start : start + step])
        out += chain.digest()
    if whole == len(raw):
        return bytes(out), b""
    chain.update(raw[whole:])
    return bytes(out), chain.digest()


def _base64_field(value: Mapping[str, Any], name: str) -> bytes:
    text = value.get(name)
    if not isinstance(text, str):
        raise ProofError(f"{name} must be a base64 string, got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProofError(f"{name} is not base64") from error
