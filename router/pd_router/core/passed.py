"""The endpoints that one engine serves and that carry no KV: which methods, which bodies, and what a body may not say.

Separate from the code that passes them on because this list is the boundary: an endpoint that is not on it does not
exist for a client, above all those that steer an engine (sleep, caches, adapters, profiles, weights, RPC) or tell of
its inside. Read in vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from enum import Enum
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote_to_bytes

import orjson

from pd_router.core.errors import ApiError, bad_field, malformed
from pd_router.core.fields import STRIPPED
from pd_router.core.jsontext import decode_exactly, encode
from pd_router.core.sanitize import strip_deep
from pd_wire.names import OWN_PREFIX


class Body(Enum):
    """What a request's body is."""

    NONE = "none"
    JSON = "JSON"
    FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Passed:
    """One endpoint. `quick`: answered without the model, so a short wait is enough."""

    method: str
    body: Body
    quick: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that it takes."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


_LOOK: Final = Passed("GET", Body.NONE, quick=True)
_TEXT: Final = Passed("POST", Body.JSON, quick=True)
_POOL: Final = Passed("POST", Body.JSON)
_SPEECH: Final = Passed("POST", Body.FORM)

PASSED: Final[Mapping[str, Passed]] = MappingProxyType(
    {
        "/v1/models": _LOOK,
        "/version": _LOOK,
        "/tokenize": _TEXT,
        "/detokenize": _TEXT,
        "/v1/messages/count_tokens": _TEXT,
        "/v1/embeddings": _POOL,
        "/v2/embed": _POOL,
        "/pooling": _POOL,
        "/classify": _POOL,
        "/score": _POOL,
        "/v1/score": _POOL,
        "/rerank": _POOL,
        "/v1/rerank": _POOL,
        "/v2/rerank": _POOL,
        "/v1/audio/transcriptions": _SPEECH,
        "/v1/audio/translations": _SPEECH,
    }
)

SOCKETS: Final = frozenset({"/v1/realtime"})
"""Endpoints that speak WebSocket, which the router does not."""

MAX_PARTS: Final = 256
_MAX_PART_HEAD: Final = 8192
_FREE_TEXT: Final = frozenset({"prompt", "hotwords"})
"""Fields of a form whose value is the client's own text."""
_NOISE: Final = re.compile(rb"[_\-\s\\\"'\[\]]+")


def clean_body(passed: Passed, raw: bytes, content_type: str) -> tuple[bytes, bytes]:
    """The body for the engine, and its content type.

    Raises:
        ApiError: 400 or 415, when it is no such body, or a form says what no client may say.
    """
    if passed.body is Body.NONE:
        return b"", b""
    if passed.body is Body.JSON:
        return clean_json(raw), b"application/json"
    check_form(raw, content_type)
    return raw, content_type.encode("latin-1")


def clean_json(raw: bytes) -> bytes:
    """JSON as it was, without what a client may not say. Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
        if strip_deep(body):
            strip_deep(body := decode_exactly(raw))
        return encode(body)
    except ValueError as error:  # orjson's own error is one, too
        raise malformed(str(error)) from error


def check_form(raw: bytes, content_type: str) -> None:
    """Refuse a form that names the params anywhere but in free text or in a file. It is not rewritten: files are large,
    and engines read forms with another parser. Raises ApiError 400 or 415."""
    if content_type.partition(";")[0].strip().lower() != Body.FORM.value:
        text = f"Content-Type must be {Body.FORM.value} with a boundary"
        raise ApiError(415, text, "invalid_request_error", "unsupported_media_type", "Content-Type")
    boundary = _message(b"Content-Type: " + content_type.encode("latin-1")).get_boundary()
    if not boundary:
        raise bad_field("Content-Type", f"{Body.FORM.value} with a boundary")
    for name, is_file, value in _parts(raw, boundary.encode("latin-1", "replace")):
        plain = _plain(name.encode("utf-8", "replace"))
        if _names_params(plain) or name.lower().startswith(OWN_PREFIX):
            raise bad_field("the form", "without fields for transfers, which are not a client's to set")
        if not is_file and name not in _FREE_TEXT and _names_params(_plain(value)):
            raise bad_field("the form", "without params for transfers, which are not a client's to set")


def _parts(raw: bytes, boundary: bytes) -> Iterator[tuple[str, bool, bytes]]:
    """Name, whether it is a file, and value of each part. Raises ApiError 400."""
    pieces = raw.split(b"--" + boundary, MAX_PARTS + 1)
    if len(pieces) < 2 or len(pieces) > MAX_PARTS + 1:
        raise bad_field("the body", f"a form of 1 to {MAX_PARTS} parts, divided by the boundary")
    for piece in pieces[1:]:
        if piece.startswith(b"--"):
            return
        head, found, value = piece.partition(b"\r\n\r\n")
        if not found or len(head) > _MAX_PART_HEAD:
            raise bad_field("the body", "a form whose parts each have a head of their own")
        part = _message(head.lstrip(b"\r\n"))
        name = part.get_param("name", header="content-disposition")
        filename = part.get_filename()
        yield _text(name), filename is not None, value


def _message(head: bytes) -> Message[str, str]:
    return message_from_bytes(head + b"\r\n\r\n")


def _text(value: object) -> str:
    """A parameter of a header, which RFC 2231 may have taken apart."""
    if isinstance(value, tuple):
        value = value[-1]
    return value if isinstance(value, str) else ""


def _plain(text: bytes) -> bytes:
    return _NOISE.sub(b"", unquote_to_bytes(text)).lower()


def _names_params(plain: bytes) -> bool:
    return any(name.encode() in plain for name in STRIPPED)
