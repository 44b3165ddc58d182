"""A stream that begins while an earlier answer is still not taken must not be read from its engine."""

from __future__ import annotations

import asyncio
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
        self.idle = 0.0
        self.pauses = 0

    def pause(self) -> None:
        self.pauses += 1

    async def ended(self) -> None:
        return


@pytest.mark.parametrize("paused", [False, True])
def test_a_stream_that_begins(paused: bool) -> None:
    settings = SimpleNamespace(timeouts=Timeouts(), reuse=Reuse())
    engine = Engine()
    responder = SimpleNamespace(paused=paused, on_pause=None, on_resume=None)
    relay = StreamRelay(
        cast(Any, SimpleNamespace(now=lambda: 0.0, settings=settings)),
        cast(Any, None),
        cast(Any, responder),
        cast(Any, engine),
        [],
        0.0,
        OPENAI,
        None,
    )
    asyncio.run(relay.run(lambda *_: None))
    assert engine.pauses == int(paused)
    assert responder.on_pause == engine.pause
