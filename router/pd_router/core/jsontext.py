"""JSON text in and out, fast for what occurs and exact for what could.

orjson reads an integer beyond 64 bits as a float and stops writing at 254 levels. Neither occurs in honest traffic,
both would change or break a client's body, so they take the standard library's slower way instead.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

_SORTED: Final = orjson.OPT_SORT_KEYS


class RawJson:
    """JSON text that stands for a value and is written as it is."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def encode(value: Any, *, sort: bool = False) -> bytes:
    """Write `value` compactly as UTF-8.

    Raises:
        ValueError: nested too deeply, or text that is not valid Unicode.
    """
    try:
        return orjson.dumps(value, _as_fragment, _SORTED if sort else None)
    except TypeError:
        return _encode_slowly(value, sort)


def _encode_slowly(value: Any, sort: bool) -> bytes:
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort, default=_as_value
        )
        return text.encode()
    except (RecursionError, TypeError) as error:
        raise ValueError("nested too deeply") from error


def _as_fragment(value: Any) -> orjson.Fragment:
    if type(value) is RawJson:
        return orjson.Fragment(value.raw)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _as_value(value: Any) -> Any:
    if type(value) is RawJson:
        return json.loads(value.raw)
    raise TypeError(f"{type(value).__name__} is not JSON")


def lost_integers(encoded: bytes) -> bool:
    """Whether a value that orjson read and wrote may hold an integer that became a float; false alarms are possible."""
    return b"e+" in encoded


def decode_exactly(raw: bytes) -> Any:
    """Read JSON with integers of any size.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
