"""Bytes made worse: the same for all targets, from a seeded generator, so that a number is enough to make one again."""

from __future__ import annotations

import random
from collections.abc import Sequence

TOKENS = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\r\r", b"\0", b" ", b"\t", b"\x0b", b"\x7f", b"\x80", b"\xff"),
    *(b":", b";", b",", b"=", b'"', b"\\", b"{", b"}", b"[", b"]", b"0", b"-", b"+", b"0x", b"ffffffffffffffff"),
    *(b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\\u0000", b"\\ud800", b"\\u006b", b"null", b"NaN", b"1e999"),
)
"""Texts that mean something to HTTP, to event streams or to JSON."""


def mutate(rng: random.Random, data: bytes, tokens: Sequence[bytes] = TOKENS, most: int = 5) -> bytes:
    """Change `data` in up to ``most`` places; at times not at all."""
    changed = bytearray(data)
    for _ in range(rng.randrange(most + 1)):
        at = rng.randrange(len(changed) + 1)
        to = min(len(changed), at + rng.choice((1, 1, 2, 5, 20)))
        match rng.randrange(6):
            case 0:
                changed[at:to] = b""
            case 1:
                changed[at:at] = rng.choice(tokens)
            case 2:
                changed[at:to] = rng.choice(tokens)
            case 3:
                changed[at:at] = changed[at:to] * rng.choice((1, 2, 9))
            case 4 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case _:
                other = rng.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + rng.randrange(40)]
    return bytes(changed)


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut `data` as a network might: whole, in two, in many, or byte by byte for a while."""
    match rng.randrange(4):
        case 0:
            cuts = [1]
        case 1:
            cuts = [rng.randrange(len(data) + 1)]
        case 2:
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 12)))
        case _:
            near = rng.randrange(len(data) + 1)
            cuts = list(range(max(1, near - 30), min(len(data), near + 30)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
