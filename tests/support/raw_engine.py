"""An engine that keeps every byte that it was sent, as it came, and answers whatever looks like a request.

Separate from the fake engine, whose server library would refuse or mend what must be seen here: whether one request of
a client can become two at an engine.
"""

from __future__ import annotations

import asyncio

from support.scripted_engine import PREFILLED, answer, body_length, whole

_LINES = (b"post /", b"get /v1", b"put /", b"foo /")
_HEALTH = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_RELEASE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_OWN = {b"GET /health": _HEALTH, b"GET /version": _RELEASE}


class RawEngine:
    """One engine. ``sent`` holds the bytes of each connection, by number, without what the router asks of its own
    accord: health, and the release, whenever it finds the time."""

    def __init__(self, role: str) -> None:
        self._answer = whole({**answer(params=PREFILLED if role == "prefill" else None), "id": "raw"})
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.sent: dict[int, bytearray] = {}
        self.url = ""
        self.more = b""
        """Sent behind each answer."""

    async def start(self) -> None:
        """Listen on loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def requests(self) -> int:
        """Requests for tokens that somebody could read in what was sent, strictly or not."""
        return sum(bytes(data).lower().count(word) for data in self.sent.values() for word in _LINES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = self.sent[len(self.sent)] = bytearray()
        unread = bytearray()
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                unread += data
                own = _OWN.get(bytes(unread[: unread.find(b" HTTP/")]))
                if own is not None:
                    unread.clear()
                    writer.write(own)
                    continue
                kept += data
                head, end, body = bytes(unread).partition(b"\r\n\r\n")
                if end and len(body) >= body_length(head):
                    unread.clear()
                    writer.write(self._answer + self.more)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
