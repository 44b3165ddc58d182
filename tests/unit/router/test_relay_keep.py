"""The last bytes of a stream wait for its handle to be kept, however the two meet, and every byte goes out once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.dialect import DIALECTS, OPENAI, Dialect
from pd_router.core.fields import Api
from pd_router.core.settings import Reuse, Timeouts
from pd_router.shell.exchange import Failure, LegError
from pd_router.shell.relay import MAX_BEHIND_END, MAX_HELD, StreamRelay

FIRST = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Engine:
    """An exchange fed by hand."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False
        self.failure: Any = None
        self.idle = self.deadline = math.inf
        self.framed = True
        self.headers: list[tuple[bytes, bytes]] = []
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self.over = asyncio.Event()

    def header(self, name: bytes) -> bytes:
        return b""

    def pause(self) -> None:
        raise AssertionError("nobody is slow here")

    def take_no_framed(self) -> None:
        self.framed = False

    def abort(self, reason: Failure, detail: str) -> None:
        self.failure = LegError(reason, detail)
        self.on_end()
        self.over.set()

    async def ended(self) -> None:
        if not self.complete and self.failure is None:
            await self.over.wait()

    def finish(self, data: bytes = b"") -> None:
        self.complete = True
        if data:
            self.on_data(data)
        self.on_end()
        self.over.set()


class Client:
    """A responder that remembers."""

    def __init__(self) -> None:
        self.paused = self.gone = self.started = self.finished = False
        self.on_pause = self.on_resume = None
        self.got = b""

    def begin_stream(self, status: int, headers: Any, first: bytes) -> None:
        self.started = True
        self.got += first

    def framed_writer(self) -> None:
        return None

    def write(self, data: bytes) -> None:
        assert not self.finished
        self.got += data

    def end(self, data: bytes = b"", *, close: bool = False) -> None:
        assert not self.finished
        self.finished = True
        self.got += data


class Scene:
    """A relay that runs, and a store that answers when it is told to."""

    def __init__(self, dialect: Dialect = OPENAI) -> None:
        self.engine, self.client = Engine(), Client()
        self.kept = 0
        self.keeping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record = SimpleNamespace(first_content=lambda _: None, ended=self._ended)
        self.endings: list[Any] = []
        context = SimpleNamespace(now=lambda: 0.0, settings=SimpleNamespace(timeouts=Timeouts(), reuse=Reuse()))
        relay = StreamRelay(
            cast(Any, context),
            cast(Any, record),
            cast(Any, self.client),
            cast(Any, self.engine),
            [],
            0.0,
            dialect,
            None,
        )
        self.task = asyncio.create_task(self._run(relay))

    async def _run(self, relay: StreamRelay) -> int:
        status = await relay.run(self._keep)
        # A turn that is over drops a client whose answer is not.
        assert self.client.finished or self.client.gone
        return status

    def _ended(self, ending: Any) -> None:
        self.endings.append(ending)

    def _keep(self, *_: Any) -> asyncio.Future[None]:
        self.kept += 1
        return self.keeping


@pytest.mark.parametrize("end_first", [False, True])
@pytest.mark.parametrize("pieces", [[FIRST, LAST + DONE], [FIRST + LAST + DONE], [FIRST, LAST]])
async def test_nothing_of_the_end_is_sent_before_the_handle_is_kept(pieces: list[bytes], end_first: bool) -> None:
    scene = Scene()
    await asyncio.sleep(0)
    *begun, last = pieces
    for piece in begun:
        scene.engine.on_data(piece)
    if end_first or DONE not in last:
        scene.engine.finish(last)
    else:
        scene.engine.on_data(last)
    await asyncio.sleep(0)
    assert scene.client.got == b"".join(begun)
    assert not scene.task.done()
    scene.keeping.set_result(None)
    await asyncio.sleep(0)
    assert scene.client.got == b"".join(pieces)
    if not scene.engine.complete:
        scene.engine.finish()
    assert await scene.task == 200
    assert (scene.client.got, scene.client.finished) == (b"".join(pieces), True)
    assert (scene.kept, len(scene.endings)) == (1, 1)


async def test_a_handle_that_is_kept_in_the_moment_of_the_end() -> None:
    """The relay wakes up for the end while the news that the handle is kept is still on its way."""
    scene = Scene()
    await asyncio.sleep(0)
    scene.engine.on_data(FIRST)
    scene.engine.on_data(LAST + DONE)
    scene.engine.finish()
    scene.keeping.set_result(None)
    assert await scene.task == 200
    assert (scene.client.got, scene.client.finished) == (FIRST + LAST + DONE, True)
    assert len(scene.endings) == 1


async def test_a_client_that_leaves_meanwhile_gets_nothing_more() -> None:
    scene = Scene()
    await asyncio.sleep(0)
    scene.engine.on_data(FIRST)
    scene.engine.finish(LAST + DONE)
    scene.client.gone = True
    scene.keeping.set_result(None)
    assert await scene.task == 499
    assert scene.client.got == FIRST


# -- an end that is none -----------------------------------------------------------------------------
ERROR_FINISH = LAST.replace(b'"stop"', b'"error"')


@pytest.mark.parametrize("behind", [b"", b": ping\n\n"])
@pytest.mark.parametrize("pieces", [[FIRST, DONE], [FIRST, FIRST + DONE], [FIRST, ERROR_FINISH, DONE]])
async def test_an_error_comes_before_the_end_that_clients_stop_at(pieces: list[bytes], behind: bytes) -> None:
    scene = Scene()
    await asyncio.sleep(0)
    for piece in [*pieces, *([behind] if behind else [])]:
        scene.engine.on_data(piece)
    assert DONE not in scene.client.got
    assert not scene.engine.framed
    scene.engine.finish()
    assert await scene.task == 502
    shown = b"".join(pieces).removesuffix(DONE)
    assert scene.client.got.startswith(shown + behind)
    [error] = [event for event in scene.client.got[len(shown + behind) :].split(b"\n\n") if event]
    assert b"upstream_failed" in error
    assert (scene.kept, len(scene.endings)) == (0, 1)


async def test_a_message_that_ends_without_a_reason() -> None:
    scene = Scene(DIALECTS[Api.MESSAGES])
    await asyncio.sleep(0)
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    start = b'data: {"type":"message_start","message":{"id":"m"}}\n\n'
    delta = b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}\n\n'
    block = b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
    error = b'data: {"type":"message_delta","delta":{"stop_reason":null}}\n\n'
    for piece in (start + block, delta, error + stop):
        scene.engine.on_data(piece)
    scene.engine.finish()
    assert await scene.task == 502
    assert scene.client.got.startswith(start + block + delta + error)
    assert b"event: error" in scene.client.got
    assert stop not in scene.client.got


async def test_what_only_looks_like_the_end_is_passed_on() -> None:
    scene = Scene()
    await asyncio.sleep(0)
    word = FIRST.replace(b'"x"', b'"[DONE]"')
    scene.engine.on_data(FIRST)
    scene.engine.on_data(word)
    assert scene.client.got == FIRST + word
    assert scene.engine.framed
    scene.keeping.set_result(None)
    scene.engine.finish(LAST + DONE)
    assert await scene.task == 200
    assert scene.client.got == FIRST + word + LAST + DONE


async def test_a_reason_that_comes_behind_the_end_is_in_time() -> None:
    scene = Scene()
    await asyncio.sleep(0)
    scene.keeping.set_result(None)
    for piece in (FIRST, DONE, LAST):
        scene.engine.on_data(piece)
    scene.engine.finish()
    assert await scene.task == 200
    assert scene.client.got == FIRST + DONE + LAST


async def test_what_comes_behind_the_end_has_a_limit() -> None:
    scene = Scene()
    await asyncio.sleep(0)
    scene.engine.on_data(FIRST)
    scene.engine.on_data(DONE)
    while scene.engine.failure is None:
        scene.engine.on_data(FIRST + DONE)
        assert len(scene.client.got) < 2 * MAX_BEHIND_END
    assert await scene.task == 502
    assert DONE not in scene.client.got


async def test_what_is_held_before_content_has_a_limit() -> None:
    scene = Scene()
    await asyncio.sleep(0)
    comment = b": " + b"p" * (1 << 20) + b"\n\n"
    for _ in range(MAX_HELD >> 20):
        assert scene.engine.failure is None
        scene.engine.on_data(comment)
    assert scene.engine.failure.reason is Failure.MALFORMED
    with pytest.raises(LegError):
        await scene.task
    assert scene.client.got == b""
