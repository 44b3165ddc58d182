"""The endpoints that one engine serves and that carry no KV: which methods, which bodies, and what a body may not say.

Separate from the code that passes them on because this list is the boundary: an endpoint that is not on it does not
exist for a client, above all those that steer an engine (sleep, caches, adapters, profiles, weights, RPC) or tell of
its inside. Read in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

import orjson

from pd_router.core.errors import malformed
from pd_router.core.forms import FORM, check_form
from pd_router.core.jsontext import decode_exactly, encode
from pd_router.core.sanitize import strip_deep


class Body(Enum):
    """What a request's body is."""

    NONE = "none"
    JSON = "JSON"
    FORM = FORM


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


def clean_body(passed: Passed, raw: bytes, content_type: str) -> tuple[bytes, bytes]:
    """The body for the engine, and its content type.

    Raises:
        ApiError: 400 or 415, when it is no such body, or a form says what no client may say.
    """
    if passed.body is Body.NONE:
        return b"", b""
    if passed.body is Body.JSON:
        return clean_json(raw), b"application/json"
    return raw, check_form(raw, content_type).encode("ascii")


def clean_json(raw: bytes) -> bytes:
    """JSON as it was, without what a client may not say. Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
        if strip_deep(body):
            strip_deep(body := decode_exactly(raw))
        return encode(body)
    except ValueError as error:  # orjson's own error is one, too
        raise malformed(str(error)) from error
