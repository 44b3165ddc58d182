"""Which vLLM release each engine is, asked once per process of it: decides what its endpoints carry.

Separate from the probes because only two of the APIs depend on it, and because it changes with an engine's process and
at no other time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from pd_router.core.capabilities import Carries, Version, carries, describe, parse_version
from pd_router.core.fields import Api
from pd_router.shell.exchange import LegError
from pd_router.shell.fleet import Member
from pd_router.shell.upstream import EnginePool

ANSWER_SECONDS: Final = 2.0
FIRST_PAUSE: Final = 1.0
"""Seconds after an engine gave no version, doubled each time. Till then it counts as unknown, and turns of some APIs go
without reuse."""
LONGEST_PAUSE: Final = 16.0

Process = tuple[str, int]
_NEVER: Final = (-math.inf, 0.0)


@dataclass(slots=True)
class EngineVersions:
    """What engines answered at `/version`, by key and incarnation."""

    pool: EnginePool
    now: Callable[[], float]
    _known: dict[Process, str] = field(default_factory=dict)
    _asked: dict[Process, tuple[float, float]] = field(default_factory=dict)
    """Of those that gave none: when to ask again, and the pause before that."""
    _learning: asyncio.Task[None] | None = None

    def of(self, member: Member) -> Version | None:
        """The release, or None when it is not known."""
        return parse_version(self._known.get((member.key, member.incarnation)))

    async def carried(self, members: Iterable[Member], api: Api) -> Carries:
        """What each of these engines' endpoints carries; those that were not asked yet are asked now."""
        there = [member for member in members if member.ready]
        await self.learn(there)
        found = {carries(self.of(member), api) for member in there} or {carries(None, api)}
        return Carries(
            request=all(one.request for one in found),
            whole=all(one.whole for one in found),
            streamed=all(one.streamed for one in found),
        )

    async def learn(self, members: Iterable[Member]) -> None:
        """Ask the engines whose process has not told its version. Never raises for an engine's fault."""
        now = self.now()
        asked = [
            member
            for member in members
            if (process := (member.key, member.incarnation)) not in self._known
            and now >= self._asked.get(process, _NEVER)[0]
        ]
        if asked:
            await asyncio.gather(*map(self._ask, asked))

    def add_to(self, described: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The fleet as it is shown to people, with each engine's release and what its endpoints carry."""
        for one in described:
            text = self._known.get((one["engine"], one["incarnation"]))
            one["version"] = text
            one["carries"] = describe(parse_version(text))
        return described

    def refresh(self, members: Sequence[Member]) -> None:
        """Forget processes that are gone, and ask those that came; call now and then."""
        running = {(member.key, member.incarnation) for member in members}
        self._known = {process: text for process, text in self._known.items() if process in running}
        self._asked = {process: at for process, at in self._asked.items() if process in running}
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self.learn([one for one in members if one.ready]), name="versions")

    def stop(self) -> None:
        """Ask no more."""
        if self._learning is not None:
            self._learning.cancel()

    async def _ask(self, member: Member) -> None:
        process = (member.key, member.incarnation)
        head = (
            f"GET /version HTTP/1.1\r\nhost: {member.address.authority}\r\naccept-encoding: identity\r\n\r\n".encode()
        )
        try:
            exchange = await self.pool.request(member.address, head, b"", ANSWER_SECONDS, anew=True)
            status = await exchange.head()
            raw = await exchange.body()
            text = orjson.loads(raw).get("version") if status == 200 else None
        except (LegError, orjson.JSONDecodeError, AttributeError):
            text = None
        if isinstance(text, str) and parse_version(text) is not None:
            self._known[process] = text[:64]
        else:
            pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._asked.get(process, _NEVER)[1]))
            self._asked[process] = (self.now() + pause, pause)
