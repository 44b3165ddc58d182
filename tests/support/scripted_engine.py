"""An engine that answers each request with the bytes that a test writes, when it writes them.

Separate from the fake engine, which speaks proper HTTP: here are trailers, answers before the request was read, resets,
and streams that never come to the point.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pd_wire.names import KV_PARAMS

PREFILLED: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "scripted-prefill",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "scripted-request",
    "remote_num_tokens": 20,
}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answer(text: str = "yes", finish: str = "stop", params: dict[str, Any] | None = None) -> dict[str, Any]:
    """A whole chat answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    body = {"id": "c", "object": "chat.completion", "model": "tiny", "choices": [choice], "usage": usage}
    return body if params is None else {**body, KV_PARAMS: params}


def whole(body: Any, status: str = "200 OK", *lines: str) -> bytes:
    """An answer with a length."""
    raw = json.dumps(body).encode()
    more = "".join(f"{line}\r\n" for line in lines)
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n{more}\r\n"
    return head.encode() + raw


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str | None = None, finish: str | None = None) -> bytes:
    """One chunk of HTTP with one of a streamed chat in it."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]}
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


DONE = chunk(b"data: [DONE]\n\n")


class Asked:
    """One request at the engine. ``length`` is that of its body; ``body`` is there once `read` was awaited."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.line = head.split(b"\r\n", 1)[0].decode()
        self.length = body_length(head)
        self.body = b""
        self.over = False
        """The connection is no longer read from."""
        self._reader, self._writer = reader, writer
        self._unread = self.length

    async def read(self) -> None:
        """Take the body."""
        if self._unread:
            self.body, self._unread = await self._reader.readexactly(self._unread), 0

    async def send(self, *pieces: bytes, pause: float = 0.0) -> None:
        """Write these, each so many seconds after the one before."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(pause)

    async def left(self) -> None:
        """Wait until the router has dropped the connection."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.over = True

    def reset(self) -> None:
        """Break the connection."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        self.over = True


Script = Callable[[Asked], Awaitable[None]]


class ScriptedEngine:
    """Listens on loopback. `script` answers requests for tokens; health checks are answered anyway."""

    def __init__(self, role: Literal["prefill", "decode"]) -> None:
        self._normal = whole(answer(finish="length", params=PREFILLED) if role == "prefill" else answer())
        self.script: Script = self.normally
        self.asked: list[Asked] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def normally(self, asked: Asked) -> None:
        """What a good engine would do with a turn that is not streamed."""
        await asked.read()
        await asked.send(self._normal)

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 16)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """As it was at the start."""
        self.script = self.normally
        self.asked.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._requests(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = Asked(await reader.readuntil(b"\r\n\r\n"), reader, writer)
            if asked.line.startswith("GET /health"):
                await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            if asked.line.startswith("GET /version"):
                await asked.send(whole({"version": "0.33.0"}))
                continue
            self.asked.append(asked)
            await self.script(asked)
            if asked.over:
                return
            await asked.read()


def body_length(head: bytes) -> int:
    """What the head of a request says; 0 when it says nothing."""
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0
