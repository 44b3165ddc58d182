"""One HTTP/1.1 connection from a client: requests in, an answer out.

Separate from the turn so that keep-alive, pipelining, deadlines and back-pressure on the client side are decided here.
A request that has been read whole is handed to the server's handler, which answers through a `Responder`. A client that
does not take its answers is not read from: nothing that it sends makes the router hold more than a few requests of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pd_router.core.errors import UNAVAILABLE, ApiError
from pd_router.core.settings import Timeouts
from pd_router.shell.request_reader import Request, RequestReader
from pd_router.shell.responder import Responder

MAX_PIPELINED = 8
MAX_PIPELINED_BYTES = 1024 * 1024
"""Bodies that may wait behind an answer; the request that exceeds it is the last one that is read."""
FEED_BYTES = 8 * 1024
"""Given to the parser at one time: small requests come many to a read, and each piece may exceed the limits."""
REFUSED_LINGER_SECONDS = 2.0
REFUSED_AT_ONCE = 32
"""Connections above the limit that are told so; any more are dropped without a word."""
_TOO_MANY = ApiError(
    503,
    "The router has as many client connections as it can take. Try again in 1 s",
    UNAVAILABLE,
    "too_many_connections",
    retry_after=1,
)


class Handler(Protocol):
    """What the server does with a request. Must answer through the responder and never raise."""

    def __call__(self, request: Request, responder: Responder) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class ServerState:
    """What all connections of one listener share. `on_full` is called for each one too many."""

    handler: Handler
    max_body_bytes: int
    max_connections: Callable[[], int] = lambda: 1 << 30
    on_full: Callable[[], None] = lambda: None
    on_unread: Callable[[int], None] = lambda _status: None
    """Called with the status of each answer to what was no request, or none that was read whole."""
    admit: Callable[[str, dict[str, str], str], str | None] = lambda _path, _headers, _peer: None
    """The tenant of a request with this path and these headers, from this address. Raises ApiError."""
    connections: set[ClientConnection] = field(default_factory=set)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False

    def sweep(self, now: float, timeouts: Timeouts) -> None:
        """Break the connections whose client is too slow."""
        for connection in list(self.connections):
            if connection.overdue(now, timeouts):
                connection.cut()


class ClientConnection(asyncio.Protocol):
    """The socket: reads requests, answers them one at a time in order."""

    def __init__(self, state: ServerState, now: Callable[[], float]) -> None:
        self.state = state
        self.transport: asyncio.Transport | None = None
        self._now = now
        self._peer = ""
        self._reader = RequestReader(self, state.max_body_bytes, now, self._admit)
        self._waiting_since = now()
        self._stalled_since: float | None = None
        self._refused: ApiError | None = None
        self._queue: deque[Request] = deque()
        self._queued_bytes = 0
        self._unread = b""
        self._held = False
        self._feeding = False
        self._continue_owed = False
        self._used = False
        self._responder: Responder | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """No request is being read, waiting or answered."""
        return self._responder is None and not self._queue and not self._unread and self._reader.since is None

    @property
    def stalled(self) -> bool:
        """The client does not take what was written."""
        return self._stalled_since is not None

    @property
    def draining(self) -> bool:
        """No further request is wanted."""
        return self.state.draining

    def overdue(self, now: float, timeouts: Timeouts) -> bool:
        """Whether the client is too slow: to send a request, to take an answer, or to leave."""
        if self._stalled_since is not None and self._stalled_since < now - timeouts.client:
            return True
        waited = now - self._waiting_since
        if self.transport is not None and self.transport.is_closing():
            return waited > timeouts.client  # what was written last is not taken
        since = self._reader.since
        if since is not None and not self._held and since < now - timeouts.request:
            return True
        if self._responder is not None or self._queue or since is not None:
            return False
        if self._refused is not None:
            return waited > REFUSED_LINGER_SECONDS
        return waited > (timeouts.keep_alive if self._used else timeouts.request)

    # -- asyncio.Protocol -----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._waiting_since = self._now()
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        excess = len(self.state.connections) - self.state.max_connections()
        self.state.connections.add(self)
        if excess >= 0:
            self.state.on_full()
            if excess < REFUSED_AT_ONCE:
                self.refuse(_TOO_MANY)
            else:
                self.cut()

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return  # the rest of what was already refused
        self._unread = self._unread + data if self._unread else data
        self._read_on()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.state.connections.discard(self)
        if not self.state.connections:
            self.state.emptied.set()
        self._queue.clear()
        self._unread = b""
        responder = self._responder
        if responder is not None and not responder.finished and responder.on_gone is not None:
            responder.on_gone()

    def pause_writing(self) -> None:
        self._stalled_since = self._now()
        self._steer()
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()
        self._go_on()

    # -- what the reader calls --------------------------------------------------------------------
    def requested(self, request: Request) -> None:
        """A request was read whole."""
        self._continue_owed = False
        if self._responder is not None or self._queue or self.stalled:
            self._queue.append(request)
            self._queued_bytes += len(request.body)
        else:
            self._begin(request)

    def refuse(self, error: ApiError) -> None:
        """Answer without reading on: what follows on this connection cannot be trusted to be a request."""
        self._refused = error
        if self.transport is not None and self.transport.is_closing():
            return  # the client has said that it sends no more, and has its answer
        self.requested(Request("POST", "", {}, b"", False, False, self._now(), error))

    def body_expected(self) -> None:
        """Ask for the body, unless an answer comes first: between its bytes this would be taken for a part of it."""
        self._continue_owed = True
        if self._responder is None and not self._queue:
            self._ask_for_body()

    # -- what responder and server call ---------------------------------------------------------
    def write(self, data: bytes) -> None:
        """Hand bytes to the socket; dropped when the client is gone."""
        if self.transport is not None:
            self.transport.write(data)

    def answered(self, *, keep_alive: bool) -> None:
        """The current answer is complete."""
        self._responder = None
        self._task = None
        self._used = True
        self._waiting_since = self._now()
        if self.transport is None:
            return
        if self._refused is not None and not self._queue and self.transport.can_write_eof():
            # The client may still be sending. Closing at once would reset the connection and lose the answer, so only
            # our half is closed; the client's end, or the server's sweep, closes the rest.
            self.transport.write_eof()
        elif not keep_alive:
            self._queue.clear()
            self.transport.close()
        else:
            self._go_on()

    def close_idle(self, since: float) -> None:
        """Close the connection if nothing was owed to the client and nothing came from it, after ``since``."""
        if self.idle and self._waiting_since <= since and self.transport is not None:
            self.transport.close()

    def cut(self) -> None:
        """Break the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def _admit(self, path: str, headers: dict[str, str]) -> str | None:
        return self.state.admit(path, headers, self._peer)

    # -- one thing after the other ---------------------------------------------------------------
    def _begin(self, request: Request) -> None:
        responder = Responder(self, request)
        self._responder = responder
        if request.error is not None:
            responder.send_error(request.error, close=True)
            self.state.on_unread(request.error.status)
        else:
            self._task = self.state.handler(request, responder)

    def _go_on(self) -> None:
        """Answer the next request if one waits, and read on if there is room."""
        if self._responder is None and not self.stalled:
            if self._queue:
                request = self._queue.popleft()
                self._queued_bytes -= len(request.body)
                self._begin(request)
            elif self._continue_owed:
                self._ask_for_body()
        if not self._feeding:
            self._read_on()

    def _read_on(self) -> None:
        """Take requests out of what came, as long as there is room for them."""
        data = memoryview(self._unread)
        at = 0
        self._feeding = True
        while at < len(data) and self._refused is None and not self._full():
            self._reader.feed(data[at : at + FEED_BYTES])
            at += FEED_BYTES
        self._feeding = False
        self._unread = bytes(data[at:]) if self._refused is None else b""
        self._steer()

    def _full(self) -> bool:
        return self.stalled or len(self._queue) >= MAX_PIPELINED or self._queued_bytes >= MAX_PIPELINED_BYTES

    def _steer(self) -> None:
        """Read from the socket exactly when there is room for what comes."""
        held = self._refused is None and (bool(self._unread) or self._full())
        if held is self._held or self.transport is None or self.transport.is_closing():
            return
        self._held = held
        if held:
            self.transport.pause_reading()
            return
        self.transport.resume_reading()
        if self._reader.since is not None:
            self._reader.since = self._now()  # the time before was ours

    def _ask_for_body(self) -> None:
        self._continue_owed = False
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
