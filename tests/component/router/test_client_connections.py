"""What one client can make the router hold and wait for: its end of the socket, with a clock of the test's own.

The connection runs in the test's process, on a real socket, so that what it has begun and taken can be counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from pd_router.__main__ import parse_settings
from pd_router.core.settings import Timeouts
from pd_router.shell.client import ClientConnection, ServerState
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_router.shell.server import Router
from support.rawhttp import RawConnection, post
from support.waiting import until

MIB = 1024 * 1024
KERNEL = 24 * MIB
"""More than the kernel takes for both ends of a connection."""
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TIMEOUTS = Timeouts(request=60, client=600, keep_alive=75)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A listener whose answers are the test's. `begun`: the requests in the order in which they were handed over."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.begun: list[Request] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.answer: Callable[[Request, Responder], None] = lambda _request, responder: responder.send(200, [], b"ok")
        self.open = asyncio.Event()
        self.open.set()
        self.state = ServerState(self._handle, 16 * MIB)
        self.port = 0

    def _handle(self, request: Request, responder: Responder) -> asyncio.Task[None]:
        self.begun.append(request)
        task = asyncio.create_task(self._answer(request, responder))
        self.tasks.append(task)
        return task

    async def _answer(self, request: Request, responder: Responder) -> None:
        await self.open.wait()
        self.answer(request, responder)

    async def sweep(self, seconds: float) -> None:
        """Let time pass and look at the deadlines."""
        self.clock.now += seconds
        self.state.sweep(self.clock.now, TIMEOUTS)
        await asyncio.sleep(0)


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with listening(made.state, made.clock) as port:
        made.port = port
        yield made
    for task in made.tasks:
        task.cancel()


@asynccontextmanager
async def listening(state: ServerState, now: Callable[[], float]) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: ClientConnection(state, now), "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.cut()


class Flood:
    """A client that sends and takes nothing until it is told to. `sent`: bytes that the router's end took."""

    def __init__(self, port: int) -> None:
        self.sent = 0
        self._port = port

    async def __aenter__(self) -> Flood:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", self._port))
        self._sending: asyncio.Task[None] | None = None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self.socket.close()

    def send(self, data: bytes, times: int = 1) -> None:
        """Begin to send."""
        self._sending = asyncio.create_task(self._send(data, times))

    async def _send(self, data: bytes, times: int) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        for _ in range(times):
            for start in range(0, len(data), 65536):
                await loop.sock_sendall(self.socket, view[start : start + 65536])
                self.sent += len(view[start : start + 65536])

    async def settled(self, look: Callable[[], int]) -> int:
        """Wait until a count no longer moves."""
        quiet, last = 0, look()
        while quiet < 25:
            await asyncio.sleep(0.02)
            quiet, last = (quiet + 1, last) if look() == last else (0, look())
        return last

    async def take(self, count: int) -> bytes:
        """Read so many bytes."""
        loop = asyncio.get_running_loop()
        got = bytearray()
        while len(got) < count:
            piece = await loop.sock_recv(self.socket, 65536)
            if not piece:
                break
            got += piece
        return bytes(got)


async def test_requests_are_not_read_while_answers_are_not_taken(server: Server) -> None:
    server.answer = lambda _request, responder: responder.send(200, [], b"x" * 4096)
    async with Flood(server.port) as client:
        client.send(GET * 1000, times=2000)
        await client.settled(lambda: client.sent + len(server.begun))
        assert client.sent < KERNEL
        assert 0 < len(server.begun) * 4096 < KERNEL


async def test_the_next_answer_waits_until_the_one_before_is_taken(server: Server) -> None:
    large = 32 * MIB
    server.answer = lambda _request, responder: responder.send(200, [], b"x" * (large if len(server.begun) == 1 else 1))
    async with Flood(server.port) as client:
        client.send(GET * 3)
        assert await client.settled(lambda: len(server.begun)) == 1
        await client.take(large)

        async def all_begun() -> bool:
            return len(server.begun) == 3

        await until(all_begun)


async def test_bodies_that_wait_are_bounded(server: Server) -> None:
    server.open.clear()
    body = b"x" * (12 * MIB)
    async with Flood(server.port) as client:
        client.send(post("/", body), times=12)
        await client.settled(lambda: client.sent)
        # One is begun, one more may wait.
        assert client.sent < 2 * len(body) + KERNEL
        server.open.set()

        async def all_begun() -> bool:
            return len(server.begun) == 12

        await until(all_begun, 30)
        assert all(request.body == body for request in server.begun)


async def test_small_requests_that_wait_are_bounded(server: Server) -> None:
    server.open.clear()
    async with Flood(server.port) as client:
        client.send(GET * 1000, times=3000)
        await client.settled(lambda: client.sent)
        assert client.sent < KERNEL
        connection = next(iter(server.state.connections))
        assert len(connection._queue) < 1000


async def test_a_client_that_takes_nothing_is_cut(server: Server) -> None:
    server.answer = lambda _request, responder: responder.send(200, [], b"x" * 32 * MIB)
    async with Flood(server.port) as client:
        client.send(GET * 3)
        await client.settled(lambda: len(server.begun))
        await server.sweep(TIMEOUTS.client - 1)
        assert len(server.state.connections) == 1
        await server.sweep(2)
        await until_gone(server)


async def test_a_client_that_does_not_take_its_last_answer_is_cut(server: Server) -> None:
    server.answer = lambda _request, responder: responder.send(200, [], b"x" * 32 * MIB, close=True)
    async with Flood(server.port) as client:
        client.send(GET)
        await client.settled(lambda: len(server.begun))
        await server.sweep(TIMEOUTS.client + 1)
        await until_gone(server)


async def until_gone(server: Server) -> None:
    async def gone() -> bool:
        return not server.state.connections

    await until(gone)


async def until_there(server: Server) -> None:
    async def there() -> bool:
        return bool(server.state.connections)

    await until(there)


@pytest.mark.parametrize("data", [b"", b"\r\n", b"GE", GET[:-2]], ids=["nothing", "empty line", "a word", "no end"])
async def test_a_connection_that_never_brings_a_request(server: Server, data: bytes) -> None:
    async with RawConnection(server.port) as raw:
        await raw.send(data)
        await until_there(server)
        for _ in range(20):
            await asyncio.sleep(0)
        await server.sweep(TIMEOUTS.request - 1)
        assert len(server.state.connections) == 1
        await server.sweep(2)
        assert await raw.at_end()


async def test_an_idle_connection_is_closed(server: Server) -> None:
    async with RawConnection(server.port) as raw:
        for _ in range(2):
            await raw.send(GET)
            assert (await raw.answer()).status == 200
            await server.sweep(TIMEOUTS.keep_alive - 1)
            assert len(server.state.connections) == 1
        await server.sweep(2)
        assert await raw.at_end()


async def test_a_long_answer_is_not_idle(server: Server) -> None:
    server.open.clear()
    async with RawConnection(server.port) as raw:
        await raw.send(GET + GET[:9])

        async def begun() -> bool:
            return bool(server.begun)

        await until(begun)
        await raw.send(GET[9:])
        for _ in range(20):
            await asyncio.sleep(0.001)
        await server.sweep(1_000_000)
        server.open.set()
        assert [(await raw.answer()).status for _ in range(2)] == [200, 200]


async def test_clients_above_the_limit_are_told_so(server: Server) -> None:
    refused: list[None] = []
    server.state.max_connections = lambda: 2
    server.state.on_full = lambda: refused.append(None)
    async with RawConnection(server.port) as first, RawConnection(server.port) as second:
        for raw in (first, second):
            await raw.send(GET)
            assert (await raw.answer()).status == 200
        async with RawConnection(server.port) as third:
            answer = await third.answer()
            assert (answer.status, answer.header("retry-after")) == (503, "1")
            assert answer.json["error"]["code"] == "too_many_connections"
            assert await third.at_end()
        assert len(refused) == 1
        await first.send(GET)
        assert (await first.answer()).status == 200
    await until_gone(server)
    async with RawConnection(server.port) as raw:
        await raw.send(GET)
        assert (await raw.answer()).status == 200


async def test_a_request_is_answered_when_the_router_fails_on_it(caplog: pytest.LogCaptureFixture) -> None:
    flags = "--listen 127.0.0.1:0 --admin 127.0.0.1:0 --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2"
    router: Any = Router(parse_settings(flags.split())[0])

    def fault() -> None:
        raise RuntimeError("a fault of the router")

    router.why_not_ready = fault
    async with listening(router.state, Clock()) as port, RawConnection(port) as raw:
        with caplog.at_level(logging.ERROR):
            await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
            for _ in range(2):
                answer = await raw.answer()
                assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        assert [record.exc_info is not None for record in caplog.records if record.name == "pd_router"] == [True] * 2
