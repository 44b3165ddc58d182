"""Many conversations at once while engines fail, restart and forget: every answer given is the right one.

Combined here because each is tested alone elsewhere and wrong KV tends to hide between them: branches, edits and
regenerations under ids, ids that tenants share, clients that leave, leases that end, engines that restart, faults at
random points, pairs that can't reach each other, turns that decode serves alone. The walks are drawn from fixed seeds.
What is checked: no wrong answer, no violation at an engine, no byte of a handle at a client, and reuse that still
happens.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from support.chat import TEXT, Talk, assert_right
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind, Point

ROUNDS = 12
TALKS = 6
# Small enough that freed blocks are soon somebody else's, large enough that nobody waits for a lease to end.
BLOCKS = (("blocks", 1500), ("decoder_ttl", 60.0))
FAULTS = [
    Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503),
    Fault(Kind.STATUS, status=500),
    Fault(Kind.CLOSE),
    Fault(Kind.RESET),
    Fault(Kind.CLOSE, Point.AFTER_HEADERS),
    Fault(Kind.FINISH_ERROR, Point.BEFORE_FINISH),
    Fault(Kind.ERROR_EVENT, Point.AFTER_FIRST_CONTENT),
    Fault(Kind.TRUNCATE, Point.AFTER_FIRST_CONTENT),
    Fault(Kind.RESET, Point.BEFORE_DONE),
]


class Walk:
    """One drawn history of a deployment."""

    def __init__(self, deployment: Deployment, seed: int, name: str) -> None:
        self.deployment = deployment
        self.draw = random.Random(seed)
        self.complete = 0
        self.pulled = 0
        # Two tenants, three ids, so that ids collide within a tenant and across; the last talk has none.
        ids: list[dict[str, Any]] = [{"conversation_id": f"{name}-{number % 3}"} for number in range(TALKS - 1)]
        self.talks = [
            Talk(deployment, tenant=f"{name}-{number % 2}", opening=f"{name}, story {number % 3}. ", **fields)
            for number, fields in enumerate([*ids, {}])
        ]
        # One source per talk: turns that overlap must not change what the others draw.
        self.draws = {id(talk): random.Random(seed * 1000 + number) for number, talk in enumerate(self.talks)}

    async def run(self) -> None:
        """All rounds: turns at the same time, then something happens to the engines."""
        for number in range(ROUNDS):
            if number % 2:
                engine = self.draw.choice(self.deployment.engines)
                engine.next(Behaviour(fault=self.draw.choice(FAULTS)))
            await asyncio.gather(*(self.turn(talk) for talk in self.talks))
            for engine in self.deployment.engines:
                engine.plan.clear()
                await engine.idle(30)
            await self.event()

    async def turn(self, talk: Talk) -> None:
        """One turn of one conversation, often after the client changed its mind about the past."""
        draw = self.draws[id(talk)]
        self.change(talk, draw)
        if draw.random() < 0.1:
            await self.leave(talk, draw)
        fields: dict[str, Any] = {"max_tokens": 15} if draw.random() < 0.2 else {}
        text = draw.choice(["Go on.", "And then? " + TEXT, "Why?"])
        turn = await talk.say(text, check=False, stream=draw.random() < 0.6, **fields)
        self.pulled += turn.pulled
        ended = [event for event in turn.events if event != "[DONE]"] if turn.body["stream"] else []
        failed = turn.status != 200 or turn.error or any("error" in event for event in ended)
        if failed or any(_finish(event) == "error" for event in ended):
            # A turn may fail when its engines do; what it said until then must be right all the same.
            if turn.status == 200:
                assert self.deployment.right(turn.body).content.startswith(turn.text)
            talk.messages = talk.messages[: len(turn.body["messages"]) - 1]
            return
        assert_right(self.deployment, turn)
        self.complete += 1

    async def leave(self, talk: Talk, draw: random.Random) -> None:
        """Ask, and go away after a while without an answer."""
        asking = asyncio.create_task(talk.say("Never mind.", check=False, stream=True))
        await asyncio.sleep(draw.random() * 0.03)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    def change(self, talk: Talk, draw: random.Random) -> None:
        """Edit, cut or forget the history, now and then."""
        chance = draw.random()
        if not talk.messages or chance > 0.3:
            return
        if chance < 0.06:
            talk.messages[0] = {**talk.messages[0], "content": f"Edited {chance}. {TEXT}"}
        elif chance < 0.12:
            del talk.messages[-2:]
        elif chance < 0.18:
            talk.messages[-1] = {"role": "assistant", "content": "Never said so."}
        elif chance < 0.24:
            other = draw.choice(self.talks)
            talk.messages = list(other.messages)
        else:
            talk.messages = []

    async def event(self) -> None:
        """Something happens between two rounds."""
        engine = self.draw.choice(self.deployment.engines)
        chance = self.draw.random()
        if chance < 0.2:
            await engine.restart()
            await self.deployment.wait_ready(len(self.deployment.engines))
        elif chance < 0.3:
            other = self.draw.choice(self.deployment.engines)
            engine.connector.cut_off.add(other.name)
        elif chance < 0.4:
            for engine in self.deployment.engines:
                engine.connector.cut_off.clear()
        elif chance < 0.6:
            self.deployment.fabric.clock.advance(self.draw.choice([20.0, 40.0, 70.0]))


def _finish(event: dict[str, Any]) -> Any:
    return event["choices"][0].get("finish_reason") if event.get("choices") else None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_every_answer_is_right(deploy: Any, mode: Any, seed: int) -> None:
    flags = (("--bypass-tokens", "64"), ("--bypass-share", "1"), ("--pair-quarantine", "0.2")) if seed % 2 else ()
    deployment = await deploy(Spec(mode=mode, prefills=2, decodes=2, connector=BLOCKS, flags=flags), breaks=True)
    walk = Walk(deployment, seed, f"{mode}-{seed}")
    await walk.run()
    assert walk.complete > ROUNDS * TALKS * 0.7
    assert walk.pulled > 1000
