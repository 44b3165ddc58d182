"""What an engine's bytes may do to a router: not change the head afterwards, not poison a kept connection, not fill its
memory; and when its time is over."""

from __future__ import annotations

import asyncio
import gzip
import math
import zlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fuzz.engine_answers import OK, WHOLE, Pool
from fuzz.http_boundary import Wire
from pd_router.shell.exchange import MAX_HEAD, MAX_WHOLE, Exchange, Failure
from pd_router.shell.upstream import EngineConnection, EnginePool

CHUNKED = b"transfer-encoding: chunked\r\n"
GZIP = b"content-encoding: gzip\r\n"


class Socket(Wire):
    """A transport that may still hold a part of the request."""

    unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Asked:
    """A request was sent; the test plays the engine."""

    def __init__(self) -> None:
        self.pool, self.wire = Pool(), Socket()
        self.connection = EngineConnection(cast(Any, self.pool))
        self.connection.connection_made(self.wire)
        self.exchange = Exchange(self.connection, 1.0)
        self.pool.active.add(self.exchange)
        self.connection.send(self.exchange, b"POST / HTTP/1.1\r\n\r\n", b"")

    def gets(self, *reads: bytes) -> Exchange:
        for read in reads:
            if not self.wire.closing:
                self.connection.data_received(read)
        return self.exchange

    @property
    def kept(self) -> bool:
        return self.pool.released and not self.wire.closing

    @property
    def body(self) -> bytes:
        assert self.exchange.complete
        return b"".join(self.exchange.parts)


def head(*lines: bytes) -> bytes:
    return OK + b"".join(lines) + b"\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, *lines: bytes) -> bytes:
    return head(b"content-length: %d\r\n" % len(body), *lines) + body


# -- the head ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("apart", [False, True])
def test_trailers_are_no_headers(apart: bool) -> None:
    first = head(b"content-type: application/json\r\n", CHUNKED) + chunk(b"{}")
    last = b"0\r\nContent-Type: text/html\r\nSet-Cookie: sid=1\r\n\r\n"
    asked = Asked()
    exchange = asked.gets(first, last) if apart else asked.gets(first + last)
    assert exchange.headers == [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    assert (asked.body, asked.kept) == (b"{}", True)


@pytest.mark.parametrize("line", [b"x: " + b"a" * MAX_HEAD, b"x-a: b\r\n" * (MAX_HEAD // 4)], ids=["one", "many"])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "ended"])
@pytest.mark.parametrize("size", [1000, 10**9])
def test_a_large_head_is_no_answer(line: bytes, end: bytes, size: int) -> None:
    data = OK + line + end
    asked = Asked()
    exchange = asked.gets(*(data[at : at + size] for at in range(0, len(data), size)))
    assert exchange.failure is not None
    assert exchange.failure.reason is Failure.MALFORMED
    assert asked.wire.closing


def test_interim_answers_count_as_its_head() -> None:
    asked = Asked()
    exchange = asked.gets(*[b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"] * 10_000)
    assert exchange.failure is not None
    assert exchange.failure.reason is Failure.MALFORMED


def test_trailers_have_a_limit_as_well() -> None:
    asked = Asked()
    asked.gets(head(CHUNKED) + chunk(b"{}"), b"0\r\nx: ", *[b"a" * 1000] * 1000)
    assert asked.exchange.failure is not None
    assert asked.wire.closing


def test_a_large_read_with_a_small_head_is_an_answer() -> None:
    asked = Asked()
    asked.gets(whole(b"a" * 4 * MAX_HEAD))
    assert len(asked.body) == 4 * MAX_HEAD


# -- kept connections --------------------------------------------------------------------------------
@pytest.mark.parametrize("unsent", [0, 1])
def test_an_answer_that_came_before_the_request_was_read_ends_the_connection(unsent: int) -> None:
    asked = Asked()
    asked.wire.unsent = unsent
    asked.gets(WHOLE)
    assert asked.exchange.complete
    assert asked.kept is (unsent == 0)
    assert asked.wire.closing is (unsent != 0)


@pytest.mark.parametrize("lost", [None, ConnectionResetError()], ids=["closed", "reset"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_reset_is_no_end_of_an_answer(lost: Exception | None, version: bytes) -> None:
    asked = Asked()
    lines = b"HTTP/%b 200 OK\r\nconnection: close\r\n\r\n" % version
    exchange = asked.gets(lines + b"data: [DONE]\n\n")
    asked.connection.connection_lost(lost)
    assert exchange.complete is (lost is None)
    assert (exchange.failure is None) is (lost is None)
    assert not asked.pool.active


# -- compressed, and large ---------------------------------------------------------------------------
BODY = b'{"text": "' + b"ab" * 400 + b'"}'
MEMBERS = gzip.compress(BODY[:300]) + gzip.compress(BODY[300:301]) + gzip.compress(BODY[301:])


@pytest.mark.parametrize("size", [1, 7, 10**9])
@pytest.mark.parametrize(
    ("data", "coding"),
    [(MEMBERS, b"gzip"), (gzip.compress(BODY), b"x-gzip"), (zlib.compress(BODY), b"deflate")],
    ids=["members", "one", "zlib"],
)
def test_every_member_of_a_compressed_answer_is_read(data: bytes, coding: bytes, size: int) -> None:
    asked = Asked()
    asked.gets(head(CHUNKED, b"content-encoding: %b\r\n" % coding))
    asked.gets(*(chunk(data[at : at + size]) for at in range(0, len(data), size)), b"0\r\n\r\n")
    assert asked.body == BODY


@pytest.mark.parametrize(
    "data", [MEMBERS[:-9], MEMBERS + b"x" * 40, gzip.compress(BODY)[:-5]], ids=["cut", "more", "one"]
)
def test_damaged_members_are_no_answer(data: bytes) -> None:
    exchange = Asked().gets(whole(data, GZIP))
    assert exchange.failure is not None
    assert exchange.failure.reason is Failure.MALFORMED


def test_a_whole_answer_has_a_limit() -> None:
    asked, piece = Asked(), chunk(b" " * (1 << 20))
    exchange = asked.gets(head(CHUNKED), *[piece] * (MAX_WHOLE >> 20))
    assert exchange.failure is None
    asked.gets(chunk(b" "))
    assert exchange.failure is not None
    assert exchange.failure.reason is Failure.MALFORMED
    assert exchange.parts == []


def bomb(size: int) -> bytes:
    """That many bytes of a gzip member, not ended; few of them are ever in memory."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(size >> 20)) + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_compressed_answer_becomes_has_the_same_limit(streamed: bool) -> None:
    asked, sizes = Asked(), list[int]()
    asked.gets(head(CHUNKED, GZIP))
    if streamed:
        asked.exchange.on_data = lambda data: sizes.append(len(data))
    asked.gets(chunk(bomb(MAX_WHOLE + (1 << 20))))
    assert asked.exchange.failure is not None
    assert asked.exchange.failure.reason is Failure.MALFORMED
    assert (asked.exchange.parts, sizes) == ([], [])


# -- time ----------------------------------------------------------------------------------------------
class Timed:
    """An exchange in a pool whose clock stands where the test says."""

    def __init__(self, within: float) -> None:
        self.now = 0.0
        loop = cast(Any, SimpleNamespace(time=lambda: self.now))
        self.pool = EnginePool.__new__(EnginePool)
        self.pool._loop, self.pool._idle, self.pool.active = loop, cast(Any, {}), set()
        self.paused = False
        conn = SimpleNamespace(lane=None, pumping=None, close=lambda: None, pause=lambda: None, resume=self._resumed)
        self.exchange = Exchange(cast(Any, conn), within)
        self.exchange.on_data = lambda _: None
        self.pool.active.add(self.exchange)

    def _resumed(self) -> None:
        self.paused = False

    def until_given_up(self, every: float, most: float = 1000.0) -> float:
        """Something comes every so many seconds. Returns when the exchange was given up."""
        while self.exchange.failure is None and self.now < most:
            self.now += every
            self.exchange.got_data(b": ping\n\n")
            self.pool.look(self.now)
        return self.now


def test_before_its_content_a_stream_is_not_kept_alive_by_bytes() -> None:
    timed = Timed(60.0)
    assert timed.until_given_up(1.0) == pytest.approx(61.0)


def test_a_trickle_is_an_answer_until_its_limit() -> None:
    timed = Timed(60.0)
    timed.exchange.limit_silence(2.0, 0.0)
    assert timed.until_given_up(1.0) == pytest.approx(61.0)
    assert timed.exchange.failure is not None
    assert timed.exchange.failure.silence == 0.0


def test_silence_in_an_answer_is_said_to_be_it() -> None:
    timed = Timed(60.0)
    timed.exchange.limit_silence(2.0, 0.0)
    timed.now = 1.0
    timed.exchange.got_data(b"x")
    for at in (1.0, 2.9):
        timed.pool.look(at)
        assert timed.exchange.failure is None
    timed.pool.look(3.1)
    assert timed.exchange.failure is not None
    assert (timed.exchange.failure.reason, timed.exchange.failure.silence) == (Failure.TIMEOUT, 2.0)


@pytest.mark.parametrize("idle", [math.inf, 5.0])
def test_nothing_that_comes_moves_the_bound_of_a_client_that_left(idle: float) -> None:
    timed = Timed(60.0)
    timed.exchange.idle = idle
    timed.exchange.bound(4.0)
    assert timed.until_given_up(1.0) == pytest.approx(5.0)


def test_a_bound_reads_on_and_is_never_later_than_another() -> None:
    timed = Timed(60.0)
    timed.exchange.pause()
    timed.paused = True
    timed.exchange.bound(4.0)
    timed.exchange.bound(8.0)
    assert (timed.paused, timed.exchange.limit) == (False, 4.0)


async def test_the_pool_looks_by_itself() -> None:
    pool = EnginePool(1.0, cast(Any, None))
    timed = Timed(asyncio.get_running_loop().time() - 1.0)
    pool.active.add(timed.exchange)
    pool.start()
    await timed.exchange.ended()
    await pool.stop()
    assert timed.exchange.failure is not None
