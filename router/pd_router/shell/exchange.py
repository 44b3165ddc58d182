"""One request to an engine and its answer, as the turn sees it: a head, then body bytes, then an end or a failure.

Separate from the connection so that what a turn may ask of an answer is in one place. Each chunk costs one callback and
no framework object; the deadline is a number that one sweeper looks at.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from pd_router.core.sse import SseFilter

MAX_HEAD: Final = 64 * 1024
"""Bytes of an answer's head, and of what is read at any time without a byte of body in it."""
MAX_WHOLE: Final = 64 * 1024 * 1024
"""Bytes of an answer that is kept until it is complete, decompressed. Embeddings of a large batch and the logprobs of a
long answer have tens of MiB; what exceeds this is no answer, and a few of them would be all of a router's memory."""


class Failure(StrEnum):
    """Why an exchange ended without a complete answer."""

    CONNECT = "connect"
    CONNECT_TIMEOUT = "connect_timeout"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    MALFORMED = "malformed"
    LOST = "engine_lost"
    ABORTED = "aborted"


Lane = Callable[[bytes], bool]
"""Takes a read that begins with an HTTP chunk, or declines it; what it takes is not parsed. Nearly every read of a
stream is one chunk as the engine wrote it, and for those the parser is half of what a token costs."""


class Pumping(Protocol):
    """A stream's way past Python, see `pd_router.shell.pump`."""

    def leave(self) -> None:
        """Go back to the loop, now. Harmless a second time."""

    def moved(self) -> bool:
        """Whether anything passed since this was last asked."""


class LegError(Exception):
    """An exchange failed; `reason` says how. `silence`: seconds without a byte, where these were too many."""

    def __init__(self, reason: Failure, detail: str = "", silence: float = 0.0) -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.silence = silence


class Address(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """The base URL."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Wire(Protocol):
    """What an exchange asks of its connection."""

    lane: Lane | None
    pumping: Pumping | None

    def pump_to(self, stream: SseFilter, sink: asyncio.Transport) -> Pumping | None:
        """Let tokens go to a client without Python, if that is possible."""

    def close(self) -> None:
        """Drop the socket now."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read on."""


class Exchange:
    """One request on one connection: head, body, end.

    `on_data` is called once per read with decoded body bytes; until it is set, bytes are kept in `parts`. `complete` is
    true already when the last bytes come. `take_framed` shortens the way of a stream, see `Lane`.
    `deadline` is on the loop's clock; the sweeper fails the exchange when it passes. While a stream runs nobody has to
    move it: the sweeper does, to `idle` seconds from then, when `fresh` says that something came. Nothing that comes
    moves `limit`, which is on the same clock.
    """

    __slots__ = (
        "_decoder",
        "_kept",
        "_loop",
        "_waiter",
        "complete",
        "conn",
        "deadline",
        "failure",
        "fresh",
        "headers",
        "idle",
        "limit",
        "on_data",
        "on_end",
        "parts",
        "status",
    )

    def __init__(self, conn: Wire, deadline: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: the running one; to ask for it each time costs a system call."""
        self.conn: Wire | None = conn
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.deadline = deadline
        self.idle = self.limit = math.inf
        self.fresh = False
        self.complete = False
        self.failure: LegError | None = None
        self.on_data: Callable[[bytes], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._decoder: _Inflater | None = None
        self._kept = 0

    # -- what the turn calls -------------------------------------------------------------------
    async def head(self) -> int:
        """Wait for the status line and headers. Returns the status; raises LegError."""
        while not self.status and self.failure is None:
            await self._wait()
        if self.failure is not None and not self.status:
            raise self.failure
        return self.status

    async def body(self) -> bytes:
        """Wait for the whole body. Raises LegError when it is cut short."""
        while not self.complete and self.failure is None:
            await self._wait()
        if self.failure is not None:
            raise self.failure
        return b"".join(self.parts)

    async def ended(self) -> None:
        """Wait until the exchange is over, well or badly; look at `failure` afterwards."""
        while not self.complete and self.failure is None:
            await self._wait()

    def header(self, name: bytes) -> bytes:
        """Value of a response header, lower-case name; empty when absent."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    def abort(self, reason: Failure = Failure.ABORTED, detail: str = "", silence: float = 0.0) -> None:
        """Drop the connection; the engine notices and aborts the request."""
        if self.conn is not None:
            conn = self.conn
            self.fail(LegError(reason, detail, silence))
            conn.close()

    def limit_silence(self, seconds: float, now: float) -> None:
        """From now on something must come every so many seconds; what was the deadline is that of the whole."""
        self.limit = min(self.limit, self.deadline)
        self.idle = seconds
        self.deadline = now + seconds

    def bound(self, until: float) -> None:
        """Nobody waits for the answer: it is read on, and must be over by `until`, whatever comes."""
        self.limit = min(self.limit, until)
        if self.conn is not None:
            self.conn.resume()

    def pause(self) -> None:
        """Stop reading from the engine: the client is slow. No deadline runs, since the engine may not go on."""
        if self.conn is not None:
            self.deadline = math.inf
            self.conn.pause()

    def take_framed(self, lane: Lane) -> None:
        """Offer reads that begin with a chunk to `lane` first."""
        if self.conn is not None and self._decoder is None:
            self.conn.lane = lane

    def pump_to(self, stream: SseFilter, sink: asyncio.Transport) -> Pumping | None:
        """Let tokens go to a client without Python where that is possible; `take_framed` comes first."""
        if self.conn is None or self.conn.lane is None:
            return None
        return self.conn.pump_to(stream, sink)

    def take_no_framed(self) -> None:
        """From here on every read is parsed."""
        if self.conn is not None:
            self.conn.lane = None
            if self.conn.pumping is not None:
                self.conn.pumping.leave()

    def resume(self, deadline: float) -> None:
        """Read on; the engine must send something before `deadline`."""
        if self.conn is not None:
            self.deadline = deadline
            self.conn.resume()

    def take_fresh(self) -> bool:
        """Whether anything came since this was last asked."""
        fresh, self.fresh = self.fresh, False
        pumping = self.conn.pumping if self.conn is not None else None
        return (pumping is not None and pumping.moved()) or fresh

    # -- what the connection calls --------------------------------------------------------------
    def got_head(self, status: int) -> None:
        """The head is complete."""
        encoding = self.header(b"content-encoding").lower()
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            # We ask for identity; a proxy in between may compress all the same, and a handle must not hide in it.
            self._decoder = _Inflater()
        elif encoding not in (b"", b"identity"):
            self.abort(Failure.MALFORMED, f"content-encoding {encoding.decode('latin-1')!r} is not supported")
            return
        self.status = status
        self._wake()

    def got_data(self, data: bytes) -> None:
        """Body bytes arrived."""
        self.fresh = True
        if self._decoder is not None:
            room = MAX_WHOLE if self.on_data is not None else MAX_WHOLE - self._kept
            try:
                data = self._decoder.inflate(data, room)
            except zlib.error:
                self.abort(Failure.MALFORMED, "the compressed body is damaged")
                return
            except OverflowError:
                self.abort(Failure.MALFORMED, _TOO_LARGE)
                return
        if self.on_data is not None:
            self.on_data(data)
            return
        self._kept += len(data)
        if self._kept > MAX_WHOLE:
            self.parts.clear()
            self.abort(Failure.MALFORMED, _TOO_LARGE)
            return
        self.parts.append(data)

    def finish(self) -> None:
        """The body is complete."""
        if self.failure is not None:
            return
        if self._decoder is not None and self._decoder.cut:
            self.fail(LegError(Failure.MALFORMED, "the compressed body is cut short"))
            return
        self.complete = True
        self.conn = None
        if self.on_end is not None:
            self.on_end()
        self._wake()

    def fail(self, error: LegError) -> None:
        """The exchange is over without an end."""
        if self.failure is None and self.conn is not None:
            self.failure = error
            self.complete = False
            self.conn = None
            if self.on_end is not None:
                self.on_end()
            self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.Future(loop=self._loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_TOO_LARGE: Final = f"the answer is larger than {MAX_WHOLE} bytes"


class _Inflater:
    """gzip or zlib. Members of gzip that follow each other are one body (RFC 1952, 2.2)."""

    __slots__ = ("_member", "cut")

    def __init__(self) -> None:
        self._member = zlib.decompressobj(47)
        self.cut = False
        """A member has begun and not ended."""

    def inflate(self, data: bytes, room: int) -> bytes:
        """Raises zlib.error for what is no such data, OverflowError for more than `room` bytes."""
        found: list[bytes] = []
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(47)
            piece = self._member.decompress(data, room + 1)  # 0 would be no limit
            room -= len(piece)
            if room < 0:
                raise OverflowError
            found.append(piece)
            data = self._member.unused_data
        self.cut = not self._member.eof
        return b"".join(found)
