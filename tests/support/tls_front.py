"""TLS in front of an engine that has none, as a server with `--ssl-certfile` looks from outside.

Separate from the fake engine, which need not know: what is tested is the router's side of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit


class TlsFront:
    """Passes the bytes of TLS connections to `target` and back.

    ``attempts`` counts handshakes that began, ``connections`` those that succeeded.
    """

    def __init__(self, target: str, context: ssl.SSLContext) -> None:
        self._target = urlsplit(target)
        self._context = context
        context.sni_callback = self._began
        self.attempts = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def start(self) -> str:
        """Listen. Returns the https URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        return f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _began(self, _connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        self.attempts += 1

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
            try:
                await asyncio.gather(_pass(reader, back), _pass(there, writer))
            finally:
                back.transport.abort()
                writer.transport.abort()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()
