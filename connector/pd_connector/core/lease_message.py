"""A batch of new ends for leases and its answer, as bytes on the side channel.

The engine's API server takes such batches from routers and passes them on to the thread that answers on the side
channel, because that one is never busy with a step. The side channel is a plain port, so whatever arrives there must be
dealt with: who does not know a token changes nothing, and learns as much as about one that never was.

Layout, little endian: ``PDL1``, u16 number of items, and per item 16 bytes of token and u16 seconds. Answer: ``PDM1``,
u16 number, u8 1 where the batch has ended a lease that was held (0 otherwise), and u16 seconds left per item, in the
same order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pd_connector.core.question import Unreadable
from pd_wire.lease import MAX_BATCH, MAX_SECONDS, TOKEN_DIGITS

CHANGE: Final = b"PDL1"
ANSWER: Final = b"PDM1"
_HEAD: Final = struct.Struct("<4sH")
_ANSWER_HEAD: Final = struct.Struct("<4sH?")
_ITEM: Final = struct.Struct(f"<{TOKEN_DIGITS // 2}sH")


@dataclass(frozen=True, slots=True)
class NewEnd:
    """The lease ``token`` shall end ``seconds`` from now; 0 ends it."""

    token: str
    seconds: int


def is_change(message: bytes) -> bool:
    """Whether the message claims to be a batch."""
    return message.startswith(CHANGE)


def encode(batch: Sequence[NewEnd]) -> bytes:
    """The message; ``batch`` has been checked by `core.lease_request`."""
    items = b"".join(_ITEM.pack(bytes.fromhex(item.token), item.seconds) for item in batch)
    return _HEAD.pack(CHANGE, len(batch)) + items


def decode(message: bytes) -> list[NewEnd]:
    """Read a batch.

    Raises:
        Unreadable: whatever else ``message`` is.
    """
    if len(message) < _HEAD.size:
        raise Unreadable("the message ends in its head")
    mark, number = _HEAD.unpack_from(message)
    if mark != CHANGE or not 1 <= number <= MAX_BATCH:
        raise Unreadable("the message has no head of a batch")
    if len(message) != _HEAD.size + number * _ITEM.size:
        raise Unreadable("the message's length is not that of its items")
    batch = [NewEnd(token.hex(), seconds) for token, seconds in _ITEM.iter_unpack(message[_HEAD.size :])]
    if any(item.seconds > MAX_SECONDS for item in batch):
        raise Unreadable(f"a lease would hold for more than {MAX_SECONDS} seconds")
    return batch


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a batch."""

    left: list[int]
    """Seconds that are left of each lease; 0 for those that are not held."""
    ended: bool = False
    """A lease that was held is over now: the engine has to take a step to give its blocks back."""


def encode_answer(answer: Answer) -> bytes:
    """The message that says what became of a batch."""
    head = _ANSWER_HEAD.pack(ANSWER, len(answer.left), answer.ended)
    return head + struct.pack(f"<{len(answer.left)}H", *answer.left)


def decode_answer(message: bytes, asked: int) -> Answer:
    """Read the answer to a batch of ``asked`` items.

    Raises:
        Unreadable: when it is none, or one to another batch.
    """
    if len(message) != _ANSWER_HEAD.size + 2 * asked:
        raise Unreadable("the message's length is not that of an answer to this batch")
    mark, number, ended = _ANSWER_HEAD.unpack_from(message)
    if (mark, number) != (ANSWER, asked):
        raise Unreadable("the message is no answer to this batch")
    return Answer(list(struct.unpack_from(f"<{asked}H", message, _ANSWER_HEAD.size)), ended)
