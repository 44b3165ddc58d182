"""One HTTP/1.1 connection to an engine, and the pool that keeps them.

Separate from the turn so that everything about sockets on the engine side (connect, keep-alive, deadlines,
back-pressure) is decided here; the turn sees an `Exchange`.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from typing import Any

import httptools

from pd_router.core.sse import SseFilter
from pd_router.shell.exchange import MAX_HEAD, Address, Exchange, Failure, Lane, LegError, Pumping
from pd_router.shell.pump import Pump
from pd_router.shell.tls import EngineTls

# uvicorn, vLLM's server, closes a connection that was idle for 5 s; ours must be gone before that, or a request races
# the close and fails without having been read.
IDLE_SECONDS = 4.0
MAX_IDLE_PER_ENGINE = 256
SWEEP_SECONDS = 0.05
_HEAD_TOO_LARGE = f"its head or its framing is larger than {MAX_HEAD} bytes"


class EngineConnection(asyncio.Protocol):
    """The socket. Owned by the pool while idle, by one exchange while busy."""

    __slots__ = (
        "_head_size",
        "_keep_alive",
        "_parser",
        "_parts",
        "_paused",
        "_without_body",
        "between_chunks",
        "exchange",
        "idle_since",
        "lane",
        "on_body",
        "peer",
        "pool",
        "pumping",
        "transport",
    )

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.idle_since = 0.0
        self.peer = ""
        self._parser: Any = None
        self._keep_alive = False
        self._paused = False
        self.between_chunks = False
        self._head_size = self._without_body = 0
        """Bytes of header lines, and of reads since the last one that had body bytes in it."""
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self.lane: Lane | None = None
        self.pumping: Pumping | None = None

    # -- asyncio.Protocol -----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if peer else ""

    def data_received(self, data: bytes) -> None:
        lane = self.lane
        if lane is not None and self.between_chunks and lane(data):
            self.exchange.fresh = True  # type: ignore[union-attr]  # there is a lane only while there is an exchange
            return
        if self._parser is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(LegError(Failure.MALFORMED, str(error)))
            self.close()
            return
        if self._parts:
            self._without_body = 0
        else:
            self._without_body += len(data)
            if self._without_body > MAX_HEAD and self.exchange is not None:
                self.exchange.abort(Failure.MALFORMED, _HEAD_TOO_LARGE)
                return
        self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_pump()
        self.transport = None
        exchange = self.exchange
        if exchange is not None:
            if (
                exc is None  # a reset is no end, whatever came before it
                and exchange.status
                and not self._keep_alive
                and not exchange.header(b"content-length")
                and not _is_chunked(exchange)
            ):
                # A body that ends with the connection: the only case in which a close is the end.
                self.exchange = None
                self.pool.active.discard(exchange)
                exchange.finish()
            else:
                self._fail(LegError(Failure.CLOSED, str(exc) if exc else ""))
        self.pool.forget(self)

    # -- httptools ------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self.exchange is None:
            self.close()  # an answer that nobody asked for; the next request here would get it, or its rest

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self.exchange
        if exchange is None or exchange.status:
            return  # a trailer: the head is judged, and no client is told what came behind the body
        self._head_size += len(name) + len(value) + 4
        exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            exchange.headers.clear()
            return
        if self._head_size > MAX_HEAD:
            exchange.abort(Failure.MALFORMED, _HEAD_TOO_LARGE)
            return
        self._keep_alive = self._parser.should_keep_alive()
        exchange.got_head(status)

    def on_chunk_header(self) -> None:
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        self.between_chunks = False
        self.lane = None
        self._leave_pump()
        exchange = self.exchange
        if exchange is None or not exchange.status:
            return
        exchange.complete = True
        self._hand_over()
        self.exchange = None
        self.pool.active.discard(exchange)
        if (
            self._keep_alive
            and self.transport is not None
            and not self._paused
            and exchange.failure is None
            # Answered before it was read: the next request would wait behind the rest of this one, perhaps for ever.
            and not self.transport.get_write_buffer_size()
        ):
            self.pool.release(self)
        else:
            self.close()
        exchange.finish()

    # -- what exchange and pool call ------------------------------------------------------------
    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Write a request; the answer goes to `exchange`."""
        self.exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self.between_chunks = False
        self._head_size = self._without_body = 0
        self.lane = None
        self._parts.clear()
        assert self.transport is not None
        self.transport.writelines((head, body))

    def pump_to(self, stream: SseFilter, sink: asyncio.Transport) -> Pumping | None:
        """Let tokens go to a client without Python where that is possible, until either side has something else."""
        pump, exchange = self.pool.pump, self.exchange
        # Without chunks the end of the connection is the answer's, and a reset, which only one read tells, is none.
        if pump is None or exchange is None or self.transport is None or self._paused:
            return None
        if _is_chunked(exchange):
            self.pumping = pump.adopt(self, stream, sink)
        return self.pumping

    def take_passer(self, stream: SseFilter, sink: asyncio.Transport) -> None:
        """Look for the stream's latest token from here on."""
        if self.lane is not None:
            self.lane = stream.passer(sink.write)

    def close(self) -> None:
        """Drop the socket now; nothing is owed to the engine."""
        self._leave_pump()
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        self._leave_pump()
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _hand_over(self) -> None:
        """Give the exchange what one read held, in one piece: each piece may cost a write to the client."""
        parts = self._parts
        if parts and self.exchange is not None:
            self.exchange.got_data(parts[0] if len(parts) == 1 else b"".join(parts))
        parts.clear()

    def _leave_pump(self) -> None:
        if self.pumping is not None:
            self.pumping.leave()

    def _fail(self, error: LegError) -> None:
        self.lane = None
        self._leave_pump()
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            self.pool.active.discard(exchange)
            exchange.fail(error)


class EnginePool:
    """Idle connections per address, and the deadlines of the busy ones."""

    def __init__(self, connect_timeout: float, tls: EngineTls, pump: Pump | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._tls = tls
        self.pump = pump
        self._idle: defaultdict[Address, deque[EngineConnection]] = defaultdict(deque)
        self._where: dict[EngineConnection, Address] = {}
        self.active: set[Exchange] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin watching deadlines. Needs a running loop."""
        self._sweeper = asyncio.create_task(self._sweep(), name="engine-deadlines")

    async def stop(self) -> None:
        """Close every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        for exchange in list(self.active):
            exchange.abort()
        for conn in list(self._where):
            conn.close()

    async def request(
        self, address: Address, head: bytes, body: bytes, within: float, *, anew: bool = False
    ) -> Exchange:
        """Send one request and return its exchange; the answer must begin `within` seconds.

        Args:
            anew: on a connection of its own, which cannot be one that the engine is closing.

        Raises:
            LegError: no connection can be made.
        """
        conn = (None if anew else self._take(address)) or await self._connect(address)
        exchange = Exchange(conn, self._loop.time() + within, self._loop)
        self.active.add(exchange)
        conn.send(exchange, head, body)
        return exchange

    def release(self, conn: EngineConnection) -> None:
        """Take a connection back whose answer is complete."""
        idle = self._idle[self._where[conn]]
        if len(idle) >= MAX_IDLE_PER_ENGINE:
            conn.close()
            return
        conn.idle_since = self._loop.time()
        idle.append(conn)

    def forget(self, conn: EngineConnection) -> None:
        """The socket is gone."""
        address = self._where.pop(conn, None)
        if address is not None:
            idle = self._idle[address]
            if conn in idle:
                idle.remove(conn)

    def fail_waiting(self, address: Address, reason: Failure) -> None:
        """Fail what still waits for a first byte from an engine that is known to be gone."""
        waiting = [
            conn.exchange for conn, where in self._where.items() if where == address and conn.exchange is not None
        ]
        for exchange in waiting:
            if not exchange.status:
                exchange.abort(reason)

    def _take(self, address: Address) -> EngineConnection | None:
        idle = self._idle[address]
        limit = self._loop.time() - IDLE_SECONDS
        while idle:
            conn = idle.pop()
            if conn.transport is not None and not conn.transport.is_closing() and conn.idle_since >= limit:
                return conn
            conn.close()
        return None

    async def _connect(self, address: Address) -> EngineConnection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, conn = await self._loop.create_connection(
                    lambda: EngineConnection(self), address.host, address.port, **self._tls.arguments(address)
                )
        except TimeoutError as error:
            raise LegError(Failure.CONNECT_TIMEOUT, address.authority) from error
        except OSError as error:
            raise LegError(Failure.CONNECT, f"{address.authority}: {error.strerror or error}") from error
        self._where[conn] = address
        return conn

    def look(self, now: float) -> None:
        """End what is overdue at `now`, on the loop's clock."""
        for exchange in list(self.active):
            if exchange.take_fresh() and exchange.idle != math.inf and exchange.deadline != math.inf:
                exchange.deadline = now + exchange.idle
            if exchange.limit < now:
                exchange.abort(Failure.TIMEOUT)
            elif exchange.deadline < now:
                exchange.abort(Failure.TIMEOUT, silence=exchange.idle if exchange.idle != math.inf else 0.0)
        for idle in self._idle.values():
            while idle and idle[0].idle_since < now - IDLE_SECONDS:
                idle.popleft().close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.look(self._loop.time())


def _is_chunked(exchange: Exchange) -> bool:
    return b"chunked" in exchange.header(b"transfer-encoding").lower()
