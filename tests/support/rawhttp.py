"""HTTP/1.1 by hand over one socket, for what a client library would put right by itself.

Separate because framing tests must send exactly the bytes they name and see exactly the bytes that come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One response as it came: ``head`` with the status line, ``body`` without chunk framing."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str | None:
        """First header with this name, in any case."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return None

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawConnection:
    """One connection; use as a context manager."""

    def __init__(self, port: int, limit: int = 1 << 24) -> None:
        """``limit``: bytes that are read ahead; a small one makes a client that leaves data in the socket."""
        self._port, self._limit = port, limit

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=self._limit)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def send(self, data: bytes) -> None:
        """Write these bytes."""
        self._writer.write(data)
        await self._writer.drain()

    def abort(self) -> None:
        """Drop the connection without goodbye."""
        self._writer.transport.abort()

    async def answer(self, *, head_only: bool = False, seconds: float = 30.0) -> RawAnswer:
        """Read one response; interim 1xx answers are responses too. Raises EOFError when the connection ends in it."""
        async with asyncio.timeout(seconds):
            head = (await self._reader.readuntil(b"\r\n\r\n"))[:-4]
            status = int(head.split(b" ", 2)[1])
            found = RawAnswer(status, head, b"")
            if head_only or status < 200 or status in (204, 304):
                return found
            if "chunked" in (found.header("transfer-encoding") or ""):
                return RawAnswer(status, head, await self._chunks())
            length = found.header("content-length")
            body = await (self._reader.readexactly(int(length)) if length is not None else self._reader.read())
            return RawAnswer(status, head, body)

    async def some(self, seconds: float = 10.0) -> bytes:
        """Whatever comes next, as it is; empty at the end of the connection."""
        async with asyncio.timeout(seconds):
            return await self._reader.read(65536)

    async def at_end(self, seconds: float = 5.0) -> bool:
        """Whether the other side ends the connection, sending nothing more."""
        try:
            return await self.some(seconds) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async def _chunks(self) -> bytes:
        body = b""
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = await self._reader.readexactly(size + 2)
            if size == 0:
                return body
            body += piece[:-2]


def post(path: str, body: Mapping[str, Any] | bytes, *lines: str, host: str = "router.example") -> bytes:
    """A POST with a Content-Length, plus these header lines."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    extra = "".join(f"{line}\r\n" for line in lines)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return (head + extra + "\r\n").encode("latin-1") + raw


def chunked(path: str, body: Mapping[str, Any], size: int, *lines: str) -> bytes:
    """A POST with a chunked body in chunks of ``size`` bytes."""
    raw = json.dumps(body).encode()
    extra = "".join(f"{line}\r\n" for line in lines)
    head = f"POST {path} HTTP/1.1\r\nHost: router.example\r\nTransfer-Encoding: chunked\r\n{extra}\r\n"
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
