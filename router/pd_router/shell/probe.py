"""Is an engine there, and is it still the same one?

An engine's HTTP server gives no identity, and a restart on the same port must not go unnoticed: its memory is new, so
every handle that names the old memory must be purged before new traffic (EL-01). The probe therefore asks `/health`
over one connection that is kept alive for as long as the engine lives. While that connection stands, it is the same
process; when it breaks, the process may be another one: the fleet is told at once, and the next probe, which follows
at once too, tells whether the engine is there. A probe that gets no answer in time makes the engine not ready but keeps
the connection, so that a slow engine is not mistaken for a new one (EL-05).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

from pd_router.shell.exchange import Address
from pd_router.shell.tls import EngineTls, tls_trouble

log = logging.getLogger("pd_router.probe")


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Seconds. A probe is late after `timeout`, and an engine is not ready after `misses` late probes in a row."""

    interval: float = 1.0
    timeout: float = 5.0
    misses: int = 3
    connect_timeout: float = 2.0


class _ProbeConnection(asyncio.Protocol):
    def __init__(self, lost: Callable[[_ProbeConnection], None]) -> None:
        self._lost = lost
        self._parser: Any = None
        self._answer: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if peer else ""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("closed before the answer"))
            self._answer.exception()  # whoever waits sees it; nobody waiting is no error
        self._lost(self)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """Send the request, or go on waiting for the answer to the last one."""
        if self._answer is None or self._answer.done():
            self._answer = asyncio.get_running_loop().create_future()
            self._parser = httptools.HttpResponseParser(self)
            assert self.transport is not None
            self.transport.write(request)
        return self._answer

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class EngineProbe:
    """Watches one engine and reports every change of `ready` and every break of continuity.

    `on_ready(bool)`: the engine answers 200 (or no longer does). `on_broken()`: the process behind the address may be
    another one from here on; called before `on_ready`. `on_peer(str)`: the address that answered.
    """

    def __init__(
        self,
        address: Address,
        settings: ProbeSettings,
        on_ready: Callable[[bool], None],
        on_broken: Callable[[], None],
        on_peer: Callable[[str], None],
        tls: EngineTls,
    ) -> None:
        self._address = address
        self._settings = settings
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._on_peer = on_peer
        self._tls = tls
        self._trouble = ""
        self._conn: _ProbeConnection | None = None
        self._wake = asyncio.Event()
        self._misses = 0
        self._request = (
            f"GET /health HTTP/1.1\r\nhost: {address.authority}\r\nuser-agent: pd-router-probe\r\n\r\n"
        ).encode()

    def nudge(self) -> None:
        """Probe now: somebody just failed to reach this engine."""
        self._wake.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                self._wake.clear()
                await self._once()
                try:
                    async with asyncio.timeout(self._settings.interval):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            if self._conn is not None:
                self._conn.close()

    async def _once(self) -> None:
        try:
            conn = await self._connection()
        except (OSError, TimeoutError) as error:
            self._misses = 0
            self._tell(tls_trouble(error))
            self._on_ready(False)
            return
        self._tell("")
        try:
            async with asyncio.timeout(self._settings.timeout):
                status = await asyncio.shield(conn.ask(self._request))
        except TimeoutError:
            self._missed()
            return
        except ConnectionResetError:
            # `_lost` has purged; whether the engine is there is what the next probe, which is due now, will tell.
            self._missed()
            return
        self._misses = 0
        self._on_ready(status == 200)
        if not conn.reusable:
            # Without keep-alive there is no continuity to watch; a close is then no news.
            self._conn = None
            conn.close()

    def _tell(self, trouble: str) -> None:
        """An engine that is there and cannot be trusted looks like one that is away; the log says which, once."""
        if trouble and trouble != self._trouble:
            log.error("engine %s: TLS: %s (--engine-ca, --engine-server-name)", self._address.authority, trouble)
        self._trouble = trouble

    def _missed(self) -> None:
        self._misses += 1
        if self._misses >= self._settings.misses:
            self._on_ready(False)

    async def _connection(self) -> _ProbeConnection:
        if self._conn is not None and self._conn.transport is not None:
            return self._conn
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._settings.connect_timeout):
            _, conn = await loop.create_connection(
                lambda: _ProbeConnection(self._lost),
                self._address.host,
                self._address.port,
                **self._tls.arguments(self._address),
            )
        self._conn = conn
        self._on_peer(conn.peer)
        return conn

    def _lost(self, conn: _ProbeConnection) -> None:
        if self._conn is conn:
            self._conn = None
            self._on_broken()
            self.nudge()
