"""How the processes of one router talk: messages on a socket pair, and how an entry of the handle store is written.

Separate from the channel that carries them because what is on the wire is decided here and can be tested without one.
A message is two lengths, a JSON list and bytes. Both ends are of one program and one start, so there are no versions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

import orjson

from pd_router.core.store import Entry

_HEAD: Final = struct.Struct("!BII")
MAX_BYTES: Final = 1 << 30
"""Of one message's parts; more is not a message."""


class Kind(IntEnum):
    """What the sender expects."""

    ASK = 0
    """An answer. Answers come in the order of the questions."""
    ANSWER = 1
    FAILED = 2
    """An answer: the other side could not find one."""
    TELL = 3


class Message(NamedTuple):
    """One message. `words`: of a question the verb and its arguments, else a list of values."""

    kind: Kind
    words: list[Any]
    raw: bytes


def write(kind: Kind, words: Sequence[Any], raw: bytes = b"") -> bytes:
    """One message. Raises TypeError for words that are no JSON; see `plain`."""
    text = orjson.dumps(words)
    return _HEAD.pack(kind, len(text), len(raw)) + text + raw


@dataclass(slots=True)
class Reader:
    """Bytes as they come → messages."""

    _held: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that is complete now.

        Raises:
            ValueError: what came is no message; the rest cannot be read either.
        """
        held = self._held
        held += data
        start = 0
        try:
            while len(held) - start >= _HEAD.size:
                kind, words, raw = _HEAD.unpack_from(held, start)
                if words > MAX_BYTES or raw > MAX_BYTES:
                    raise ValueError("a message between the processes of the router is longer than any can be")
                begin = start + _HEAD.size
                end = begin + words + raw
                if len(held) < end:
                    return
                start = end
                view = bytes(held[begin:end])
                yield Message(Kind(kind), orjson.loads(view[:words]), view[words:])
        finally:
            del held[:start]


def plain(text: str) -> str:
    """A text that JSON can hold: another one for each, lone surrogates included."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")


def write_keys(keys: Sequence[bytes]) -> list[str]:
    """Store keys as texts."""
    return [key.decode("latin-1") for key in keys]


def read_keys(words: Sequence[str]) -> list[bytes]:
    """What `write_keys` wrote."""
    return [word.encode("latin-1") for word in words]


_OWN: Final = frozenset({"raw", "keys", "incarnation", "ticket"})
"""Fields that do not travel in words. An incarnation is one process's count; each asks its own fleet anew."""
_FIELDS: Final = tuple(one.name for one in fields(Entry) if one.name not in _OWN)
_values_of: Final = attrgetter(*_FIELDS)


def write_entry(entry: Entry) -> list[Any]:
    """All of an entry but its handle's text. Times are those of the machine's monotonic clock, which is one for all."""
    return list(_values_of(entry))


def read_entry(words: Sequence[Any], raw: bytes, incarnation: str = "") -> Entry:
    """What `write_entry` wrote."""
    entry = Entry(raw=raw, incarnation=incarnation, **dict(zip(_FIELDS, words, strict=True)))
    entry.conversations = tuple(entry.conversations)
    return entry
