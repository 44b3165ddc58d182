"""One request of a client is one request at each engine, whatever its framing pretends (RP-13, RP-21).

Each attack is followed at once by a second request, which a server that read the first one's framing otherwise would
serve. The engines keep the raw bytes of what they got. What is refused is answered with an error and the connection
ends; nothing of it is forwarded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.framing_attacks import INNER, LENGTH, OTHER_REFUSALS, REFUSED, SERVED, request
from support.raw_engine import RawEngine
from support.rawhttp import RawAnswer, RawConnection
from support.router_process import RouterProcess


class Bench:
    """A router between two raw engines."""

    def __init__(self) -> None:
        self.engines = [RawEngine("prefill"), RawEngine("decode")]

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()
        flags = {"--max-body-bytes": "1000000"}
        self.router = RouterProcess([self.engines[0].url], [self.engines[1].url], flags)
        await self.router.start()

    async def stop(self) -> None:
        await self.router.stop()
        log = self.router.log
        self.router.discard()
        for engine in self.engines:
            await engine.stop()
        assert "Traceback" not in log, log

    def forget(self) -> None:
        for engine in self.engines:
            engine.more = b""
            for data in engine.sent.values():
                data.clear()

    @property
    def requests(self) -> list[int]:
        return [engine.requests for engine in self.engines]

    @property
    def smuggled(self) -> int:
        return sum(bytes(data).count(b"SMUGGLED") for engine in self.engines for data in engine.sent.values())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.forget()
    return shared


async def answers(bench: Bench, data: bytes, *, pieces: int = 0) -> tuple[list[RawAnswer], bool]:
    """Everything that comes back until the router closes or serves what follows; and whether it closed."""
    found: list[RawAnswer] = []
    async with RawConnection(bench.router.port) as raw:
        try:
            if pieces:
                for start in range(0, len(data), pieces):
                    await raw.send(data[start : start + pieces])
                    await asyncio.sleep(0)
            else:
                await raw.send(data)
            while True:
                found.append(await raw.answer())
                if len(found) == 3:
                    return found, False
        except (EOFError, ConnectionError):
            return found, True


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_and_closed(bench: Bench, name: str) -> None:
    found, closed = await answers(bench, REFUSED[name] + INNER)
    assert [answer.status for answer in found] == [400]
    assert found[0].json["error"]["type"] == "invalid_request_error"
    assert closed
    assert (bench.requests, bench.smuggled) == ([0, 0], 0)


@pytest.mark.parametrize("name", OTHER_REFUSALS)
async def test_refused_otherwise_and_closed(bench: Bench, name: str) -> None:
    data, status = OTHER_REFUSALS[name]
    found, closed = await answers(bench, data + INNER)
    assert ([answer.status for answer in found], closed) == ([status], True)
    assert (bench.requests, bench.smuggled) == ([0, 0], 0)


@pytest.mark.parametrize("pieces", [0, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", SERVED)
async def test_served_as_one_and_the_next_as_one(bench: Bench, name: str, pieces: int) -> None:
    data, status = SERVED[name]
    last = request(b"Content-Length: 2", b"Connection: close", body=b"{}")
    found, _ = await answers(bench, data + INNER + last, pieces=pieces)
    assert [answer.status for answer in found] == [status, 200, 400]
    served = 2 if status == 200 else 1
    assert bench.requests == [served, served]
    assert bench.smuggled == 2
    for engine in bench.engines:
        for sent in engine.sent.values():
            assert b"chunked" not in bytes(sent).lower()
            assert b"x-t" not in bytes(sent).lower()
            assert b"authorization" not in bytes(sent).lower()


@pytest.mark.parametrize("garbage", [b"\x00\x01\x02", b"GARBAGE\r\n\r\n", b"}\r\n" + INNER, b"0\r\n\r\n" + INNER])
@pytest.mark.parametrize("name", SERVED)
async def test_garbage_behind_a_request_is_no_second_one(bench: Bench, name: str, garbage: bytes) -> None:
    data, status = SERVED[name]
    found, closed = await answers(bench, data + garbage)
    assert ([answer.status for answer in found], closed) == ([status, 400], True)
    served = 1 if status == 200 else 0
    assert (bench.requests, bench.smuggled) == ([served, served], 0)


async def test_a_request_in_a_body_stays_in_it(bench: Bench) -> None:
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "\r\n\r\n" + INNER.decode()}]}
    ).encode()
    found, _ = await answers(bench, request(b"Content-Length: %d" % len(body), b"Connection: close", body=body))
    assert [answer.status for answer in found] == [200]
    for engine in bench.engines:
        [sent] = [bytes(data) for data in engine.sent.values() if data]
        head, _, rest = sent.partition(b"\r\n\r\n")
        assert int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) == len(rest)
        assert b"\r" not in rest


@pytest.mark.parametrize("header", ["X-Request-ID", "Traceparent", "Tracestate", "Baggage", "Authorization"])
@pytest.mark.parametrize("text", ["a\x80\x85\xa0b", "\xff\xfe", "a" * 5000, "é: ü"])
async def test_a_forwarded_header_stays_one_line(bench: Bench, header: str, text: str) -> None:
    found, _ = await answers(bench, request(f"{header}: {text}".encode("latin-1"), LENGTH, b"Connection: close"))
    assert [answer.status for answer in found] == [200]
    for engine in bench.engines:
        [sent] = [bytes(data) for data in engine.sent.values() if data]
        head = sent.partition(b"\r\n\r\n")[0]
        assert head.count(b"\n") == head.count(b"\r\n")
        names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "more",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nSMUGGLED",
        b"HTTP/1.1 200 OK\r\ncontent-length: 80\r\n\r\nSMUGGLED",
        b"HTTP/1.1 403 SMUGGLED\r\ncontent-le",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\nSMUGGLED",
        b"SMUGGLED",
    ],
    ids=["a whole one", "half a body", "half a head", "another protocol", "garbage"],
)
async def test_an_answer_that_nobody_asked_for_reaches_no_other_client(bench: Bench, role: int, more: bytes) -> None:
    bench.engines[role].more = more
    data = request(LENGTH, b"Connection: close")
    for _ in range(4):
        found, _ = await answers(bench, data)
        assert [answer.status for answer in found] == [200]
        assert b"SMUGGLED" not in found[0].head + found[0].body
        assert found[0].json["id"] == "raw"
    connections = [data for data in bench.engines[role].sent.values() if data]
    assert len(connections) == 4, "a connection with bytes that nobody asked for was used again"
