"""Every answer that the router gives in its own name when it cannot serve a turn.

Separate so that status, error type and wording are decided in one table: clients branch on `type` and `code`, and
operators search for the messages. The families, by what the client should do next::

    ApiError
    ├── change the request   400 malformed, 400 bad_field, 404 unknown_model, 404 unknown_path, 405 bad_method,
    │                        413 too_large, 501 no_websocket
    ├── say who you are      401 unauthorized (with WWW-Authenticate)
    ├── come back later      429 queue_full, 429 tenant_limit, 503 no_engine, 503 engine_not_ready (with Retry-After)
    └── the turn is lost     502 upstream_failed, 504 upstream_timeout, 500 internal
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import orjson

INVALID_REQUEST: Final = "invalid_request_error"
NOT_FOUND: Final = "not_found_error"
RATE_LIMIT: Final = "rate_limit_error"
UNAVAILABLE: Final = "service_unavailable_error"
UPSTREAM: Final = "upstream_error"
INTERNAL: Final = "internal_error"

_SHOWN_NAMES: Final = 20
"""A 404 lists at most this many models, so that a fleet with many adapters does not answer with a page."""


class ApiError(Exception):
    """A refusal with an OpenAI-style body. ``retry_after`` is in whole seconds and becomes the header of that name."""

    __slots__ = ("code", "message", "param", "retry_after", "status", "type")

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON body, UTF-8."""
        return orjson.dumps({"error": self._fields()})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that the status asks for."""
        found = [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]
        return [*found, (b"www-authenticate", b'Bearer realm="pd-router"')] if self.status == 401 else found

    def _fields(self) -> dict[str, str | None]:
        # A lone surrogate in a client's text must not turn a 400 into a 500.
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        return {"message": message, "type": self.type, "param": self.param, "code": self.code}


def error_event(error: ApiError) -> bytes:
    """One SSE event that tells a client, whose stream has begun with 200, that the turn is lost."""
    return b"data: " + error.body() + b"\n\n"


def malformed(detail: str) -> ApiError:
    """400: the body is not JSON, or not JSON that an engine would read the same way."""
    return ApiError(400, f"The body is not valid JSON: {detail}", INVALID_REQUEST, "malformed_json")


def bad_field(field: str, allowed: str) -> ApiError:
    """400: ``field`` has the wrong type or value; ``allowed`` completes the sentence "<field> must be ..."."""
    return ApiError(400, f"{field} must be {allowed}", INVALID_REQUEST, "invalid_value", field)


def unknown_model(model: str, known: Iterable[str]) -> ApiError:
    """404: no engine serves ``model``."""
    names = sorted(known)
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    text = f"The model `{model[:200]}` does not exist. Served here: {shown}"
    return ApiError(404, text, NOT_FOUND, "model_not_found", "model")


def unknown_path(path: str) -> ApiError:
    """404: nothing is served under ``path``."""
    return ApiError(404, f"Nothing is served at {path[:200]}", NOT_FOUND, "unknown_path")


def no_websocket(path: str) -> ApiError:
    """501: an endpoint of engines that speaks WebSocket."""
    text = f"{path} speaks WebSocket, which is not served here; connect to an engine"
    return ApiError(501, text, INVALID_REQUEST, "websocket_not_supported")


def bad_method(method: str, path: str, allowed: str) -> ApiError:
    """405: the path exists, the method does not."""
    return ApiError(405, f"{method[:20]} is not allowed at {path[:200]}; use {allowed}", INVALID_REQUEST, "bad_method")


def unauthorized(code: str, message: str) -> ApiError:
    """401: no principal could be proven. The message never quotes what was sent."""
    return ApiError(401, message, INVALID_REQUEST, code)


def tenant_limit(code: str, limit: str, retry_after: int) -> ApiError:
    """429: one tenant is at a limit of its own; ``limit`` says which one and how much it is."""
    text = f"This API key's limit is reached: {limit}. Try again in {retry_after} s"
    return ApiError(429, text, RATE_LIMIT, code, retry_after=retry_after)


def too_large(limit: int) -> ApiError:
    """413: the body is longer than ``limit`` bytes."""
    return ApiError(413, f"The body is larger than the limit of {limit} bytes", INVALID_REQUEST, "body_too_large")


def queue_full(limit: int, retry_after: int) -> ApiError:
    """429: ``limit`` requests are in the router already."""
    text = f"The router already holds {limit} requests, which is its limit. Try again in {retry_after} s"
    return ApiError(429, text, RATE_LIMIT, "queue_full", retry_after=retry_after)


def no_engine(role: str, retry_after: int) -> ApiError:
    """503: no engine of ``role`` can take the turn now."""
    text = f"No {role} engine is available. Try again in {retry_after} s"
    return ApiError(503, text, UNAVAILABLE, "no_engine", retry_after=retry_after)


def engine_not_ready(role: str, retry_after: int) -> ApiError:
    """503: engines of ``role`` exist and are still loading, which a client must not take for a broken gateway."""
    text = f"The {role} engine is not ready yet. Try again in {retry_after} s"
    return ApiError(503, text, UNAVAILABLE, "engine_not_ready", retry_after=retry_after)


def upstream_failed(role: str, detail: str) -> ApiError:
    """502: the engine closed the connection or answered what cannot be relayed. ``detail`` names no address."""
    return ApiError(502, f"The {role} engine failed: {detail}", UPSTREAM, "upstream_failed")


def upstream_timeout(role: str, seconds: float) -> ApiError:
    """504: the engine was silent for ``seconds``."""
    return ApiError(504, f"The {role} engine did not answer within {seconds:g} s", UPSTREAM, "upstream_timeout")


def upstream_silent(role: str, seconds: float) -> ApiError:
    """504: the engine had begun its answer, and nothing more of it came for ``seconds``."""
    text = f"The {role} engine sent nothing for {seconds:g} s in the middle of its answer"
    return ApiError(504, text, UPSTREAM, "upstream_timeout")


def internal() -> ApiError:
    """500: a fault of the router itself; the details are in its log, not in the answer."""
    return ApiError(500, "The router failed on this request", INTERNAL, "internal_error")
