"""Target: bytes of a client's connection.

What must hold for any bytes: nothing is raised; each request is answered once and in order; a refusal is a 4xx, the
last answer, and the end of the connection; how the bytes were cut changes nothing; and where another HTTP
implementation, h11, reads requests in the same bytes, they are the same ones.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import h11

from fuzz.mutate import TOKENS, mutate, pieces
from pd_router.shell.client import ClientConnection, ServerState
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from support.framing_attacks import OTHER_REFUSALS, REFUSED, SERVED

HTTP_TOKENS = (
    *TOKENS,
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: ", b"Content-Length: "),
    *(
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
        b"Host: x\r\n",
    ),
    *(b"HTTP/1.0", b"HTTP/1.1", b"chunked", b"5\r\nhello\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    *(b"Host: x\r\n", b"Authorization: Bearer a\r\n", b"X-PD-Tenant: a\r\n"),
)
CORPUS = [
    data
    for data in (*REFUSED.values(), *(data for data, _ in (*OTHER_REFUSALS.values(), *SERVED.values())))
    if len(data) < 8000
]
ANSWER = b"answered"
MAX_BODY = 4096
READ_BY_H11 = 8
"""One input in so many is read by h11, too, which takes longer than everything else here."""


class Wire(asyncio.Transport):
    """A socket that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closing = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Client:
    """One connection whose requests are answered at once."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.wire = Wire()
        state = ServerState(self._handle, MAX_BODY)
        self.connection = ClientConnection(state, lambda: 0.0)
        self.connection.connection_made(self.wire)

    def _handle(self, request: Request, responder: Responder) -> Any:
        self.requests.append(request)
        responder.send(200, [], ANSWER)

    def feed(self, parts: list[bytes]) -> None:
        for part in parts:
            if self.wire.closing:
                break
            self.connection.data_received(part)
        self.connection.connection_lost(None)

    @property
    def seen(self) -> list[tuple[str, str, bytes]]:
        return [(request.method, request.path, request.body) for request in self.requests]

    @property
    def refused(self) -> bool:
        """Not for what came behind a request that was to be the last."""
        return self.connection._refused is not None and not self.ended

    @property
    def ended(self) -> bool:
        return any(not request.keep_alive for request in self.requests)


def one(rng: random.Random) -> None:
    """Make one input and judge it. Raises AssertionError, or whatever the router raises."""
    data = mutate(rng, b"".join(rng.choice(CORPUS) for _ in range(rng.choice((1, 1, 2, 3)))), HTTP_TOKENS)
    whole, cut = Client(), Client()
    whole.feed([data])
    cut.feed(pieces(rng, data))
    assert whole.seen == cut.seen, "cutting the bytes made other requests of them"
    assert whole.refused is cut.refused, "cutting the bytes made another end of them"
    judge_answers(whole)
    for request in whole.requests:
        judge_request(request)
    if rng.randrange(READ_BY_H11) == 0:
        judge_by_h11(data, whole)


def judge_answers(client: Client) -> None:
    """One whole answer per request, in order, and the refusal at the end."""
    rest = bytes(client.wire.written).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    for request in client.requests:
        head, _, rest = rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        if request.method != "HEAD":
            assert rest.startswith(ANSWER), rest
            rest = rest[len(ANSWER) :]
    if client.refused:
        head, _, rest = rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4"), head
        assert b"\r\nconnection: close" in head
        assert client.wire.closing
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(rest) == length
    else:
        assert not rest


def judge_request(request: Request) -> None:
    """Nothing in a request can become a line of another one."""
    assert len(request.body) <= MAX_BODY
    assert "\r" not in request.path
    assert "\n" not in request.path
    assert request.path == "*" or request.path.startswith(("/", "?"))
    for name, value in request.headers.items():
        assert name == name.lower()
        assert not set(name + value) & set("\r\n\0"), (name, value)


def judge_by_h11(data: bytes, client: Client) -> None:
    """The requests that both read must be the same. h11 may read fewer, and the router may."""
    theirs = read_by_h11(data)
    for mine, other in zip(client.seen, theirs, strict=False):
        method, target, body = other
        assert mine[0] == method
        assert mine[2] == body, "another body than h11 reads"
        path = target if target.startswith("/") or target == "*" else mine[1]
        assert mine[1] == path


def read_by_h11(data: bytes) -> list[tuple[str, str, bytes]]:
    """Whole requests, up to the first thing that h11 does not take."""
    found: list[tuple[str, str, bytes]] = []
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=100_000)
    connection.receive_data(data)
    request: h11.Request | None = None
    body = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                found.append((request.method.decode("latin-1"), request.target.decode("latin-1"), body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return found
                connection.start_next_cycle()
            else:
                return found
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return found
