"""Is the operator alive in the sense that matters: does it still look at the cluster and get through its work?

A process whose loop turns but whose watches are dead, or whose workers hang, answers 503, and the kubelet restarts it.
An API server that is down is no reason for that: the attempts are what counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pd_operator.shell.metrics import Metrics
from pd_operator.shell.wakeups import Wakeups

logger = logging.getLogger(__name__)

LONGEST_WAIT: Final = 600.0
"""Seconds for which an object may be due without a worker taking it."""

BLIND_LOOKS: Final = 2
"""Complete looks in a row that found what no watch had brought, before the watches count as dead."""


class Vitals:
    """What the liveness probe judges."""

    def __init__(self, clock: Callable[[], float], resync: float, wakeups: Wakeups) -> None:
        self._clock = clock
        self._resync = resync
        self._wakeups = wakeups
        self._looked = clock()
        self._blind = 0
        self._ending = ""
        self.lost: Mapping[str, str] = {}
        """Namespaces that can't be served, and why. Told, but no complaint: a restart would not bring them back."""

    def ends(self, why: str) -> None:
        """The process has begun to end."""
        self._ending = why

    def looked(self, missed: int) -> None:
        """A complete look was tried; `missed` changes of the previous one never came through a watch."""
        self._looked = self._clock()
        self._blind = self._blind + 1 if missed else 0

    def complaint(self) -> str | None:
        """Why the process should be restarted, None when all is well."""
        if self._ending:
            return self._ending
        silent = self._clock() - self._looked
        if silent > 3 * self._resync + 60:
            return f"no complete look at the cluster for {silent:.0f} s"
        if self._blind >= BLIND_LOOKS:
            return f"{self._blind} complete looks in a row found changes that no watch had brought"
        overdue = self._wakeups.overdue()
        if overdue > LONGEST_WAIT:
            return f"an object has waited {overdue:.0f} s for a worker"
        return None


class Sites:
    """The health and the metrics endpoint, on ports of their own so that policies can tell them apart."""

    def __init__(self, vitals: Vitals, metrics: Metrics) -> None:
        self._vitals = vitals
        self._metrics = metrics
        self._runners: list[web.AppRunner] = []

    async def start(self, health: tuple[str, int], metrics: tuple[str, int]) -> None:
        """Listen; `ports` are known then.

        Raises:
            OSError: when a port is taken.
        """
        await self._serve(health, "/healthz", self._healthz)
        await self._serve(metrics, "/metrics", self._exposition)

    @property
    def ports(self) -> tuple[int, ...]:
        """The port for health, the port for metrics."""
        return tuple(int(runner.addresses[0][1]) for runner in self._runners)

    async def stop(self) -> None:
        """Stop listening."""
        for runner in self._runners:
            await runner.cleanup()

    async def _serve(self, address: tuple[str, int], path: str, handler: Callable[[web.Request], object]) -> None:
        app = web.Application()
        app.router.add_get(path, handler)  # type: ignore[arg-type]
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, *address).start()

    async def _healthz(self, _request: web.Request) -> web.Response:
        complaint = self._vitals.complaint()
        if complaint is None:
            lost = (f"not served: {namespace}: {why}\n" for namespace, why in sorted(self._vitals.lost.items()))
            return web.Response(text="".join(("ok\n", *lost)))
        logger.error("unhealthy: %s", complaint)
        return web.Response(status=503, text=f"{complaint}\n")

    async def _exposition(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
