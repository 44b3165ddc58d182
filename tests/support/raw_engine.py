"""An engine that keeps every byte that it was sent, as it came, and answers whatever looks like a request.

Separate from the fake engine, whose server library would refuse or mend what must be seen here: whether one request of
a client can become two at an engine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pd_wire.names import KV_PARAMS

_PREFILLED: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "raw-prefill",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "raw-request",
    "remote_num_tokens": 20,
}
_LINES = (b"post /", b"get /v1", b"put /", b"foo /")


class RawEngine:
    """One engine. ``sent`` holds the bytes of each connection, by number, without health checks."""

    def __init__(self, role: str) -> None:
        answer: dict[str, Any] = {
            "id": "raw",
            "object": "chat.completion",
            "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
        }
        if role == "prefill":
            answer[KV_PARAMS] = _PREFILLED
        self._answer = json.dumps(answer).encode()
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
                if unread.startswith(b"GET /health"):
                    unread.clear()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                kept += data
                head, end, body = bytes(unread).partition(b"\r\n\r\n")
                if end and len(body) >= _length(head):
                    unread.clear()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b%b"
                        % (len(self._answer), self._answer, self.more)
                    )
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0
