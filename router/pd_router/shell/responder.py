"""One answer on its way to a client: status line, headers, body in the framing that the client understands.

Separate from the connection, which decides when an answer may begin; here is how it is written. Writes go to the socket
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from pd_router.core.errors import ApiError
from pd_router.shell.request_reader import Request

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Connection(Protocol):
    """What an answer asks of its connection."""

    transport: asyncio.Transport | None

    @property
    def stalled(self) -> bool:
        """The client does not take what was written."""

    @property
    def draining(self) -> bool:
        """No further request is wanted."""

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""


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
        "status",
    )

    def __init__(self, conn: Connection, request: Request) -> None:
        self._conn = conn
        self._keep_alive = request.keep_alive
        self._http_1_0 = request.http_1_0
        self._head_only = request.method == "HEAD"
        self._chunked = False
        self.started = False
        self.status = 0
        """Of the answer; 0 before it begins."""
        self.finished = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def paused(self) -> bool:
        """The client does not take what was written; `on_pause` was called, if it was there in time."""
        return self._conn.stalled

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

    @property
    def socket(self) -> asyncio.Transport | None:
        """The transport, for who writes what `framed_writer` would to the socket itself; None when the client left."""
        return self._conn.transport

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

    def send_error(
        self,
        error: ApiError,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        close: bool = False,
        body: bytes | None = None,
    ) -> None:
        """Send an error: an OpenAI-style body, unless the client's API has another."""
        extra = [(b"content-type", b"application/json"), *headers, *error.headers()]
        self.send(error.status, extra, error.body() if body is None else body, close=close)

    def abort(self) -> None:
        """Break the connection: the only honest end of a stream that cannot be finished."""
        self.finished = True
        if self._conn.transport is not None:
            self._conn.transport.abort()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        self.status = status
        if self._conn.draining:
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
