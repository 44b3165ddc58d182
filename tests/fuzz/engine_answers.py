"""Target: bytes of an engine's answer on the router's connection to it.

What must hold for any bytes: nothing is raised; the exchange ends exactly once, well or badly; how the bytes were cut
changes nothing; and a connection goes back to the pool only if not one byte came that nobody asked for, since what
is left on it would be read as the answer to another client's request.
"""

from __future__ import annotations

import random
from typing import Any

from fuzz.http_boundary import Wire
from fuzz.mutate import TOKENS, mutate, pieces
from pd_router.shell.exchange import Exchange
from pd_router.shell.upstream import EngineConnection

BODY = b'{"choices": [{"index": 0, "finish_reason": "stop"}]}'
EVENTS = b"".join(b"%x\r\ndata: {}\n\n\r\n" % len(b"data: {}\n\n") for _ in range(3)) + b"0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CORPUS = (
    *(WHOLE, WHOLE, OK + b"transfer-encoding: chunked\r\n\r\n" + EVENTS, OK + b"connection: close\r\n\r\n" + BODY),
    *(b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n" + BODY),
    *(WHOLE.replace(b"200 OK", b"503 x"), WHOLE.replace(b"200 OK", b"101 Switching\r\nUpgrade: h2c")),
    *(WHOLE.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"), WHOLE + WHOLE, WHOLE + b"HTTP/1.1 2"),
    *(WHOLE + b"\r\n", WHOLE + b"x", OK + b"transfer-encoding: chunked\r\n\r\n" + EVENTS + WHOLE),
)
ANSWER_TOKENS = (
    *TOKENS,
    *(b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"HTTP/1.1 200 OK\r\n"),
    *(b"0\r\n\r\n", b"5\r\nhello\r\n", b"content-encoding: br\r\n", WHOLE, b"HTTP/1.1 103 Early\r\n\r\n"),
)


class Pool:
    """Takes connections back."""

    def __init__(self) -> None:
        self.active: set[Exchange] = set()
        self.released = False

    def release(self, _connection: EngineConnection) -> None:
        self.released = True

    def forget(self, _connection: EngineConnection) -> None:
        pass


class Asked:
    """One request whose answer comes in these pieces, and then the end of the connection."""

    def __init__(self, parts: list[bytes]) -> None:
        self.pool, self.wire = Pool(), Wire()
        made: Any = self.pool
        self.connection = EngineConnection(made)
        self.connection.connection_made(self.wire)
        self.exchange = Exchange(self.connection, 1.0)
        self.ends = 0
        self.exchange.on_end = self._ended
        self.connection.send(self.exchange, b"GET / HTTP/1.1\r\n\r\n", b"")
        self.kept = False
        for part in parts:
            if self.wire.closing:
                break
            self.connection.data_received(part)
        self.kept = self.pool.released and not self.wire.closing
        self.connection.connection_lost(None)

    def _ended(self) -> None:
        self.ends += 1

    @property
    def outcome(self) -> tuple[Any, ...]:
        exchange = self.exchange
        failed = exchange.failure is not None
        body = b"" if failed else b"".join(exchange.parts)
        return exchange.complete, failed, 0 if failed else exchange.status, body, self.kept


def one(rng: random.Random) -> None:
    """Make one input and judge it. Raises AssertionError, or whatever the router raises."""
    data = mutate(rng, rng.choice(CORPUS), ANSWER_TOKENS, most=3)
    whole, cut = Asked([data]), Asked(pieces(rng, data))
    for asked in (whole, cut):
        assert asked.ends == 1, "an exchange ends once"
        assert asked.exchange.complete is (asked.exchange.failure is None)
    assert whole.outcome == cut.outcome, "cutting the bytes made another answer of them"
    if whole.kept:
        assert not Asked([data, WHOLE]).kept, "an answer that nobody asked for leaves the connection in use"
