"""The admin pages of a router with several workers: each worker is asked, and the answers become one.

Separate from the supervisor because nothing here starts or ends a process, and a page that cannot be made must not
keep it from doing so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import orjson
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

from pd_router.core.merged_status import merge_decisions, merge_fleets, merge_status
from pd_router.core.settings import Settings
from pd_router.shell.admin import EXPLAIN, FLEET, METRICS, READY, STATUS
from pd_router.shell.channel import Channel, ChannelError
from pd_router.shell.context import DECISIONS_KEPT
from pd_router.shell.merged_metrics import MergedMetrics, funnel_of, page_of
from pd_router.shell.metrics import worker_restarts
from pd_router.shell.store_metrics import StoreCollector
from pd_router.shell.store_server import StoreServer

ASK_SECONDS: Final = 2.0
"""For one worker's page; a probe waits longer than this."""


class Running(Protocol):
    """A worker that runs."""

    index: int
    number: int
    """No other process gets the same."""
    channel: Channel


class SupervisorPages:
    """Reads pages. `workers` gives those that run."""

    def __init__(self, settings: Settings, shared: StoreServer, workers: Callable[[], Sequence[Running]]) -> None:
        self._settings = settings
        self._workers = workers
        self._started = time.time()
        self._registry = CollectorRegistry()
        self._merged = MergedMetrics()
        self._merging = asyncio.Lock()
        self.draining = False
        self.restarts = worker_restarts(self._registry)
        ProcessCollector(registry=self._registry)
        if settings.valkey is None:
            self._registry.register(StoreCollector(shared.store, shared.now))

    async def read(self, name: str) -> bytes:
        """One page, see `admin`."""
        match name:
            case "metrics":
                return page_of(await self._metrics())
            case "ready":
                return (await self._why_not_ready()).encode()
            case "status":
                return orjson.dumps(await self._status())
            case "explain":
                return orjson.dumps(merge_decisions(await self._listed(EXPLAIN), DECISIONS_KEPT))
            case _:
                return orjson.dumps(merge_fleets(await self._listed(FLEET)))

    async def _why_not_ready(self) -> str:
        if self.draining:
            return "draining"
        answers = {worker.index: answer for worker, answer in (await self._ask(READY)).items()}
        for index in range(self._settings.workers):
            if index not in answers:
                return f"worker {index} does not answer"
            if answers[index]:
                return f"worker {index}: {answers[index].decode()}"
        return ""

    async def _metrics(self) -> list[Metric]:
        pages = {worker.number: page for worker, page in (await self._ask(METRICS)).items()}
        alive = frozenset(worker.number for worker in self._workers())
        own = generate_latest(self._registry)
        async with self._merging:
            # In a thread: with many workers it takes longer than a turn should wait for the store.
            return await asyncio.to_thread(self._merged.merge, own, pages, alive)

    async def _status(self) -> dict[str, Any]:
        pages = [orjson.loads(page) for page in (await self._ask(STATUS)).values()]
        return merge_status(self._settings.reuse.enabled, self._started, pages, funnel_of(await self._metrics()))

    async def _listed(self, name: str) -> dict[int, list[dict[str, Any]]]:
        return {worker.index: orjson.loads(page) for worker, page in (await self._ask(name)).items()}

    async def _ask(self, name: str) -> Mapping[Running, bytes]:
        """A page of each worker that answers, by index."""
        workers = sorted(self._workers(), key=lambda worker: worker.index)
        answers = await asyncio.gather(*(self._ask_one(worker, name) for worker in workers))
        return {worker: page for worker, page in zip(workers, answers, strict=True) if page is not None}

    @staticmethod
    async def _ask_one(worker: Running, name: str) -> bytes | None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return (await worker.channel.ask("page", name)).raw
        except (ChannelError, TimeoutError):
            return None
