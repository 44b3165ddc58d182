"""The demo's two legs: start the pair, warm it up, play the conversations, stop everything; then again with reuse ON.

The order of work is this module's whole subject. Turns are played one at a time, round-robin over the conversations:
no request waits behind another, and between two turns of a conversation the engines have served others, as in life.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import aiohttp

from pd_operator.core.parse import parse_deployment
from pdctl.core.demo_spec import demo_document
from pdctl.core.dialogue import DialoguePlan, words_of
from pdctl.core.measurements import Leg, TurnRecord
from pdctl.shell.console import Console
from pdctl.shell.lifecycle import StartError
from pdctl.shell.local import LocalDeployment, LocalOptions
from pdctl.shell.model_maker import read_words
from pdctl.shell.observer import Observer
from pdctl.shell.player import Conversation, Reply, open_session

WARM_UP_TOKENS: Final = 2000
STOP_GRACE: Final = 5.0


class DemoRun:
    """Plays both legs and keeps what was measured."""

    def __init__(self, plan: DialoguePlan, conversations: int, out: Path, engine_python: str, console: Console) -> None:
        self.records: list[TurnRecord] = []
        self.decisions: list[dict[str, Any]] = []
        self.stages: list[tuple[str, float]] = []
        self._plan = plan
        self._conversations = conversations
        self._out = out
        self._engine_python = engine_python
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
        """Play OFF, then ON.

        Raises:
            EnginePythonError: the interpreter lacks something.
            StartError: a process died at any time or wasn't ready.
            PlayError: a turn failed.
        """
        words = read_words(model)
        for leg in Leg:
            document = demo_document(str(model), self._plan.longest, self._plan.reply, leg is Leg.ON)
            options = LocalOptions(
                log_dir=self._out / "logs" / leg.value, engine_python=self._engine_python, stop_grace=STOP_GRACE
            )
            local = LocalDeployment(parse_deployment(document), options, self._console)
            name = f"reuse {leg.name}"
            self._console.say(f"{name}: starting prefill, decode and router")
            try:
                with self.stage(f"{name}: start"):
                    await local.check()
                    await local.start()
                self._console.settle()
                with self.stage(f"{name}: play"):
                    await _unless_one_dies(local, self._play(leg, local, words))
            finally:
                self._console.settle()
                with self.stage(f"{name}: stop"):
                    await local.stop()

    async def _play(self, leg: Leg, local: LocalDeployment, words: list[str]) -> None:
        async with open_session() as session:
            observer = Observer(session, local.urls)
            await self._warm_up(leg, session, local, words)
            talks = [self._conversation(session, local) for _ in range(self._conversations)]
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

    async def _warm_up(
        self, leg: Leg, session: aiohttp.ClientSession, local: LocalDeployment, words: list[str]
    ) -> None:
        """Two turns that aren't counted: first-use costs, and the handshakes of both directions."""
        self._console.progress(f"reuse {leg.name}: warming up")
        talk = self._conversation(session, local)
        for turn, tokens in enumerate((min(WARM_UP_TOKENS, self._plan.longest), self._plan.step), start=1):
            await talk.ask(words_of(words, f"{leg.value}/warm-up/{turn}", tokens))

    def _conversation(self, session: aiohttp.ClientSession, local: LocalDeployment) -> Conversation:
        return Conversation(session, local.urls.router, local.urls.model, self._plan.reply)


async def _unless_one_dies(local: LocalDeployment, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but stop waiting for answers when a process is gone."""
    working = asyncio.create_task(work)
    dying = asyncio.create_task(local.wait_failure())
    try:
        await asyncio.wait((working, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            dead = dying.result()
            raise StartError(dead, f"{dead.exit} while conversations were played")
        await working
    finally:
        for task in (working, dying):
            task.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)


def _turn_line(leg: Leg, turn: int, replies: list[Reply]) -> str:
    first = replies[0]
    times = ", ".join("-" if one.ttft_ms is None else f"{one.ttft_ms:,.0f}" for one in replies)
    return f"reuse {leg.name}: turn {turn}, {first.prompt_tokens or 0:,} prompt tokens, TTFT {times} ms"
