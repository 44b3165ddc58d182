"""Cutting the handle out of an answer without touching another byte (IS-02).

Separate from SSE framing because a whole JSON answer and one event of a stream need the same cut. The member is found
by its bytes: inside a JSON string a quote is always escaped, so the quoted name, not preceded by a backslash and
followed by a colon, can only be a key. Only the value behind it is parsed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pd_router.core import errors
from pd_wire.names import KV_PARAMS

NAME: Final = KV_PARAMS.encode()
_KEY: Final = b'"' + NAME + b'"'
_SPACE: Final = b" \t\r\n"
_BACKSLASH: Final = 0x5C
_COMMA: Final = 0x2C
_COLON: Final = 0x3A
_decode_value: Final = json.JSONDecoder().raw_decode
_WITHHELD: Final = "The engine refused the request; its message is withheld because it quotes internal fields"

Span = tuple[int, int]


class Handle(dict[str, Any]):
    """A handle as an engine wrote it. `raw` is its JSON text, to be sent on as it is; the items are to look at, and an
    integer beyond 64 bits among them may have become a float."""

    __slots__ = ("raw",)
    raw: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """An answer without its handle. `handle` is the last one that was an object, or None."""

    rest: bytes
    handle: Handle | None


def strip_json(body: bytes) -> tuple[bytes, Handle | None]:
    """Cut the handle out of a JSON answer, wherever it stands as a key; an error that quotes it is rewritten.

    Raises:
        ApiError: 502, when the name stands there as a key and its value cannot be read: no answer beats a leak.
    """
    if NAME not in body:
        return body, None
    found = find_members(body)
    if found is None:
        raise errors.upstream_failed("decode", "its answer cannot be read")
    spans, handle = found
    return _without_quotes(_splice(body, spans)), handle


def cut_event(event: bytes) -> Cut | None:
    """Cut the handle out of one SSE event, also out of JSON spread over several `data:` lines; None if unreadable."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and event.endswith(b"\n\n"):
        lines, payload = [(6, len(event) - 2)], event[6:-2]
    else:
        lines = data_lines(event)
        payload = b"\n".join([event[start:end] for start, end in lines])
    found = find_members(payload)
    if found is None:
        return None
    spans, handle = found
    rest = _splice(event, _in_event(spans, lines)) if spans else event
    if NAME in rest:
        rest = _without_quotes_in_event(rest)
    return Cut(rest, handle)


def find_members(text: bytes) -> tuple[list[Span], Handle | None] | None:
    """Byte ranges to cut from JSON `text`, each with the comma that goes with it; None if a value cannot be read."""
    spans: list[Span] = []
    handle: Handle | None = None
    at = text.find(_KEY)
    while at >= 0:
        colon = _skip(text, at + len(_KEY))
        if (at and text[at - 1] == _BACKSLASH) or colon >= len(text) or text[colon] != _COLON:
            at = text.find(_KEY, at + 1)
            continue
        value = _skip(text, colon + 1)
        read = _read_value(text, value)
        if read is None:
            return None
        parsed, end = read
        if type(parsed) is dict:
            handle = Handle(parsed)
            handle.raw = text[value:end]
        spans.append(_with_comma(text, at, end, spans[-1][1] if spans else 0))
        at = text.find(_KEY, end)
    return spans, handle


def _read_value(text: bytes, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `start` and where it ends, or None."""
    if text.endswith(b"}"):
        with suppress(orjson.JSONDecodeError):
            # The last member, as engines write it: the value is all that is left of the object.
            return orjson.loads(text[start:-1]), len(text) - 1
    try:
        rest = text[start:].decode()
        parsed, length = _decode_value(rest)
    except (ValueError, RecursionError):
        return None
    return parsed, start + (length if rest.isascii() else len(rest[:length].encode()))


def data_lines(event: bytes) -> list[Span]:
    """Where the values of an event's `data` lines lie, without the one space that may follow the colon."""
    lines: list[Span] = []
    start = 0
    for line in event.splitlines(keepends=True):
        if line.startswith(b"data:"):
            first = start + (6 if line[5:6] == b" " else 5)
            lines.append((first, start + len(line.rstrip(b"\r\n"))))
        start += len(line)
    return lines


def _with_comma(text: bytes, start: int, end: int, floor: int) -> Span:
    before = start
    while before > floor and text[before - 1] in _SPACE:
        before -= 1
    if before > floor and text[before - 1] == _COMMA:
        return before - 1, end
    after = _skip(text, end)
    if after < len(text) and text[after] == _COMMA:
        return start, after + 1
    return start, end


def _skip(text: bytes, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _splice(text: bytes, spans: list[Span]) -> bytes:
    kept: list[bytes] = []
    at = 0
    for start, end in spans:
        kept.append(text[at:start])
        at = end
    kept.append(text[at:])
    return b"".join(kept)


def _in_event(spans: list[Span], lines: list[Span]) -> list[Span]:
    """Map ranges of the joined payload to ranges of the event; line ends and prefixes between them stay."""
    out: list[Span] = []
    for start, end in spans:
        offset = 0
        for first, last in lines:
            low, high = max(start, offset), min(end, offset + last - first)
            if low < high:
                out.append((first + low - offset, first + high - offset))
            offset += last - first + 1
    return out


def _without_quotes(body: bytes) -> bytes:
    """An error that quotes the request in its text must not carry the handle out; content that mentions it may."""
    if NAME not in body:
        return body
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.upstream_failed("decode", "its answer cannot be read") from error
    return _withheld(answer) if is_error(answer) else body


def _without_quotes_in_event(event: bytes) -> bytes:
    payload = b"\n".join([event[start:end] for start, end in data_lines(event)])
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return event
    return b"data: " + _withheld(answer) + b"\n\n" if is_error(answer) else event


def is_error(answer: Any) -> bool:
    """Whether an answer or event is an error object, in today's shape or the older flat one."""
    return isinstance(answer, dict) and (answer.get("error") is not None or answer.get("object") == "error")


def _withheld(answer: dict[str, Any]) -> bytes:
    fields = answer.get("error")
    fields = fields if isinstance(fields, dict) else answer
    kept = {name: fields[name] for name in ("type", "code") if isinstance(fields.get(name), str | int)}
    return orjson.dumps({"error": {"message": _WITHHELD, "param": None, **kept}})
