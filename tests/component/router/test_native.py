"""The compiled relay of tokens changes nothing that a client, an engine or the next turn sees.

Everything here is run with it and without it, so what the first would lose, repeat or keep back shows as a difference
to what the engine sent.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pd_wire.names import KV_PARAMS
from support.rawhttp import RawAnswer, RawConnection, post
from support.scripted_bench import ScriptedBench
from support.scripted_engine import END, PREFILLED, STREAM_HEAD, Asked, chunk
from support.scripted_engine import event as spaced_event
from support.waiting import until

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
HANDLE = {
    **PREFILLED,
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_engine_id": "scripted-decode",
    "remote_block_ids": [list(range(1, 126))],
    "remote_num_tokens": 2000,
    "remote_blocks_expiry_time": 1e9,
}
IDLE_SECONDS = 4.0
BIG, MANY = "x" * 3_000, 4_500
"""More than all buffers between an engine and a client hold, and less than a reply may have to be kept."""


class Bench(ScriptedBench):
    """With the compiled relay or without it."""

    def __init__(self, native: str) -> None:
        self.native = native
        super().__init__({"--native": native, "--anonymous": "reuse", "--idle-timeout": str(IDLE_SECONDS)})

    def begins(self, messages: list[dict[str, Any]]) -> bytes:
        return post(CHAT, {"model": "tiny", "messages": messages, "stream": True})

    @property
    def epolls(self) -> list[int]:
        """How many descriptors each epoll set of the router watches."""
        folder, found = Path(f"/proc/{self.router.pid}"), []
        for entry in (folder / "fd").iterdir():
            try:
                if os.readlink(entry) == "anon_inode:[eventpoll]":
                    found.append((folder / "fdinfo" / entry.name).read_text().count("tfd:"))
            except FileNotFoundError:
                continue
        return found

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.router.pid}/fd").iterdir()))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["on", "off"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    made = Bench(request.param)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.prefill.reset()
    shared.decode.reset()
    return shared


def sent(*events: bytes) -> bytes:
    """The events in chunks, without the chunks."""
    out = b""
    for data in events:
        at = 0
        while at < len(data):
            line = data.index(b"\r\n", at)
            size = int(data[at:line], 16)
            out += data[line + 2 : line + 2 + size]
            at = line + 2 + size + 2
    return out


def last(handle: dict[str, Any] | None = None) -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]}
    return chunk(b"data: " + json.dumps(body if handle is None else {**body, KV_PARAMS: handle}).encode() + b"\n\n")


DONE = chunk(b"data: [DONE]\n\n")
ROLE = spaced_event()


def question(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"question {number} " + "word " * 500}]


PLAIN = [
    "a",
    " token",
    "",
    "é",
    "日本語",
    "😀",
    "kv_transfer_params",
    "error",
    "data: ",
    "}",
    "{",
    "[DONE]",
    "x" * 3000,
]
ODD = ['"', "\\", "\n", "\n\n", "\x00", "\t", '"kv_transfer_params":{}', "\u2028", "\\u0041"]


def tokens(choice: random.Random) -> list[str]:
    """Mostly plain ones, between two that are no space: replies with one at an end are not found by their text."""
    said = [choice.choice(PLAIN if choice.random() < 0.85 else ODD) for _ in range(choice.randint(2, 40))]
    return [">", *said, "."]


def event(text: str, *, ascii_only: bool = True, more: str = "") -> bytes:
    """As engines write them, without spaces: the compiled relay knows no others. `more`: members behind the text."""
    delta = json.dumps({"content": text}, ensure_ascii=ascii_only, separators=(",", ":"))
    delta = delta[:-1] + more + "}"
    return chunk(
        b'data: {"id":"c","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":'
        + delta.encode()
        + b',"finish_reason":null}]}\n\n'
    )


def cut(data: bytes, choice: random.Random, ends: list[int]) -> list[bytes]:
    """Pieces: most end where a chunk does, some anywhere."""
    places = {place for place in ends if choice.random() < 0.7}
    places |= {choice.randrange(1, len(data)) for _ in range(choice.choice([0, 0, 1, 4]))}
    bounds = [0, *sorted(places - {0, len(data)}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(24))
async def test_every_byte_arrives_once_and_the_next_turn_finds_the_handle(bench: Bench, seed: int) -> None:
    choice = random.Random(seed)
    said, ascii_only = tokens(choice), choice.random() < 0.5
    events = [ROLE, *(event(text, ascii_only=ascii_only) for text in said)]
    whole = b"".join((*events, last(HANDLE), DONE, END))
    ends, at = [], 0
    for one in events:
        at += len(one)
        ends.append(at)
    pieces = cut(whole, choice, ends)

    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        for piece in pieces:
            await asked.send(piece, pause=choice.choice([0, 0, 0.001, 0.003]))

    bench.decode.script = script
    messages = question(seed)
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(messages))
        answer: RawAnswer = await raw.answer(seconds=60.0)
        assert answer.body == sent(*events, last(), DONE)
        again = [
            *messages,
            {"role": "assistant", "content": "".join(said)},
            {"role": "user", "content": "and then? " + "word " * 100},
        ]
        await raw.send(bench.begins(again))
        assert (await raw.answer(seconds=60.0)).status == 200
    first, second = [asked.body for asked in bench.prefill.asked]
    assert b"scripted-decode" not in first
    assert b"scripted-decode" in second, "the reply that was kept is not the one that was sent"


@pytest.mark.parametrize("place", [0, 1, 5])
async def test_a_handle_between_what_stands_around_letters_is_cut_out(bench: Bench, place: int) -> None:
    """It begins and ends like any token."""
    hidden = f',"{KV_PARAMS}":{json.dumps(HANDLE)},"y":"z","name":"x"'
    plain = [event(f"{number} ", more=',"name":"x"') for number in range(8)]
    events = [*plain[:place], event("h", more=hidden), *plain[place:]]

    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        for one in events:
            await asked.send(one, pause=0.02)
        await asked.send(last(), DONE, END)

    bench.decode.script = script
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(7)))
        answer = await raw.answer(seconds=60.0)
    assert answer.body == sent(*plain[:place], event("h", more=',"y":"z","name":"x"'), *plain[place:], last(), DONE)


async def test_many_streams_at_once_get_their_own(bench: Bench) -> None:
    """More than one look of the pump takes."""
    count, length = 150, 12

    async def script(asked: Asked) -> None:
        await asked.read()
        name = json.loads(asked.body)["messages"][0]["content"].split()[1]
        await asked.send(STREAM_HEAD)
        for place in range(length):
            await asked.send(event(f"{name}.{place} "), pause=0.02)
        await asked.send(last(HANDLE), DONE, END)

    async def one(number: int) -> None:
        async with RawConnection(bench.router.port) as raw:
            await raw.send(bench.begins(question(number)))
            answer = await raw.answer(seconds=120.0)
        assert answer.body == sent(*(event(f"{number}.{place} ") for place in range(length)), last(), DONE)

    bench.decode.script = script
    await asyncio.gather(*(one(number) for number in range(count)))


async def rest_of(raw: RawConnection) -> bytes:
    """Of a stream, up to its last chunk."""
    data = b""
    while not data.endswith(END):
        more = await raw.some(60.0)
        assert more, data
        data += more
    return data


async def stream_until(asked: Asked, over: asyncio.Event) -> None:
    """Tokens until then, and a proper end."""
    await asked.read()
    await asked.send(STREAM_HEAD)
    while not over.is_set():
        await asked.send(event("tick "), pause=0.05)
    await asked.send(last(), DONE, END)


async def test_the_pump_is_used_and_gives_back_what_it_took(bench: Bench) -> None:
    over = asyncio.Event()
    before = sorted(bench.epolls)
    assert len(before) == (2 if bench.native == "on" else 1)

    bench.decode.script = functools.partial(stream_until, over=over)
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(1)))
        assert (await raw.some(60.0)).startswith(b"HTTP/1.1 200 ")
        if bench.native == "on":

            async def pumped() -> bool:
                return 1 in bench.epolls

            await until(pumped, seconds=60.0, pause=0.05)
        over.set()
        await rest_of(raw)

    async def as_before() -> bool:
        return bench.native == "off" or 0 in bench.epolls

    await until(as_before, seconds=60.0, pause=0.05)


async def test_a_client_that_reads_late_gets_all(bench: Bench) -> None:
    """And the next turn finds what was said meanwhile. Tokens come one by one, so that only they are in each read."""
    written = 0

    async def script(asked: Asked) -> None:
        nonlocal written
        await asked.read()
        await asked.send(STREAM_HEAD)
        while written < MANY:
            await asked.send(event(f"{written} {BIG}"), pause=0.001)
            written += 1
        await asked.send(last(HANDLE), DONE, END)

    bench.decode.script = script
    messages = question(2)
    async with RawConnection(bench.router.port, limit=1 << 16) as raw:
        await raw.send(bench.begins(messages))
        seen = -1
        while seen != written or not written:  # until nothing moves any more: every buffer is full
            seen = written
            await asyncio.sleep(1.0)
        assert written < MANY, "the router holds what its client does not take"
        answer = await raw.answer(seconds=120.0)
        assert answer.body == sent(*(event(f"{number} {BIG}") for number in range(MANY)), last(), DONE)
        said = "".join(f"{number} {BIG}" for number in range(MANY))
        again = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "and? " * 100}]
        bench.decode.reset()
        await raw.send(post(CHAT, {"model": "tiny", "messages": again}))
        assert (await raw.answer(seconds=120.0)).status == 200
    assert b"scripted-decode" in bench.prefill.asked[-1].body, "the reply that was kept is not the one that was sent"


async def test_an_engine_hears_that_the_client_left(bench: Bench) -> None:
    gone = asyncio.Event()

    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        left = asyncio.create_task(asked.left())
        while not left.done():
            try:
                await asked.send(event("tick "), pause=0.02)
            except ConnectionError:
                break
        gone.set()

    bench.decode.script = script
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(3)))
        for _ in range(20):
            assert await raw.some(60.0)
        raw.abort()
    await asyncio.wait_for(gone.wait(), 60.0)


@pytest.mark.parametrize("how", ["reset", "silent", "garbage"])
async def test_an_engine_that_fails_in_the_middle(bench: Bench, how: str) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        for _ in range(20):
            await asked.send(event("tick "), pause=0.02)
        if how == "reset":
            asked.reset()
        elif how == "garbage":
            await asked.send(b"GARBAGE\r\n\r\n")
            await asked.left()
        else:
            await asked.left()

    bench.decode.script = script
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(4)))
        answer = await raw.answer(seconds=60.0)
    ticks = sent(*[event("tick ")] * 20)
    assert answer.body.startswith(ticks)
    rest = answer.body.removeprefix(ticks)
    assert rest.startswith(b'data: {"error"')
    assert b"tick" not in rest
    bench.decode.reset()

    async def healed() -> bool:
        async with RawConnection(bench.router.port) as raw:
            await raw.send(post(CHAT, {"model": "tiny", "messages": question(4)}))
            return (await raw.answer(seconds=60.0)).status == 200

    await until(healed, seconds=90.0, pause=0.2)


async def test_tokens_that_only_the_pump_sees_keep_a_stream_alive(bench: Bench) -> None:
    """For longer than an engine may be silent."""
    loop = asyncio.get_running_loop()

    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        until_then = loop.time() + 1.5 * IDLE_SECONDS
        while loop.time() < until_then:
            await asked.send(event("tick "), pause=0.1)
        await asked.send(last(), DONE, END)

    bench.decode.script = script
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(5)))
        answer = await raw.answer(seconds=60.0)
    assert answer.body.endswith(sent(last(), DONE))


async def test_descriptors_come_back(bench: Bench) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD)
        for _ in range(5):
            await asked.send(event("tick "), pause=0.005)
        await asked.send(last(), DONE, END)

    async def turn(number: int) -> None:
        async with RawConnection(bench.router.port) as raw:
            await raw.send(bench.begins(question(number)))
            assert (await raw.answer(seconds=60.0)).status == 200

    bench.decode.script = script
    await turn(0)
    before = bench.descriptors
    for number in range(40):
        await turn(number)

    async def back() -> bool:
        return bench.descriptors <= before

    await until(back, seconds=60.0, pause=0.2)


@pytest.mark.parametrize("native", ["on", "off"])
async def test_a_router_that_is_told_to_end_finishes_its_streams(native: str) -> None:
    bench, over = Bench(native), asyncio.Event()
    await bench.start()

    bench.decode.script = functools.partial(stream_until, over=over)
    async with RawConnection(bench.router.port) as raw:
        await raw.send(bench.begins(question(6)))
        assert await raw.some(60.0)
        os.kill(bench.router.pid, signal.SIGTERM)
        await asyncio.sleep(0.5)
        over.set()
        rest = await rest_of(raw)
    assert b"[DONE]" in rest
    await bench.stop()


async def test_it_can_be_asked_for_where_it_was_not_compiled(tmp_path: Path) -> None:
    for package in (ROOT / "router/pd_router", ROOT / "connector/pd_wire"):
        ignore = shutil.ignore_patterns("__pycache__", "pump.so")
        shutil.copytree(package, tmp_path / package.name, ignore=ignore)
    flags = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefill", "http://127.0.0.1:1"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "pd_router", *flags, "--decode", "http://127.0.0.1:2", "--native", "on"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--native" in done.stderr
    assert "python -m pd_router.native" in done.stderr
