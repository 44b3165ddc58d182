"""The compiled relay of tokens by itself: what it passes is what the one in Python would, and nothing of it leaks.

Sockets are pairs, and nothing runs in a loop but where a stream's end has to meet one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.sse import SseFilter
from pd_router.native import SOURCE
from pd_router.shell.pump import Pump

BEFORE = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"'
AFTER = b'"},"finish_reason":null}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(letters: bytes) -> bytes:
    return chunk(BEFORE + letters + AFTER)


class Transport:
    """As much of one as the pump asks for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reading = True
        self.written = b""

    def get_extra_info(self, name: str) -> Any:
        return self.sock if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.sock.fileno() < 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data


class Source:
    """An engine's connection that hands what it gets to a filter, as the real one does by way of the relay."""

    def __init__(self, sock: socket.socket, on_data: Any = None) -> None:
        self.transport: Any = Transport(sock)
        self.between_chunks = True
        self.pumping: Any = None
        self.got: list[bytes] = []
        self.closed = False
        self._on_data = on_data

    def data_received(self, data: bytes) -> None:
        self.got.append(data)
        if self._on_data is not None:
            self._on_data(data)

    def take_passer(self, stream: SseFilter, sink: Any) -> None:
        stream.passer(sink.write)

    def close(self) -> None:
        self.closed = True


class Stream:
    """One engine and one client with the pump between them."""

    def __init__(self, pump: Pump, on_data: Any = None) -> None:
        self.engine, up = socket.socketpair()
        down, self.client = socket.socketpair()
        for one in (self.engine, up, down, self.client):
            one.setblocking(False)
        self._own = [self.engine, up, down, self.client]
        self.filter = SseFilter()
        self.filter.feed(BEFORE + b"first" + AFTER)
        self.filter.passer(lambda data: None)
        self.source, self.sink = Source(up, on_data), Transport(down)
        self.pumped = pump.adopt(self.source, self.filter, self.sink)  # type: ignore[arg-type]
        self.source.pumping = self.pumped

    def received(self) -> bytes:
        try:
            return self.client.recv(1 << 20)
        except BlockingIOError:
            return b""

    @property
    def said(self) -> str:
        assert self.pumped is not None
        self.pumped.leave()
        last = BEFORE.replace(b'"content":"', b'"') + b'"},"finish_reason":"stop"}]}\n\n'
        self.filter.feed(last)
        self.filter.flush()
        reply = self.filter.reply()
        return str(reply.message["content"]) if reply is not None else ""

    def close(self) -> None:
        if self.pumped is not None:
            self.pumped.leave()
        for one in self._own:
            one.close()


@pytest.fixture
def pump() -> Iterator[Pump]:
    loop = asyncio.new_event_loop()
    made = Pump(loop, 1000)
    yield made
    made.close()
    loop.close()


def look(pump: Pump) -> None:
    pump._run()


PIECES = st.one_of(
    st.text(max_size=8).map(lambda text: token(text.encode())),
    st.sampled_from(
        [
            token(b"plain"),
            token(b'a","kv_transfer_params":{"remote_host":"x"},"b":"c'),
            token(b"\\u0022"),
            chunk(b"data: [DONE]\n\n"),
            b"0\r\n\r\n",
            b"0" + token(b"zero"),
            token(b"UPPER").upper(),
            token(b"cut")[:-3],
            b"5;x=y\r\nhello\r\n",
            b"ffffffff\r\n",
            b"\r\n",
            chunk(BEFORE + AFTER[1:]),
        ]
    ),
)


@given(st.lists(PIECES, min_size=1, max_size=4).map(b"".join))
def test_what_passes_would_pass_in_python_with_the_same_letters(read: bytes) -> None:
    loop = asyncio.new_event_loop()
    pump = Pump(loop, 8)
    stream = Stream(pump)
    python, sent = SseFilter(), []
    python.feed(BEFORE + b"first" + AFTER)
    try:
        stream.engine.send(read)
        look(pump)
        if stream.source.got:
            assert stream.source.got == [read]
            assert stream.received() == b""
        else:
            assert stream.received() == read
            assert python.passer(sent.append)(read)
            python._settle()
            stream.pumped.leave()  # type: ignore[union-attr]
            stream.filter._settle()
            assert "".join(stream.filter._read().content) == "".join(python._read().content)
    finally:
        stream.close()
        pump.close()
        loop.close()


def test_plain_tokens_are_not_declined(pump: Pump) -> None:
    """Or the comparison above would compare nothing."""
    stream = Stream(pump)
    stream.engine.send(token(b"one") + token("zwölf".encode()) + token(b""))
    look(pump)
    assert stream.source.got == []
    assert stream.received() == token(b"one") + token("zwölf".encode()) + token(b"")
    stream.close()


def test_more_streams_than_one_look_takes(pump: Pump) -> None:
    streams = [Stream(pump) for _ in range(200)]
    for number, stream in enumerate(streams):
        stream.engine.send(token(b"n%d" % number))
    for _ in range(8):
        look(pump)
    assert [stream.received() for stream in streams] == [token(b"n%d" % number) for number in range(200)]
    for stream in streams:
        stream.close()


def test_a_stream_that_ends_another_of_the_same_look_and_begins_a_third_in_its_place(pump: Pump) -> None:
    third: list[Stream] = []

    def ends_second(_: bytes) -> None:
        second.pumped.leave()  # type: ignore[union-attr]
        third.append(Stream(pump))

    first = Stream(pump, ends_second)
    second = Stream(pump)
    first.engine.send(b"odd")
    second.engine.send(b"odder")
    look(pump)
    assert (first.source.got, second.source.got) == ([b"odd"], [b"odder"])
    assert third[0].source.got == []
    third[0].engine.send(token(b"x"))
    look(pump)
    assert third[0].received() == token(b"x")
    for stream in (first, second, *third):
        stream.close()


def test_a_stream_with_much_for_python_leaves(pump: Pump) -> None:
    stream = Stream(pump)
    for _ in range(7):
        stream.engine.send(chunk(b"data: {}\n\n"))
        look(pump)
    assert stream.source.pumping is None
    assert stream.source.transport.reading
    stream.close()


def test_what_a_client_does_not_take_goes_to_the_loop(pump: Pump) -> None:
    stream = Stream(pump)
    sent = got = b""
    while stream.source.pumping is not None:
        stream.engine.send(token(b"x" * 1000))
        sent += token(b"x" * 1000)
        look(pump)
    while more := stream.received():
        got += more
    assert stream.sink.written
    assert got + stream.sink.written == sent
    assert stream.source.got == []
    stream.close()


@pytest.mark.parametrize("kind", ["close", "nothing"])
def test_an_end_is_left_to_the_loop(pump: Pump, kind: str) -> None:
    stream = Stream(pump)
    if kind == "close":
        stream.engine.close()
    look(pump)
    assert (stream.source.pumping is None) == (kind == "close")
    assert stream.source.transport.reading == (kind == "close")
    stream.close()


def test_no_more_than_a_reply_may_have_is_kept(pump: Pump) -> None:
    stream = Stream(pump)
    assert stream.pumped is not None
    stream.pumped.leave()
    stream.filter._max_kept = stream.filter._kept + 150
    stream.pumped = stream.source.pumping = pump.adopt(stream.source, stream.filter, stream.sink)  # type: ignore[arg-type]
    for _ in range(2):
        stream.engine.send(token(b"x"))
        look(pump)
    assert stream.received() == token(b"x")
    assert stream.source.got == [token(b"x")]
    stream.close()


def test_nothing_is_left_open(pump: Pump) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        streams = [Stream(pump) for _ in range(70)]
        for stream in streams:
            stream.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_sockets_that_are_none(pump: Pump) -> None:
    stream = Stream(pump)
    stream.close()
    before = set(os.listdir("/proc/self/fd"))
    assert pump.library.pump_adopt(pump.pump, 1 << 20, 1 << 20, 10) < 0
    assert pump.library.pump_adopt(pump.pump, pump._fd, 1 << 20, 10) < 0
    assert set(os.listdir("/proc/self/fd")) == before


PROGRAM = r"""
#include "pump.c"
#include <stdio.h>
static unsigned next = 1;
static unsigned rnd(unsigned n) { next = next * 1103515245u + 12345u; return (next >> 16) % n; }
int main(void)
{
    struct pump *pump = pump_new();
    int up[100][2], down[100][2], slot[100];
    char sink[65536];
    const char *odd[] = {"5\r\n", "x", "\r\n", "ffff\r\n", "3\r\nabc\r\n", "0\r\n\r\n", "c\r\nBEFOREabAFTE", "R\r\n"};
    for (int i = 0; i < 100; i++) {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, up[i]) ||
            socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, down[i]))
            return 2;
        slot[i] = pump_adopt(pump, up[i][1], down[i][0], 100000);
        pump_tune(pump, slot[i], "BEFORE", 6, "AFTER", 5);
    }
    for (int round = 0; round < 20000; round++) {
        int i = (int)rnd(100);
        char text[64];
        if (rnd(3)) {
            int letters = (int)rnd(20);
            int size = snprintf(text, sizeof text,
                                "%x\r\nBEFORE%.*sAFTER\r\n", 11 + letters, letters,
                                "abcdefghijklmnopqrst");
            if (write(up[i][0], text, (size_t)size - (rnd(9) ? 0 : rnd((unsigned)size))) < 0) {}
        } else {
            const char *one = odd[rnd(8)];
            if (write(up[i][0], one, strlen(one)) < 0) {}
        }
        int count = pump_run(pump);
        for (int e = 0; e < count; e++)
            if (pump->events[e].kind != ENDED && pump->events[e].data[0] == 1)
                return 3;
        if (!rnd(50)) {
            pump_take(pump, slot[i]);
            if (pump->taken.size && pump->taken.letters[pump->taken.size - 1] == 1)
                return 4;
            pump_release(pump, slot[i]);
            slot[i] = pump_adopt(pump, up[i][1], down[i][0], rnd(2000));
            pump_tune(pump, slot[i], "BEFORE", 6, "AFTER", 5);
        }
        if (read(down[i][1], sink, sizeof sink) < 0) {}
    }
    pump_free(pump);
    return 0;
}
"""


def test_with_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    (tmp_path / "main.c").write_text(PROGRAM)
    program = tmp_path / "main"
    subprocess.run(
        [
            *(compiler, "-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
            *('-DSOURCE="x"', f"-I{SOURCE.parent}", "-o", str(program), str(tmp_path / "main.c")),
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
