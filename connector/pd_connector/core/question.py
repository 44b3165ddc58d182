"""The question "which of these blocks are intact?" and its answer, as bytes on the side channel.

Separate from the sockets so that every malformed message can be tested. The side channel is a plain port: whatever
arrives there must neither stop the listener nor tell anything to somebody who does not hold a handle. So a question
names the engine that it is for and an epoch that only handles carry, and the answer to any other is the same as for
blocks that are gone.

Layout, little endian: ``PDQ1``, 8 bytes of epoch, u64 count, u16 length and the engine id in UTF-8, u32 number of
blocks and as many u32. Answer: ``PDA1``, u32.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pd_wire.moment import MAX_COUNT, Moment

QUESTION: Final = b"PDQ1"
ANSWER: Final = b"PDA1"
MAX_BLOCKS: Final = 1 << 20
_HEAD: Final = struct.Struct("<4s8sQH")
_NUMBER: Final = struct.Struct("<I")


class Unreadable(ValueError):
    """A message that is not ours, or cut or bent."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which of the leading ``blocks`` of ``engine`` are as they were at ``moment``?"""

    engine: str
    moment: Moment
    blocks: Sequence[int]

    def encode(self) -> bytes:
        """The message.

        Raises:
            ValueError: when a part does not fit its field; an admitted handle always fits.
        """
        name = self.engine.encode()
        if len(self.blocks) > MAX_BLOCKS:
            raise ValueError(f"at most {MAX_BLOCKS} blocks can be asked for, got {len(self.blocks)}")
        try:
            head = _HEAD.pack(QUESTION, bytes.fromhex(self.moment.epoch), self.moment.count, len(name))
            return head + name + _NUMBER.pack(len(self.blocks)) + _to_bytes(self.blocks)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"the question does not fit: {error}") from error


def is_question(message: bytes) -> bool:
    """Whether the message claims to be one."""
    return message.startswith(QUESTION)


def decode(message: bytes) -> Question:
    """Read a question.

    Raises:
        Unreadable: whatever else ``message`` is.
    """
    if len(message) < _HEAD.size:
        raise Unreadable("the message ends in its head")
    mark, epoch, count, length = _HEAD.unpack_from(message)
    start = _HEAD.size + length + _NUMBER.size
    if mark != QUESTION or count > MAX_COUNT or len(message) < start:
        raise Unreadable("the message has no head of a question")
    (number,) = _NUMBER.unpack_from(message, start - _NUMBER.size)
    if number > MAX_BLOCKS or len(message) != start + number * _NUMBER.size:
        raise Unreadable("the message's length is not that of its blocks")
    try:
        engine = message[_HEAD.size : _HEAD.size + length].decode()
    except UnicodeDecodeError as error:
        raise Unreadable("the engine id is not text") from error
    return Question(engine, Moment(epoch.hex(), count), _from_bytes(message[start:]))


def encode_answer(intact: int) -> bytes:
    """The message that says how many leading blocks are intact."""
    return ANSWER + _NUMBER.pack(intact)


def decode_answer(message: bytes, asked: int) -> int:
    """Read an answer to a question about ``asked`` blocks.

    Raises:
        Unreadable: when it is none, or claims more blocks than were asked for.
    """
    if len(message) != len(ANSWER) + _NUMBER.size or not message.startswith(ANSWER):
        raise Unreadable("the message is no answer")
    (intact,) = _NUMBER.unpack_from(message, len(ANSWER))
    if intact > asked:
        raise Unreadable(f"the answer claims {intact} of {asked} blocks")
    return int(intact)


def _to_bytes(numbers: Sequence[int]) -> bytes:
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _from_bytes(data: bytes) -> Sequence[int]:
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
