"""The least that a P/D router in Python can cost: forwards both legs, moves the handles, checks nothing.

Not a router: it has no errors, limits, timeouts or retries, and it goes on with the turn of a client that has left. It
is measured beside the real ones to show how much of their cost is sockets and event loop, which no check can save.

Usage: ``floor.py LISTEN_PORT PREFILL_PORT DECODE_PORT``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import httptools
import orjson
import uvloop

_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Idle connections to one engine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Leg] = []

    async def open(self) -> Leg:
        """A connection that no turn is using."""
        if self._idle:
            return self._idle.pop()
        _, leg = await asyncio.get_running_loop().create_connection(lambda: Leg(self), "127.0.0.1", self._port)
        return leg

    def keep(self, leg: Leg) -> None:
        """Take back a connection whose answer is complete."""
        self._idle.append(leg)


class Leg(asyncio.Protocol):
    """One connection to an engine; its answer goes to the turn that uses it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn: Turn | None = None
        self._parts: list[bytes] = []
        self._between_chunks = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, turn: Turn, body: bytes) -> None:
        """Send a turn's request."""
        self._turn = turn
        self._parser = httptools.HttpResponseParser(self)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        turn = self._turn
        if turn is not None and self._between_chunks and is_one_plain_event(data):
            turn.pass_on(data)
            return
        self._between_chunks = False
        self._parser.feed_data(data)
        self._hand_over()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._hand_over()
        self._between_chunks = False
        turn, self._turn = self._turn, None
        self._engine.keep(self)
        assert turn is not None
        turn.on_answer_end()

    def _hand_over(self) -> None:
        """All that one read brought, at once: each write to a client is a system call."""
        if self._parts and self._turn is not None:
            self._turn.on_answer(b"".join(self._parts))
            self._parts.clear()


def is_one_plain_event(data: bytes) -> bool:
    """Whether a read holds exactly one HTTP chunk with one event and no handle, so that it can go out as it came in."""
    head = data.find(b"\r\n", 1, 8)
    if head < 0 or not data[:head].isalnum() or b"kv_transfer_params" in data:
        return False
    return data.endswith(b"\n\n\r\n") and int(data[:head], 16) == len(data) - head - 4


class Client(asyncio.Protocol):
    """One client connection; turns on it come one after the other."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._start()

    def _start(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        turn = Turn(self._router, self._transport, orjson.loads(b"".join(self._parts)))
        self._start()
        self._router.run(turn.prefill())


class Turn:
    """One turn: prefill, then decode, then the handle is kept for the conversation's next turn."""

    def __init__(self, router: Router, transport: asyncio.Transport, body: dict[str, Any]) -> None:
        self._router = router
        self._transport = transport
        self._conversation = body.pop("conversation_id", None)
        self._body = body
        self._prefill_answer: list[bytes] | None = []

    async def prefill(self) -> None:
        """Send the prefill leg."""
        handle = self._router.handles.pop(self._conversation, None) or {"do_remote_decode": True}
        leg = await self._router.prefill.open()
        leg.send(self, orjson.dumps(self._body | {"stream": False, "max_tokens": 1, "kv_transfer_params": handle}))

    async def decode(self, handle: Any) -> None:
        """Send the decode leg."""
        leg = await self._router.decode.open()
        leg.send(self, orjson.dumps(self._body | {"kv_transfer_params": handle}))

    def pass_on(self, chunk: bytes) -> None:
        """A framed piece of the answer that goes out unchanged."""
        self._transport.write(chunk)

    def on_answer(self, data: bytes) -> None:
        """What one read brought of the running leg's answer; the canned engines send whole events."""
        if self._prefill_answer is not None:
            self._prefill_answer.append(data)
            return
        if b"kv_transfer_params" in data:
            data = self._without_handle(data)
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _without_handle(self, data: bytes) -> bytes:
        start = data.rindex(b"data: {", 0, data.index(b"kv_transfer_params"))
        end = data.index(b"\n", start)
        event = orjson.loads(data[start + 6 : end])
        self._router.handles[self._conversation] = event.pop("kv_transfer_params")
        return data[: start + 6] + orjson.dumps(event) + data[end:]

    def on_answer_end(self) -> None:
        """The leg's answer is complete."""
        if self._prefill_answer is None:
            self._transport.write(b"0\r\n\r\n")
            return
        answer = orjson.loads(b"".join(self._prefill_answer))
        self._prefill_answer = None
        self._transport.write(_STREAM_HEAD)
        self._router.run(self.decode(answer["kv_transfer_params"]))


class Router:
    """What all connections share."""

    def __init__(self, prefill_port: int, decode_port: int) -> None:
        self.prefill = Engine(prefill_port)
        self.decode = Engine(decode_port)
        self.handles: dict[str | None, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, coroutine: Any) -> None:
        """Start a coroutine and hold on to it until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _serve(listen: int, prefill: int, decode: int) -> None:
    router = Router(prefill, decode)
    server = await asyncio.get_running_loop().create_server(lambda: Client(router), "127.0.0.1", listen, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(*(int(port) for port in sys.argv[1:4])))
