"""The last bytes of a stream wait for its handle to be kept, however the two meet, and every byte goes out once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.dialect import OPENAI
from pd_router.core.settings import Reuse, Timeouts
from pd_router.shell.relay import StreamRelay

FIRST = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Engine:
    """An exchange fed by hand."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False
        self.failure = None
        self.idle = 0.0
        self.headers: list[tuple[bytes, bytes]] = []
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self.over = asyncio.Event()

    def header(self, name: bytes) -> bytes:
        return b""

    def pause(self) -> None:
        raise AssertionError("nobody is slow here")

    async def ended(self) -> None:
        if not self.complete:
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

    def __init__(self) -> None:
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
            OPENAI,
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
