"""A stream that begins while an earlier answer is still not taken must not be read from its engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.dialect import OPENAI
from pd_router.core.settings import Reuse, Timeouts
from pd_router.shell.relay import StreamRelay


class Engine:
    """An exchange that has brought nothing yet."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False
        self.failure = None
        self.idle, self.deadline = math.inf, 40.0
        self.pauses = 0

    def pause(self) -> None:
        self.pauses += 1
        self.deadline = math.inf

    def resume(self, deadline: float) -> None:
        self.deadline = deadline

    async def ended(self) -> None:
        return


@pytest.mark.parametrize("paused", [False, True])
def test_a_stream_that_begins(paused: bool) -> None:
    engine, responder = Engine(), client(paused)
    asyncio.run(relay(engine, responder, lambda: 0.0).run(lambda *_: None))
    assert engine.pauses == int(paused)


@pytest.mark.parametrize("started", [False, True])
def test_what_a_pause_leaves_of_the_time(started: bool) -> None:
    """Before its content a stream has what was left of the time for it, afterwards that of silence anew."""
    engine, responder, now = Engine(), client(False), [0.0]
    asyncio.run(relay(engine, responder, lambda: now[0]).run(lambda *_: None))
    responder.started = started
    now[0] = 30.0
    responder.on_pause()
    responder.on_pause()
    now[0] = 500.0
    responder.on_resume()
    assert engine.deadline == 500.0 + (Timeouts().idle if started else 10.0)


def client(paused: bool) -> Any:
    return SimpleNamespace(paused=paused, on_pause=None, on_resume=None, started=False)


def relay(engine: Engine, responder: Any, now: Callable[[], float]) -> StreamRelay:
    settings = SimpleNamespace(timeouts=Timeouts(), reuse=Reuse())
    return StreamRelay(
        cast(Any, SimpleNamespace(now=now, settings=settings)),
        cast(Any, None),
        cast(Any, responder),
        cast(Any, engine),
        [],
        0.0,
        OPENAI,
        None,
    )
