"""Conversations that never stop talking while pods and the API server come and go.

Separate from the tests because both what happens to pods and what happens to the API server is done under load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from support.chat import Talk
from support.pod_deployment import PodDeployment
from support.waiting import until


class Load:
    """Conversations that never stop talking; each answer is checked."""

    def __init__(self, deployment: PodDeployment) -> None:
        self.deployment = deployment
        self.turns = 0
        self.pulled = 0
        self._stop = asyncio.Event()

    async def talk(self) -> None:
        """One conversation after the other until told to stop."""
        while not self._stop.is_set():
            talk = Talk(self.deployment, stream=self.turns % 2 == 0)
            for text in ("First.", "Go on.", "And then?", "Why?"):
                turn = await talk.say(talk.opening * 8 + text)
                self.turns += 1
                self.pulled += turn.pulled

    async def more(self, count: int = 10) -> None:
        """Wait for so many more turns."""
        wanted = self.turns + count

        async def done() -> bool:
            return self.turns >= wanted

        await until(done, 60.0)

    def stop(self) -> None:
        self._stop.set()


@asynccontextmanager
async def load(deployment: PodDeployment, talks: int = 4) -> AsyncIterator[Load]:
    """Keep talking while the block runs; any wrong answer or error fails it."""
    made = Load(deployment)
    async with asyncio.TaskGroup() as group:
        for _ in range(talks):
            group.create_task(made.talk())
        yield made
        made.stop()


async def listed(pods: PodDeployment) -> Callable[[], Awaitable[None]]:
    """Returns what waits until the pods were listed once more and a watch is open."""
    before = pods.api.count("watch")

    async def again() -> bool:
        return pods.api.count("watch") > before and pods.api.watching > 0

    async def wait() -> None:
        await until(again)

    return wait
