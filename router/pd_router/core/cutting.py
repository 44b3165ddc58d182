"""Cutting the handle out of an answer without touching another byte (IS-02).

Separate from SSE framing because a whole JSON answer and one event of a stream need the same cut. The member is found
by its bytes: inside a JSON string a quote is always escaped, so the quoted name, not preceded by a backslash and
followed by a colon, can only be a key. Only the value behind it is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pd_router.core import errors
from pd_router.core.careless import hints, is_odd_error, keeps_line, scrub
from pd_router.core.refusals import harmless, told, told_in_stream
from pd_wire.names import KV_PARAMS

NAME: Final = KV_PARAMS.encode()
_KEY: Final = b'"' + NAME + b'"'
_SPACE: Final = b" \t\r\n"
_BACKSLASH: Final = 0x5C
_COMMA: Final = 0x2C
_COLON: Final = 0x3A
_decode_value: Final = json.JSONDecoder().raw_decode
ERROR: Final = b'"error"'
"""In every error event, as a key or as the value of `object`. In content the quotes are escaped."""
_MARK: Final = b"\xef\xbb\xbf"
"""A byte order mark: a stream may begin with one, in front of its first line."""
_ERROR_TYPES: Final = frozenset({"error", "response.failed"})
ESCAPE: Final = b"\\u00"
"""Without it no letter of ASCII is written as an escape."""
_ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
"""A letter or an underscore as an escape. No writer of JSON does that, unless to hide a name."""
_ODD_KEY: Final = re.compile(b'"' + b"".join(rb"(?:%c|\\u00(?i:%02x))" % (code, code) for code in NAME) + b'"')

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


def suspicious(data: bytes) -> bool:
    """Whether bytes of an answer may hold a handle or an error: if not, they may pass without being looked at."""
    return NAME in data or ERROR in data or _may_hide(data) or hints(data)


def _may_hide(data: bytes) -> bool:
    """Whether a key may be written with escapes."""
    return ESCAPE in data and _ESCAPED_LETTER.search(data) is not None


def strip_json(body: bytes) -> tuple[bytes, Handle | None]:
    """Cut the handle out of a JSON answer, wherever it stands as a key; an error that quotes it is rewritten.

    Raises:
        ApiError: 502, when the name stands there as a key and its value cannot be read: no answer beats a leak.
    """
    if NAME not in body and not _may_hide(body):
        return _scrubbed(body), None
    found = find_members(body)
    if found is None:
        raise errors.upstream_failed("decode", "its answer cannot be read")
    spans, handle = found
    rest = splice(body, spans)
    if spans and _names_again(rest):
        raise errors.upstream_failed("decode", "its answer cannot be read")
    return _scrubbed(_without_quotes(rest)), handle


def _scrubbed(body: bytes) -> bytes:
    clean = scrub(body)
    if clean is None:
        raise errors.upstream_failed("decode", "its answer cannot be read")
    return clean


def _names_again(rest: bytes) -> bool:
    """Whether a member is there after the cut: in what was no JSON, two ends can make a key that was none before."""
    found = find_members(rest)
    return found is None or bool(found[0])


def frame_openai(body: bytes) -> bytes:
    """An error body as an event of OpenAI's streams."""
    return b"data: " + body + b"\n\n"


def cut_event(event: bytes, frame: Callable[[bytes], bytes] = frame_openai) -> Cut | None:
    """Cut the handle out of one SSE event, also out of JSON spread over several `data:` lines; None if unreadable.

    Args:
        frame: makes an event of an error body, as the client's API has it.
    """
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and event.endswith(b"\n\n"):
        lines, payload = [(6, len(event) - 2)], event[6:-2]
    else:
        lines = data_lines(event)
        payload = b"\n".join([event[start:end] for start, end in lines])
    found = find_members(payload)
    if found is None:
        return None
    spans, handle = found
    rest = splice(event, _in_event(spans, lines)) if spans else event
    if spans and _names_again(splice(payload, spans)):
        return None
    return _judge_rest(rest, handle, frame)


def _judge_rest(rest: bytes, handle: Handle | None, frame: Callable[[bytes], bytes]) -> Cut | None:
    """Rewrite an error, drop lines and fields that tell; refuse what names the handle and is no JSON."""
    if NAME not in rest and ERROR not in rest and _is_chunk(rest):
        return Cut(rest, handle)
    rest = _without_odd_lines(rest)
    lines = data_lines(rest)
    payload = b"\n".join([rest[start:end] for start, end in lines])
    if not lines or payload.strip() == b"[DONE]":
        return Cut(rest, handle)
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError:
        told_of = NAME in rest or hints(rest) or not harmless(payload.decode("utf-8", "replace"))
        return None if told_of else Cut(rest, handle)
    if is_error(answer) or is_odd_error(rest, answer):
        return Cut(frame(told_in_stream(answer if isinstance(answer, dict) else {})), handle)
    clean = scrub(payload)
    if clean is None:
        return None
    if clean is not payload:
        others = [line for line in rest.splitlines(keepends=True) if line.strip() and not _is_data(line)]
        rest = b"".join((*others, b"data: ", clean, b"\n\n"))
    return Cut(rest, handle)


def _is_chunk(event: bytes) -> bool:
    """Whether an event is a chunk of OpenAI's as engines write them, and nothing in it tells of a handle."""
    return event.startswith(b"data: {") and event.count(b"\n") == 2 and b'"choices":' in event and not hints(event)


def _is_data(line: bytes) -> bool:
    return line.startswith((b"data:", _MARK + b"data:"))


def _without_odd_lines(event: bytes) -> bytes:
    """Drop comments and other lines without data that may tell of a handle: a client needs none of them."""
    lines = event.splitlines(keepends=True)
    kept = [line for line in lines if _is_data(line) or (NAME not in line and keeps_line(line))]
    if len(kept) == len(lines):
        return event
    return b"".join(kept) if any(line.strip() for line in kept) else b""


def find_members(text: bytes) -> tuple[list[Span], Handle | None] | None:
    """Byte ranges to cut from JSON `text`, each with the comma that goes with it; None if a value cannot be read."""
    spans: list[Span] = []
    handle: Handle | None = None
    done = 0
    for at, after in _quoted_names(text):
        colon = skip_space(text, after)
        if at < done or (at and text[at - 1] == _BACKSLASH) or colon >= len(text) or text[colon] != _COLON:
            continue
        value = skip_space(text, colon + 1)
        read = read_value(text, value)
        if read is None:
            return None
        parsed, end = read
        if type(parsed) is dict:
            handle = Handle(parsed)
            handle.raw = text[value:end]
        spans.append(_with_comma(text, at, end, spans[-1][1] if spans else 0))
        done = end
    return spans, handle


def _quoted_names(text: bytes) -> Iterator[Span]:
    """Where the quoted name stands, in any spelling that JSON has for it."""
    if _may_hide(text):
        yield from (found.span() for found in _ODD_KEY.finditer(text))
        return
    at = text.find(_KEY)
    while at >= 0:
        yield at, at + len(_KEY)
        at = text.find(_KEY, at + 1)


def read_value(text: bytes, start: int) -> tuple[Any, int] | None:
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
        if _is_data(line):
            colon = line.index(b":")
            first = start + colon + (2 if line[colon + 1 : colon + 2] == b" " else 1)
            lines.append((first, start + len(line.rstrip(b"\r\n"))))
        start += len(line)
    return lines


def _with_comma(text: bytes, start: int, end: int, floor: int) -> Span:
    before = start
    while before > floor and text[before - 1] in _SPACE:
        before -= 1
    if before > floor and text[before - 1] == _COMMA:
        return before - 1, end
    after = skip_space(text, end)
    if after < len(text) and text[after] == _COMMA:
        return start, after + 1
    return start, end


def skip_space(text: bytes, at: int) -> int:
    """Where the next byte is that is no white space of JSON."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def splice(text: bytes, spans: list[Span], values: list[bytes] | None = None) -> bytes:
    """The text without the ranges, or with values in their places."""
    kept: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        kept.append(text[at:start])
        if values is not None:
            kept.append(values[number])
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
    return told(body) if is_error(answer) else body


def is_error(answer: Any) -> bool:
    """Whether an answer or event is an error object: OpenAI's, vLLM's older flat one, one of the Responses or the
    Messages API."""
    if not isinstance(answer, dict):
        return False
    kind = answer.get("type")
    named = isinstance(kind, str) and kind in _ERROR_TYPES
    return named or answer.get("error") is not None or answer.get("object") == "error"
