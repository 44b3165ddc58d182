"""Asks every ready router what it does, beside all reconciles: a router that hangs delays nobody.

An answer wakes its PDDeployment only when its meaning changed, so traffic alone never causes a write.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp

from pd_operator.core.observed_pods import Pod
from pd_operator.core.observed_router import Flow, RouterAnswer, RouterTrack, read_router
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.mirror import Mirror
from pd_operator.shell.wakeups import Key

logger = logging.getLogger(__name__)

TIMEOUT: Final = 2.0
"""Seconds for one question."""

AT_ONCE: Final = 16
ANSWER_LIMIT: Final = 1 << 20
FORGIVEN: Final = 2
"""Failed questions in a row for which the last answer still counts, or none is given."""

SOON: Final = 5.0
"""Seconds after which a router is asked again that did not answer, or that may have had its first turns meanwhile, if
its turn does not come sooner."""

TICK: Final = 1.0


class RouterPoll:
    """Answers by pod uid; None = asked and no answer."""

    def __init__(
        self,
        mirror: Mirror,
        wake: Callable[[Key], None],
        interval: float,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._mirror = mirror
        self._wake = wake
        self._interval = interval
        self._metrics = metrics
        self._clock = clock
        self._answers: dict[str, RouterAnswer | None] = {}
        self._tracks: dict[str, RouterTrack] = {}
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._asking = asyncio.Semaphore(AT_ONCE)

    @property
    def answers(self) -> Mapping[str, RouterAnswer | None]:
        """What is known now."""
        return self._answers

    async def run(self) -> None:
        """Ask for ever."""
        # No environment proxies, no redirects: the address comes from a pod's status and nowhere else.
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT), trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                await self.ask_due(session)
                await asyncio.sleep(TICK)

    async def ask_due(self, session: aiohttp.ClientSession) -> None:
        """Ask every router whose turn it is. Returns when all have answered or failed."""
        pods = {pod.uid: pod for pod in self._mirror.routers()}
        for table in (self._answers, self._tracks, self._failures, self._due):
            for uid in [uid for uid in table if uid not in pods]:
                del table[uid]
        now = self._clock()
        due = [pod for uid, pod in pods.items() if self._due.get(uid, now) <= now]
        for pod in due:
            self._due[pod.uid] = now + self._interval
        await asyncio.gather(*(self._ask(session, pod) for pod in due))

    async def _ask(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        async with self._asking:
            try:
                body = await _fetch(session, pod)
                answer, track = read_router(body, self._tracks.get(pod.uid))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                self._metrics.router_polls.labels("failed").inc()
                self._missed(pod, error)
                return
        self._metrics.router_polls.labels("answered").inc()
        if self._failures.pop(pod.uid, 0) > FORGIVEN:
            logger.info("router %s/%s answers again", pod.namespace, pod.name)
        self._tracks[pod.uid] = track
        if answer.reuse and answer.flow is Flow.NO_TURNS:
            # Whoever tries out a new deployment looks at the condition right after the first turns.
            self._soon(pod)
        self._keep(pod, answer)

    def _missed(self, pod: Pod, error: Exception) -> None:
        failures = self._failures.get(pod.uid, 0) + 1
        self._failures[pod.uid] = failures
        self._soon(pod)
        if failures == FORGIVEN + 1:
            logger.info("router %s/%s does not answer: %s", pod.namespace, pod.name, error or type(error).__name__)
        if failures > FORGIVEN:
            self._keep(pod, None)

    def _soon(self, pod: Pod) -> None:
        self._due[pod.uid] = self._clock() + min(SOON, self._interval)

    def _keep(self, pod: Pod, answer: RouterAnswer | None) -> None:
        news = pod.uid not in self._answers or self._answers[pod.uid] != answer
        self._answers[pod.uid] = answer
        if news:
            self._wake(Key(pod.namespace, pod.deployment))


async def _fetch(session: aiohttp.ClientSession, pod: Pod) -> Any:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    async with session.get(f"http://{host}:{pod.admin_port}/status", allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}")
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > ANSWER_LIMIT:
                raise ValueError(f"more than {ANSWER_LIMIT} bytes")
    return json.loads(bytes(data))
