"""JSON text in and out, fast for what occurs and exact for what could.

orjson reads an integer beyond 64 bits as a float and stops writing at 254 levels. Neither occurs in honest traffic,
both would change or break a client's body, so they take the standard library's slower way instead.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

_SORTED: Final = orjson.OPT_SORT_KEYS


def encode(value: Any, *, sort: bool = False) -> bytes:
    """Write `value` compactly as UTF-8.

    Raises:
        ValueError: nested too deeply, or text that is not valid Unicode.
    """
    try:
        return orjson.dumps(value, option=_SORTED if sort else None)
    except TypeError:
        return _encode_slowly(value, sort)


def _encode_slowly(value: Any, sort: bool) -> bytes:
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort, default=_read_fragment
        )
        return text.encode()
    except (RecursionError, TypeError) as error:
        raise ValueError("nested too deeply") from error


def _read_fragment(value: Any) -> Any:
    if isinstance(value, orjson.Fragment):
        return json.loads(value.contents)
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
