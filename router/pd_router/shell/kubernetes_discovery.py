"""Engines from the pods of one PDDeployment: list, watch, list again.

What a pod means is decided in `core/pods.py`, how the API server is talked to in `pod_api.py`; here is the loop between
them and the fleet. Each watch is followed by a list, however it ended, so nothing that a watch lost stays lost
(OP-01). While the API server is away the last known engines stay, and their probes go on telling which of them answer.
Changes are applied in one piece without waiting in between: a purge is done before anything can be sent to what comes
after it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from pd_router.core.engine_pod import EnginePod
from pd_router.core.pods import Change, Changed, Joined, Left, PodSet, Refused, Restarted
from pd_router.core.settings import PodDiscovery, Timeouts
from pd_router.core.witness import Witness
from pd_router.shell.discovery import DiscoveryError, EngineProbes
from pd_router.shell.discovery_metrics import DiscoveryMetrics
from pd_router.shell.exchange import Address
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.pod_api import ApiFailed, Event, PodApi, Trouble
from pd_router.shell.tls import EngineTls
from pd_wire.names import LABEL_DEPLOYMENT, LABEL_ROLE, ROLE_DECODE, ROLE_PREFILL

log = logging.getLogger("pd_router.discovery")

FIRST_RETRY_SECONDS = 0.5
STEADY_SECONDS = 10.0
"""A watch that lasted for so long shows that the API server is well; one that ended sooner is followed by a wait."""
OVERTIME_SECONDS = 30.0
"""How long after its due end a watch is cut off."""
SLICE_EVENTS = 20
SLICE_SECONDS = 0.005
"""After so many events in a row the data plane gets the loop for so long: a flood of events takes a fraction of it."""


class KubernetesDiscovery:
    """Keeps the fleet equal to the pods. One task."""

    def __init__(
        self,
        settings: PodDiscovery,
        timeouts: Timeouts,
        fleet: Fleet,
        metrics: DiscoveryMetrics,
        now: Callable[[], float],
        tls: EngineTls,
        api: PodApi | None = None,
    ) -> None:
        selector = f"{LABEL_DEPLOYMENT}={settings.name},{LABEL_ROLE} in ({ROLE_PREFILL},{ROLE_DECODE})"
        self._api = api or PodApi(settings.namespace, selector, settings.kubeconfig)
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._now = now
        self._probes = EngineProbes(timeouts, fleet, tls)
        self._pods = PodSet(settings.name)
        self._task: asyncio.Task[None] | None = None
        self._listed_at: float | None = None
        self._heard_at: float | None = None
        self._failures = 0
        self._list_trouble: ApiFailed | None = None
        self._watch_trouble: ApiFailed | None = None
        metrics.connected.set_function(lambda: self._listed_at is not None and self._trouble is None)
        metrics.event_age.set_function(lambda: self._age(self._heard_at))
        metrics.list_age.set_function(lambda: self._age(self._listed_at))

    # -- what the router calls -----------------------------------------------------------------------
    async def start(self) -> None:
        """Begin. Raises DiscoveryError without usable credentials; an API server that is away is waited for."""
        try:
            await self._api.connect()
        except ApiFailed as failure:
            await self._api.close()
            raise DiscoveryError(f"--discover-kubernetes, --kubeconfig: {failure}") from failure
        self._task = asyncio.create_task(self._run(), name="kubernetes discovery")

    async def stop(self) -> None:
        """End watch and probes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._probes.stop()
        await self._api.close()

    def nudge(self, key: str) -> None:
        """Probe this engine now; harmless when it has left."""
        self._probes.nudge(key)

    def why_not_ready(self) -> str | None:
        """Until the first list nothing is known."""
        if self._listed_at is not None:
            return None
        return f"the pods of {self._name} were not listed yet" + (f" ({self._trouble})" if self._trouble else "")

    def describe(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "deployment": self._name,
            "listed": self._listed_at is not None,
            "list_age": None if self._listed_at is None else round(self._age(self._listed_at), 1),
            "event_age": None if self._heard_at is None else round(self._age(self._heard_at), 1),
            "trouble": None if self._trouble is None else str(self._trouble),
            "unusable": [{"pod": pod.name, "why": pod.why} for pod in self._pods.unusable()],
        }

    # -- list, watch, list again ---------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            try:
                failure = await self._round()
            except Exception:
                # The top of the task: without it the fleet would stay as it is for ever, in silence.
                log.exception("discovery failed")
                failure = self._list_trouble = ApiFailed(Trouble.MALFORMED, "an error of the router's own")
                self._failures += 1
            if self._failures:
                await self._wait_after(failure)

    async def _round(self) -> ApiFailed | None:
        """One list and the watch after it. Returns how it ended, None for in order."""
        try:
            version = await self._list()
        except ApiFailed as failure:
            self._metrics.lists["failed"].inc()
            self._list_trouble = failure
            self._failures += 1
            return failure
        began = self._now()
        ended = await self._watch(version)
        self._metrics.watch_ends[Trouble.DONE if ended is None else ended.trouble].inc()
        if self._now() - began >= STEADY_SECONDS:
            self._failures = 0
            self._watch_trouble = None
        if ended is not None or self._now() - began < STEADY_SECONDS:
            self._failures += 1
        # One watch that broke is nothing to tell: the list that follows shows whether the server is there.
        if self._failures > 1:
            self._watch_trouble = ended
        return ended

    async def _list(self) -> str:
        pods: list[Any] = []
        version = ""
        async with aclosing(self._api.pages()) as pages:
            async for page in pages:
                pods.extend(page.pods)
                version = page.version
                await asyncio.sleep(0)
        self._apply(self._pods.replace(pods))
        self._metrics.lists["ok"].inc()
        if self._listed_at is None or self._list_trouble is not None:
            log.info("%d pods of %s listed, %d of them are engines", len(pods), self._name, len(self._pods))
        self._listed_at = self._heard_at = self._now()
        self._list_trouble = None
        return version

    async def _watch(self, version: str) -> ApiFailed | None:
        """Apply events until the watch ends; None when it ended in order."""
        # The jitter keeps the routers of a cluster from listing all at the same moment.
        seconds = self._settings.relist * random.uniform(0.8, 1.0)
        left = SLICE_EVENTS
        try:
            async with (
                asyncio.timeout(seconds + OVERTIME_SECONDS),
                aclosing(self._api.watch(version, seconds, self._settings.stall)) as events,
            ):
                async for event in events:
                    self._take(event)
                    left -= 1
                    if left == 0:
                        left = SLICE_EVENTS
                        await asyncio.sleep(SLICE_SECONDS)
        except ApiFailed as failure:
            return failure
        except TimeoutError:
            return ApiFailed(Trouble.STALLED, "the server did not end the watch in time")
        return None

    def _take(self, event: Event) -> None:
        self._heard_at = self._now()
        self._watch_trouble = None
        self._metrics.events[event.kind].inc()
        if event.kind in _POD_KINDS:
            self._apply(self._pods.apply(event.kind, event.pod))

    async def _wait_after(self, failure: ApiFailed | None) -> None:
        """Wait, longer each time, then take new credentials and connections. None: a watch ended too soon."""
        limit = self._settings.retry_max
        delay = min(limit, FIRST_RETRY_SECONDS * 2 ** min(self._failures - 1, 20)) * random.uniform(0.5, 1.0)
        if failure is not None:
            delay = max(delay, min(failure.retry_after, limit) * random.uniform(1.0, 1.2))
            log.log(
                logging.INFO if self._trouble is None else logging.WARNING,
                "pods of %s: %s; the %d known engines stay, next list in %.1f s",
                self._name,
                failure,
                len(self._pods),
                delay,
            )
        await asyncio.sleep(delay)
        if failure is not None and failure.trouble is not Trouble.EXPIRED:
            try:
                await self._api.connect()
            except ApiFailed as again:
                log.warning("pods of %s: %s", self._name, again)

    @property
    def _trouble(self) -> ApiFailed | None:
        return self._list_trouble or self._watch_trouble

    # -- changes to the fleet ------------------------------------------------------------------------
    def _apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Left(name):
                    self._probes.forget(name)
                    self._fleet.remove(name)
                case Restarted(name):
                    self._fleet.broken(name)
                    self._fleet.set_ready(name, False)
                    self._identify(name)
                    self._probes.nudge(name)
                case Changed(pod):
                    self._fleet.admit(pod.name, pod.ready, pod.draining)
                    self._identify(pod.name)
                case Joined(pod):
                    self._join(pod)
                case Refused(pod):
                    log.warning("pod %s cannot be an engine: %s", pod.name, pod.why)

    def _identify(self, name: str) -> None:
        pod = self._pods.engines().get(name)
        if pod is not None:
            self._fleet.identify(name, pod.uid, pod.process)

    def _join(self, pod: EnginePod) -> None:
        member = Member(
            key=pod.name,
            role=pod.role,
            address=Address(pod.host, pod.port, self._settings.tls),
            generation=pod.generation,
            admitted=pod.ready,
            draining=pod.draining,
            peers=set(pod.hosts),
            witness=Witness.of_pod(pod.uid, pod.process),
        )
        self._fleet.add(member)
        self._probes.watch(member)
        log.info(
            "%s engine %s joined at %s, generation %s", pod.role, pod.name, member.address.authority, pod.generation
        )

    @property
    def _name(self) -> str:
        return f"{self._settings.namespace}/{self._settings.name}"

    def _age(self, since: float | None) -> float:
        return float("nan") if since is None else self._now() - since


_POD_KINDS = frozenset({"ADDED", "MODIFIED", "DELETED"})
