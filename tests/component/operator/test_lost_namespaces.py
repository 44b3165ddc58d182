"""A listed namespace that is gone or forbidden costs the others nothing, is told, and is served again when back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from pd_operator.__main__ import _first_tries
from pd_operator.core.observed_kinds import Kind, Ref
from pd_operator.shell.api import ApiError
from pd_operator.shell.ending import Ending
from pd_operator.shell.handlers import LONGEST_PAUSE, make_settings
from pd_operator.shell.health import Sites
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.options import Options
from pd_operator.shell.process import CrdMissing, _check_crd
from pd_operator.shell.run import Operator
from support.memory_cluster import MemoryCluster
from support.operator_bench import QWEN, Bench
from support.pddeployments import edited, smallest

DECODE = Ref("StatefulSet", "models", "qwen-decode")
ELSEWHERE = Ref("StatefulSet", "elsewhere", "qwen-decode")


class Guarded(MemoryCluster):
    """A cluster that answers 403 for everything in some namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[str] = set()
        self.status = 403

    async def list(self, kind: Kind, namespace: str | None, label_selector: str) -> tuple[list[Mapping[str, Any]], int]:
        """See ClusterApi."""
        if namespace in self.forbidden:
            raise ApiError(self.status, "Forbidden", f'cannot list {kind.plural} in the namespace "{namespace}"')
        return await super().list(kind, namespace, label_selector)


@pytest.fixture
def cluster(bench: Bench) -> Guarded:
    """The bench's cluster, guarded; it has an object in each of two namespaces."""
    bench.cluster = Guarded()
    bench.create()
    raw = edited(smallest(), ("metadata.namespace", "elsewhere"), ("metadata.name", "qwen"))
    bench.cluster.put(edited(raw, ("spec.engine.image", "vllm:v0.32.0")))
    assert isinstance(bench.cluster, Guarded)
    return bench.cluster


BOTH = ("elsewhere", "models")


def served(operator: Operator, namespace: str) -> float | None:
    return operator._metrics.registry.get_sample_value("pd_operator_namespace_served", {"name": namespace})


async def test_the_others_are_served_from_the_start_on(
    bench: Bench, cluster: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbidden = {"elsewhere"}
    await _check_crd(cluster, Options("r", "c", namespaces=BOTH))
    operator = await bench.operator(namespaces=BOTH)
    await bench.settle(operator)
    assert DECODE in cluster.objects
    assert ELSEWHERE not in cluster.objects
    assert [served(operator, name) for name in BOTH] == [0.0, 1.0]
    await operator.resync_once()
    told = [one.getMessage() for one in caplog.records if "is not served" in one.getMessage()]
    assert len(told) == 1, "not once more with every look"
    assert 'cannot list pddeployments in the namespace "elsewhere"' in told[0]


async def test_a_look_goes_on_behind_one_that_was_lost(bench: Bench, cluster: Guarded) -> None:
    operator = await bench.operator(namespaces=BOTH)
    await bench.settle(operator)
    bench.stop(operator)
    cluster.forbidden = {"elsewhere"}
    cluster.remove(DECODE)
    await operator.resync_once()
    await bench.settle(operator)
    assert DECODE in cluster.objects
    assert {key.namespace for key in operator.mirror.keys()} == {"models"}  # noqa: SIM118
    counted = operator._metrics.registry.get_sample_value("pd_operator_resyncs_total", {"result": "complete"})
    assert counted == 1.0


async def test_one_that_is_back_is_served_again(bench: Bench, cluster: Guarded) -> None:
    cluster.forbidden = {"elsewhere"}
    operator = await bench.operator(namespaces=BOTH)
    await operator.look_for_the_lost()
    assert served(operator, "elsewhere") == 0.0
    cluster.forbidden = set()
    await operator.look_for_the_lost()
    await bench.settle(operator)
    assert ELSEWHERE in cluster.objects
    assert served(operator, "elsewhere") == 1.0
    assert operator.vitals.lost == {}
    assert not [ref for ref in operator.mirror.take_unconfirmed() if ref.namespace == "elsewhere"]


async def test_another_failure_is_no_loss_and_costs_the_others_nothing(bench: Bench, cluster: Guarded) -> None:
    operator = await bench.operator(namespaces=BOTH)
    await bench.settle(operator)
    bench.stop(operator)
    cluster.forbidden, cluster.status = {"elsewhere"}, 503
    cluster.remove(DECODE)
    with pytest.raises(ApiError, match="elsewhere"):
        await operator.look_at_everything()
    await bench.settle(operator)
    assert DECODE in cluster.objects
    assert served(operator, "elsewhere") == 1.0
    assert {key.namespace for key in operator.mirror.keys()} == set(BOTH)  # noqa: SIM118


async def test_nothing_starts_where_nothing_can_be_served(cluster: Guarded) -> None:
    cluster.forbidden = set(BOTH)
    with pytest.raises(ApiError, match="elsewhere"):
        await _check_crd(cluster, Options("r", "c", namespaces=BOTH))
    cluster.status = 404
    with pytest.raises(CrdMissing):
        await _check_crd(cluster, Options("r", "c", namespaces=BOTH))


async def test_health_tells_what_is_lost_and_stays_well(bench: Bench, cluster: Guarded) -> None:
    cluster.forbidden = {"elsewhere"}
    operator = await bench.operator(namespaces=BOTH)
    sites = Sites(operator.vitals, Metrics())
    await sites.start(("127.0.0.1", 0), ("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sites.ports[0]}/healthz"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as answer:
                text = await answer.text()
                assert answer.status == 200
            operator.vitals.ends("the watches have ended")
            async with session.get(url) as answer:
                assert (answer.status, await answer.text()) == (503, "the watches have ended\n")
    finally:
        await sites.stop()
    assert text.splitlines()[0] == "ok"
    assert "not served: elsewhere: 403 Forbidden" in text
    assert QWEN in cluster.objects


def test_a_watch_never_gives_up() -> None:
    pauses = make_settings(30.0).networking.error_backoffs
    assert not isinstance(pauses, float | int)
    first = list(itertools.islice(pauses, 1000))
    assert first[0] == 1.0
    assert first[-1] == LONGEST_PAUSE == max(first)


def test_a_watch_that_is_refused_for_long_is_not_logged_for_ever() -> None:
    def passes(text: str) -> bool:
        return _first_tries(logging.LogRecord("kopf", logging.ERROR, "", 0, text, (), None))

    assert passes("Request attempt #1 failed; will retry: GET x")
    assert not passes("Request attempt #40 failed; will retry: GET x")
    assert passes("something else")


async def test_what_hangs_at_the_end_is_left_behind() -> None:
    left: list[int] = []
    ending = Ending(limit=0.01, leave=left.append)
    told = asyncio.Event()
    ending.heed_signals(told.set)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await told.wait()
        while not left:
            time.sleep(0.001)  # noqa: ASYNC251  a loop that hangs
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert left == [1]
