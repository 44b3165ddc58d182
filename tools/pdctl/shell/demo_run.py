"""The demo's two legs: start the pair, warm it up, play the conversations, stop everything; then again the other way.

The order of work is this module's whole subject; where the pair runs is a `Ground`. Turns are played one at a time,
round-robin over the conversations: no request waits behind another, and between two turns of a conversation the engines
have served others, as in life.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from pdctl.core.commands import Urls
from pdctl.core.dialogue import DialoguePlan, words_of
from pdctl.core.measurements import Leg, TurnRecord
from pdctl.shell.console import Console
from pdctl.shell.model_maker import read_words
from pdctl.shell.observer import Observer
from pdctl.shell.player import Conversation, Reply, open_session

WARM_UP_TOKENS: Final = 2000


class Ground(Protocol):
    """Where the pair runs: processes of this machine, or pods of a cluster."""

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Both legs, in the order that costs least here."""

    async def start(self, leg: Leg) -> Urls:
        """Have the pair ready for a leg. Raises what says why it isn't."""

    async def failure(self) -> Exception:
        """Until something has ended that should serve: what to raise."""

    async def stop(self) -> None:
        """The leg is over, or failed. May be called again."""


class DemoRun:
    """Plays both legs and keeps what was measured."""

    def __init__(self, plan: DialoguePlan, conversations: int, ground: Ground, console: Console) -> None:
        self.records: list[TurnRecord] = []
        self.decisions: list[dict[str, Any]] = []
        self.stages: list[tuple[str, float]] = []
        self._plan = plan
        self._conversations = conversations
        self._ground = ground
        self._console = console

    def describe(self) -> dict[str, Any]:
        """What was played, for the file."""
        return {**asdict(self._plan), "conversations": self._conversations, "cores": len(os.sched_getaffinity(0))}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage of the demo."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.stages.append((name, time.monotonic() - begun))

    async def both_legs(self, model: Path) -> None:
        """Play both.

        Raises:
            PlayError: a turn failed.
            Exception: whatever the ground says when it can't start or something died.
        """
        words = read_words(model)
        for leg in self._ground.legs:
            name = f"reuse {leg.name}"
            try:
                with self.stage(f"{name}: start"):
                    urls = await self._ground.start(leg)
                self._console.settle()
                with self.stage(f"{name}: play"):
                    await self._unless_something_dies(self._play(leg, urls, words))
            finally:
                self._console.settle()
                with self.stage(f"{name}: stop"):
                    await self._ground.stop()

    async def _play(self, leg: Leg, urls: Urls, words: list[str]) -> None:
        async with open_session() as session:
            observer = Observer(session, urls)
            await self._warm_up(leg, session, urls, words)
            talks = [self._conversation(session, urls) for _ in range(self._conversations)]
            for turn, tokens in enumerate(self._plan.question_tokens(), start=1):
                replies = []
                for number, talk in enumerate(talks, start=1):
                    self._console.progress(
                        f"reuse {leg.name}: turn {turn} of {self._plan.turns}, conversation {number} of {len(talks)}"
                    )
                    before = await observer.counters()
                    reply = await talk.ask(words_of(words, f"{leg.value}/{number}/{turn}", tokens))
                    seen = await observer.turn(reply.request_id, before)
                    replies.append(reply)
                    if seen.decision is not None:
                        self.decisions.append({"leg": leg.value, **seen.decision})
                    self.records.append(
                        TurnRecord(
                            leg=leg,
                            conversation=number,
                            turn=turn,
                            request_id=reply.request_id,
                            prompt_tokens=reply.prompt_tokens,
                            reply_tokens=reply.reply_tokens,
                            ttft_ms=reply.ttft_ms,
                            prefill_ms=seen.prefill_ms,
                            pulled_tokens=seen.pulled_tokens,
                            reported_tokens=seen.reported_tokens,
                            transfer_ms=seen.transfer_ms,
                            ending=reply.ending,
                        )
                    )
                self._console.say(_turn_line(leg, turn, replies))

    async def _warm_up(self, leg: Leg, session: aiohttp.ClientSession, urls: Urls, words: list[str]) -> None:
        """Two turns that aren't counted: first-use costs, and the handshakes of both directions."""
        self._console.progress(f"reuse {leg.name}: warming up")
        talk = self._conversation(session, urls)
        for turn, tokens in enumerate((min(WARM_UP_TOKENS, self._plan.longest), self._plan.step), start=1):
            await talk.ask(words_of(words, f"{leg.value}/warm-up/{turn}", tokens))

    def _conversation(self, session: aiohttp.ClientSession, urls: Urls) -> Conversation:
        return Conversation(session, urls.router, urls.model, self._plan.reply)

    async def _unless_something_dies(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but stop waiting for answers when what should give them is gone."""
        working = asyncio.create_task(work)
        dying = asyncio.create_task(self._ground.failure())
        try:
            await asyncio.wait((working, dying), return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise dying.result()
            await working
        finally:
            for task in (working, dying):
                task.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)


def _turn_line(leg: Leg, turn: int, replies: list[Reply]) -> str:
    first = replies[0]
    times = ", ".join("-" if one.ttft_ms is None else f"{one.ttft_ms:,.0f}" for one in replies)
    return f"reuse {leg.name}: turn {turn}, {first.prompt_tokens or 0:,} prompt tokens, TTFT {times} ms"
