"""Engines whose HTTP is odd: what reaches the client, how long a turn waits for them, and who is tried meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from support.rawhttp import RawAnswer, RawConnection, post
from support.scripted_bench import ScriptedBench
from support.scripted_engine import DONE, END, STREAM_HEAD, Asked, answer, chunk, event, whole
from support.waiting import until

CHAT = "/v1/chat/completions"
HANDOFF_SECONDS = 1.0
FLAGS = {
    "--first-byte-timeout": "1.5",
    "--idle-timeout": "1",
    "--answer-timeout": "4",
    "--lease": str(2 * HANDOFF_SECONDS),
    "--prefill-timeout": "10",
}


class Bench(ScriptedBench):
    """What its router counts, and how to make its engines good and bad."""

    async def samples(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/metrics") as page:
            lines = (await page.text()).splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    async def retries(self) -> float:
        samples = await self.samples()
        return sum(value for name, value in samples.items() if name.startswith("pd_router_retries_total"))

    async def state(self) -> str:
        """Of decode's breaker."""
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/debug/fleet") as page:
            fleet: list[dict[str, Any]] = await page.json()
        return next(str(engine["breaker"]) for engine in fleet if engine["role"] == "decode")

    async def heal(self) -> None:
        """Proper engines again, and a router that knows it."""
        self.prefill.reset()
        self.decode.reset()

        async def answers() -> bool:
            return (await self.ask()).status == 200

        await until(answers, seconds=90.0, pause=0.2)
        self.prefill.reset()
        self.decode.reset()

    async def ask(self, stream: bool = False, text: str = "hi", path: str = CHAT, **more: Any) -> RawAnswer:
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
        async with RawConnection(self.router.port) as raw:
            await raw.send(post(path, {**body, "stream": True} if stream else body))
            return await raw.answer(seconds=60.0)

    async def trips(self) -> None:
        """Make decode fail until its breaker is half-open."""

        async def fails(asked: Asked) -> None:
            await asked.read()
            await asked.send(whole({"error": {"message": "x", "code": 500}}, "500 Internal Server Error"))

        self.decode.script = fails
        for _ in range(2):
            assert (await self.ask()).status in (502, 503)

        async def half_open() -> bool:
            return await self.state() == "half_open"

        await until(half_open, seconds=90.0)
        self.prefill.reset()
        self.decode.reset()


async def made(flags: dict[str, str]) -> AsyncIterator[Bench]:
    bench = Bench(flags)
    await bench.start()
    yield bench
    await bench.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[Bench]:
    async for bench in made(FLAGS):
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def bench(shared: Bench) -> Bench:
    await shared.heal()
    return shared


@pytest_asyncio.fixture(loop_scope="session")
async def own() -> AsyncIterator[Bench]:
    async for bench in made({**FLAGS, "--first-byte-timeout": "30", "--answer-timeout": "30", "--lease": "6"}):
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def patient() -> AsyncIterator[Bench]:
    """No limit of time ends what is about a limit of size."""
    async for bench in made({**FLAGS, "--first-byte-timeout": "60", "--answer-timeout": "60", "--idle-timeout": "60"}):
        yield bench


# -- what reaches the client ---------------------------------------------------------------------------
TRAILERS = b"0\r\nContent-Type: text/html\r\nSet-Cookie: sid=1\r\n\r\n"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_trailers_are_no_headers_of_the_client(bench: Bench, path: str) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        await asked.send(head + chunk(json.dumps(answer()).encode()) + TRAILERS)

    bench.decode.script = script
    got = await (bench.ask() if path == CHAT else bench.ask(path=path, input="x"))
    assert got.status == 200
    assert (got.header("content-type"), got.header("set-cookie")) == ("application/json", None)
    assert b"text/html" not in got.head


async def test_the_error_comes_before_the_end_at_which_clients_stop(bench: Bench) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD + event(), event("yes"), DONE + END, pause=0.05)

    bench.decode.script = script
    got = await bench.ask(stream=True)
    assert b'"yes"' in got.body
    assert b"upstream_failed" in got.body
    assert b"[DONE]" not in got.body


async def test_a_reset_stream_is_not_clean(bench: Bench) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        events = (event("yes"), event("", "stop"))
        await asked.send(head + b"".join(one.split(b"\r\n", 1)[1][:-2] for one in events), pause=0.2)
        asked.reset()

    bench.decode.script = script
    before = (await bench.samples()).get('pd_router_endings_total{ending="truncated"}', 0.0)
    got = await bench.ask(stream=True)
    assert b"upstream_failed" in got.body
    assert (await bench.samples())['pd_router_endings_total{ending="truncated"}'] == before + 1


async def test_the_turn_after_an_early_answer_is_answered(bench: Bench) -> None:
    """The engine answers before it has read the request, and never reads the rest."""
    stopped = asyncio.Event()

    async def script(asked: Asked) -> None:
        if asked.length < 1_000_000:
            await bench.decode.normally(asked)
            return
        await asked.send(whole(answer("early")))
        await stopped.wait()
        asked.over = True

    bench.decode.script = script
    before = await bench.retries()
    assert b"early" in (await bench.ask(text="x" * 16_000_000)).body
    assert b"yes" in (await bench.ask()).body
    assert await bench.retries() == before
    stopped.set()


async def test_an_engine_that_sends_without_end_is_given_up(patient: Bench) -> None:
    async def head(asked: Asked) -> None:
        await asked.read()
        await asked.send(b"HTTP/1.1 200 OK\r\n", *[b"x-a: %b\r\n" % (b"a" * 60_000)] * 50)

    async def comments(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD, *[chunk(b": " + b"p" * 1_000_000 + b"\n\n")] * 40)

    for script, stream in ((head, False), (comments, True)):
        patient.decode.script = script
        patient.decode.asked.clear()
        got = await patient.ask(stream=stream)
        assert (got.status, len(patient.decode.asked)) == (502, 2)
        assert "larger than an answer may be" in got.json["error"]["message"]
        await patient.heal()


# -- how long a turn waits -------------------------------------------------------------------------------
@pytest.mark.parametrize("filler", [chunk(b": ping\n\n"), event()], ids=["comments", "roles"])
async def test_a_stream_without_content_is_tried_again_and_ends(bench: Bench, filler: bytes) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        await asked.send(STREAM_HEAD, *[filler] * 1000, pause=0.1)

    bench.decode.script = script
    got = await bench.ask(stream=True)
    assert (got.status, len(bench.decode.asked)) == (504, 2)
    assert b"1.5 s" in got.body


async def test_a_whole_answer_may_trickle(bench: Bench) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        raw = json.dumps(answer()).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
        await asked.send(head, *[raw[at : at + 60] for at in range(0, len(raw), 60)], pause=0.4)

    bench.decode.script = script
    assert (await bench.ask()).json["choices"][0]["message"]["content"] == "yes"
    assert len(bench.decode.asked) == 1


@pytest.mark.parametrize(("drops", "limit"), [(1, "1 s"), (100, "4 s")], ids=["silence", "the whole"])
async def test_a_504_names_the_limit_that_was_reached(bench: Bench, drops: int, limit: str) -> None:
    async def script(asked: Asked) -> None:
        await asked.read()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        await asked.send(head, *[chunk(b" ")] * drops, pause=0.2)
        await asked.left()

    bench.decode.script = script
    got = await bench.ask()
    assert (got.status, len(bench.decode.asked)) == (504, 2)
    assert f" {limit}" in got.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_comes_does_not_keep_the_turn_of_a_client_that_left(own: Bench, stream: bool) -> None:
    """Decode may be reading prefill's blocks, so it may go on: within the bound, whatever it sends."""
    begun, dropped = asyncio.Event(), asyncio.Event()

    async def script(asked: Asked) -> None:
        await asked.read()
        filler = chunk(b": ping\n\n" if stream else b" ")
        await asked.send(STREAM_HEAD if stream else STREAM_HEAD.replace(b"text/event-stream", b"application/json"))
        begun.set()
        try:
            while True:
                await asked.send(filler, pause=0.1)
        except ConnectionError:
            dropped.set()
            asked.over = True

    own.decode.script = script
    async with RawConnection(own.router.port) as raw:
        await raw.send(post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}))
        await begun.wait()
    async with asyncio.timeout(20):
        await dropped.wait()


# -- who is tried ----------------------------------------------------------------------------------------
async def test_of_many_turns_a_half_open_engine_gets_one(own: Bench) -> None:
    await own.trips()
    go = asyncio.Event()

    async def slowly(asked: Asked) -> None:
        await go.wait()
        await own.prefill.normally(asked)

    own.prefill.script = slowly
    turns = [asyncio.create_task(own.ask(text=f"{number}")) for number in range(8)]
    refused, waiting = [], turns
    while len(waiting) > 1:
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        refused += [turn.result().status for turn in done]
        waiting = list(pending)
    go.set()
    assert (await waiting[0]).status == 200
    assert refused == [503] * 7
    assert (len(own.prefill.asked), len(own.decode.asked)) == (1, 1)
    assert (await own.ask()).status == 200


async def test_who_leaves_a_trial_makes_room_for_the_next(own: Bench) -> None:
    await own.trips()
    hangs = asyncio.Event()

    async def hang(asked: Asked) -> None:
        await asked.read()
        hangs.set()
        await asked.left()

    own.decode.script = hang
    before = await own.samples()
    async with RawConnection(own.router.port) as raw:
        await raw.send(post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}))
        await hangs.wait()
        assert (await own.ask()).status == 503

    async def noticed() -> bool:
        name = 'pd_router_client_disconnects_total{stage="decode"}'
        return (await own.samples())[name] > before[name]

    await until(noticed)
    own.decode.reset()
    assert (await own.ask()).status == 200
