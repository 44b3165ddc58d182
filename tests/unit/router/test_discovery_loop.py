"""The loop of discovery with an API server that answers at once: what it does with the time of everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pd_router.core.access import Tls
from pd_router.core.settings import PodDiscovery, Timeouts
from pd_router.shell.discovery_metrics import DiscoveryMetrics
from pd_router.shell.fleet import Fleet
from pd_router.shell.kubernetes_discovery import SLICE_EVENTS, KubernetesDiscovery
from pd_router.shell.metrics import Metrics
from pd_router.shell.pod_api import ApiFailed, Event, Page, PodApi, Trouble
from pd_router.shell.tls import EngineTls
from support.pods import make_pod

EVENTS = 1000


class ScriptedApi(PodApi):
    """No server: one list, then what the test wants of a watch."""

    def __init__(self, events: int, failure: ApiFailed | None = None) -> None:
        super().__init__("default", "", "")
        self.lists = self.connects = 0
        self.told = asyncio.Event()
        self._events, self._failure = events, failure

    async def connect(self) -> None:
        self.connects += 1

    async def pages(self) -> AsyncGenerator[Page, None]:
        self.lists += 1
        yield Page([make_pod("d-0", uid="u", ready=False, version=1)], "1")

    async def watch(self, version: str, seconds: float, stall: float) -> AsyncGenerator[Event, None]:
        for number in range(self._events):
            yield Event("MODIFIED", make_pod("d-0", uid="u", ready=number % 2 == 0, version=number + 2))
        self.told.set()
        if self._failure is not None:
            raise self._failure


def discovery(api: PodApi, secure: bool = False, fleet: Fleet | None = None) -> KubernetesDiscovery:
    metrics = Metrics()
    fleet = fleet or Fleet(metrics, frozenset(), lambda _key: 0, lambda _member: None)
    pods = PodDiscovery("default", "tiny", retry_max=600.0, tls=secure)
    tls = EngineTls(Tls(), 1.0)
    made: Any = KubernetesDiscovery(pods, Timeouts(), fleet, DiscoveryMetrics(metrics), time.monotonic, tls, api)
    return made


async def test_a_flood_leaves_the_loop_to_others() -> None:
    api, turns = ScriptedApi(EVENTS), 0
    running = discovery(api)
    await running.start()
    while not api.told.is_set():
        turns += 1
        await asyncio.sleep(0)
    await running.stop()
    assert turns >= EVENTS / SLICE_EVENTS


async def test_watches_that_end_at_once_are_not_asked_for_at_once() -> None:
    for failure in (None, ApiFailed(Trouble.LOST, "dropped"), ApiFailed(Trouble.THROTTLED, "429", retry_after=500)):
        api = ScriptedApi(0, failure)
        running = discovery(api)
        await running.start()
        await api.told.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert api.lists == 1
        await running.stop()


@pytest.mark.parametrize("secure", [False, True])
async def test_pods_are_reached_as_they_speak(secure: bool) -> None:
    api = ScriptedApi(0)
    fleet = Fleet(Metrics(), frozenset(), lambda _key: 0, lambda _member: None)
    running = discovery(api, secure, fleet)
    await running.start()
    await api.told.wait()
    member = fleet.member("d-0")
    assert member is not None
    assert member.address.tls is secure
    assert member.address.url.startswith("https://" if secure else "http://")
    await running.stop()
