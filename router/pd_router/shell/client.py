"""One HTTP/1.1 connection from a client: requests in, an answer out.

Separate from the turn so that framing, keep-alive, pipelining, size limits and back-pressure on the client side are
decided here. A request that has been read whole is handed to the server's handler; the handler answers through a
`Responder`, which writes to the socket at once and knows whether the client is still there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import httptools

from pd_router.core.errors import INVALID_REQUEST, ApiError, too_large

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 8
REFUSED_LINGER_SECONDS = 2.0
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


_HEADERS_TOO_LARGE = ApiError(
    431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes", INVALID_REQUEST, "headers_too_large"
)
_ENCODED = ApiError(
    415,
    "The body must not be compressed: Content-Encoding must be absent and Transfer-Encoding absent or chunked",
    INVALID_REQUEST,
    "unsupported_encoding",
)


def _bad_http(detail: str) -> ApiError:
    return ApiError(400, f"The request is not valid HTTP/1.1: {detail}", INVALID_REQUEST, "malformed_request")


@dataclass(slots=True)
class Request:
    """A request that has been read whole. Header names are lower case; the last of several equal names wins."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    http_1_0: bool
    arrived: float
    error: ApiError | None = None


class Handler(Protocol):
    """What the server does with a request. Must answer through the responder and never raise."""

    def __call__(self, request: Request, responder: Responder) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class ServerState:
    """What all connections of one listener share."""

    handler: Handler
    max_body_bytes: int
    connections: set[ClientConnection] = field(default_factory=set)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False


class Responder:
    """Writes one answer. Nothing is buffered here beyond what the socket refuses to take."""

    __slots__ = (
        "_chunked",
        "_conn",
        "_head_only",
        "_http_1_0",
        "_keep_alive",
        "finished",
        "on_gone",
        "on_pause",
        "on_resume",
        "started",
    )

    def __init__(self, conn: ClientConnection, request: Request) -> None:
        self._conn = conn
        self._keep_alive = request.keep_alive
        self._http_1_0 = request.http_1_0
        self._head_only = request.method == "HEAD"
        self._chunked = False
        self.started = False
        self.finished = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def gone(self) -> bool:
        """The client has left; writing is pointless."""
        return self._conn.transport is None

    def begin_stream(self, status: int, headers: Iterable[tuple[bytes, bytes]], first: bytes = b"") -> None:
        """Send the head of an answer whose length is not known, and its first bytes in the same write."""
        self.started = True
        self._chunked = not self._http_1_0 and not self._head_only
        if self._http_1_0:
            self._keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._conn.write(self._head(status, headers, framing) + self._frame(first))

    def write(self, data: bytes) -> None:
        """Send body bytes of a stream."""
        if data and not self._head_only:
            self._conn.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def framed_writer(self) -> Callable[[bytes], None] | None:
        """What writes bytes that already are chunks of HTTP/1.1, or None when this answer is not sent in chunks."""
        transport = self._conn.transport
        return transport.write if self._chunked and transport is not None else None

    def end(self, data: bytes = b"", *, close: bool = False) -> None:
        """Finish a stream, with `data` as its last bytes."""
        last = self._frame(data) + (b"0\r\n\r\n" if self._chunked else b"")
        if last:
            self._conn.write(last)
        self._finish(close)

    def send(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, close: bool = False) -> None:
        """Send a whole answer."""
        self.started = True
        if close:
            self._keep_alive = False
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        self._conn.write(head if self._head_only else head + body)
        self._finish(close)

    def send_error(self, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = (), *, close: bool = False) -> None:
        """Send an OpenAI-style error body."""
        extra = [(b"content-type", b"application/json"), *headers]
        if error.retry_after is not None:
            extra.append((b"retry-after", b"%d" % error.retry_after))
        self.send(error.status, extra, error.body(), close=close)

    def abort(self) -> None:
        """Break the connection: the only honest end of a stream that cannot be finished."""
        self.finished = True
        if self._conn.transport is not None:
            self._conn.transport.abort()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        if self._conn.state.draining:
            self._keep_alive = False
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
        parts.extend(b"%b: %b\r\n" % item for item in headers)
        parts.append(framing)
        if not self._keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _frame(self, data: bytes) -> bytes:
        if not data or self._head_only:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _finish(self, close: bool) -> None:
        self.finished = True
        self._conn.answered(keep_alive=self._keep_alive and not close)


class ClientConnection(asyncio.Protocol):
    """The socket: parses requests, answers them one at a time in order."""

    def __init__(self, state: ServerState, now: Callable[[], float]) -> None:
        self.state = state
        self.transport: asyncio.Transport | None = None
        self._waiting_since = 0.0
        self._stalled_since: float | None = None
        self._now = now
        self._parser: Any = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._reading = False
        self._refused: ApiError | None = None
        self._queue: deque[Request] = deque()
        self._responder: Responder | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """No request is being read, waiting or answered."""
        return self._responder is None and not self._queue and not self._reading

    def overdue(self, now: float, request_timeout: float, client_timeout: float) -> bool:
        """Whether the client is too slow: to send a request, to take an answer, or to leave after a refusal."""
        if self._stalled_since is not None and self._stalled_since < now - client_timeout:
            return True
        if self._refused is not None and self._responder is None:
            return self._waiting_since < now - REFUSED_LINGER_SECONDS
        return self._reading and self._waiting_since < now - request_timeout

    # -- asyncio.Protocol -----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        self._waiting_since = self._now()
        self.state.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return  # the rest of a body that was already refused
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(_bad_http("Upgrade is not supported"))
        except httptools.HttpParserError as error:
            if self._refused is None:
                self._refuse(_bad_http(str(error)))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.state.connections.discard(self)
        if not self.state.connections:
            self.state.emptied.set()
        self._queue.clear()
        responder = self._responder
        if responder is not None and not responder.finished and responder.on_gone is not None:
            responder.on_gone()

    def pause_writing(self) -> None:
        self._stalled_since = self._now()
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()

    # -- httptools ------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._header_bytes = 0
        self._parts = []
        self._size = 0
        self._reading = True
        self._waiting_since = self._now()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        coding = self._headers.get("transfer-encoding", "chunked").lower()
        packed = self._headers.get("content-encoding", "identity").lower()
        length = self._headers.get("content-length", "")
        if coding != "chunked" or packed != "identity":
            self._refuse(_ENCODED)
            return
        if length.isdigit() and int(length) > self.state.max_body_bytes:
            self._refuse(too_large(self.state.max_body_bytes))
        elif self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._size += len(data)
        if self._size > self.state.max_body_bytes:
            self._refuse(too_large(self.state.max_body_bytes))
            return
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._reading = False
        if self._refused is not None:
            return
        parts = self._parts
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=self._url.decode("latin-1"),
            headers=self._headers,
            body=parts[0] if len(parts) == 1 else b"".join(parts),
            keep_alive=self._parser.should_keep_alive(),
            http_1_0=self._parser.get_http_version() == "1.0",
            arrived=self._now(),
        )
        self._parts = []
        self._enqueue(request)

    # -- what responder and server call ---------------------------------------------------------
    def write(self, data: bytes) -> None:
        """Hand bytes to the socket; dropped when the client is gone."""
        if self.transport is not None:
            self.transport.write(data)

    def answered(self, *, keep_alive: bool) -> None:
        """The current answer is complete."""
        self._responder = None
        self._task = None
        self._waiting_since = self._now()
        if self._refused is not None and self.transport is not None and self.transport.can_write_eof():
            # The client may still be sending. Closing at once would reset the connection and lose the answer, so only
            # our half is closed; the client's end, or the server's sweep, closes the rest.
            self.transport.write_eof()
            return
        if not keep_alive:
            if self.transport is not None:
                self.transport.close()
            return
        if self._queue:
            self._begin(self._queue.popleft())
            if self.transport is not None and len(self._queue) < MAX_PIPELINED:
                self.transport.resume_reading()

    def close_idle(self, since: float) -> None:
        """Close the connection if nothing was owed to the client and nothing came from it, after ``since``."""
        if self.idle and self._waiting_since <= since and self.transport is not None:
            self.transport.close()

    def cut(self) -> None:
        """Break the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES and self._refused is None:
            self._refuse(_HEADERS_TOO_LARGE)

    def _refuse(self, error: ApiError) -> None:
        """Answer without reading on: what follows on this connection cannot be trusted to be a request."""
        if self._refused is not None:
            return
        self._refused = error
        self._reading = False
        self._enqueue(Request("POST", "", {}, b"", False, False, self._now(), error))

    def _enqueue(self, request: Request) -> None:
        if self._responder is not None:
            self._queue.append(request)
            if self.transport is not None and len(self._queue) >= MAX_PIPELINED:
                self.transport.pause_reading()
            return
        self._begin(request)

    def _begin(self, request: Request) -> None:
        responder = Responder(self, request)
        self._responder = responder
        if request.error is not None:
            responder.send_error(request.error, close=True)
        else:
            self._task = self.state.handler(request, responder)
