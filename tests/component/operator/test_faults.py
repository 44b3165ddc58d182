"""The operator dies or is refused at every single API call: the end is always the same."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from pd_operator.core.observed_kinds import Ref
from pd_operator.shell.api import ApiError
from support.api_faults import FaultyPort, Killed
from support.operator_bench import QWEN, Bench

EDITS: tuple[tuple[str, Any], ...] = (("spec.router.replicas", 1), ("spec.decode.replicas", 2))


async def scenario(bench: Bench, port: FaultyPort) -> bool:
    """Create, serve, edit (which makes and deletes children) with one faulty call. Was the call ever reached?"""
    bench.create(("spec.router.replicas", 2))
    for step in (bench.serve_all, lambda: bench.change(*EDITS), bench.serve_all):
        await run_until_rest(bench, port)
        step()
    await run_until_rest(bench, port)
    return port.count >= port.at


async def run_until_rest(bench: Bench, port: FaultyPort) -> None:
    """Run one operator after the other, until one of them survives and has nothing to do."""
    while True:
        try:
            operator = await bench.operator(port)
        except (Killed, ApiError):
            bench.cluster.listeners.clear()
            continue
        try:
            await bench.settle(operator)
            return
        except Killed:
            continue
        finally:
            bench.cluster.listeners.clear()


async def undisturbed() -> tuple[dict[str, Any], int]:
    """The end of the scenario without a fault, and how many calls it takes."""
    bench = Bench()
    port = FaultyPort(bench.cluster)
    await scenario(bench, port)
    return bench.cluster.state(), port.count


async def test_news_from_a_namespace_that_is_going_are_no_news(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def refused(*_: object) -> None:
        raise ApiError(403, "Forbidden", "namespace models is being terminated", causes=("NamespaceTerminating",))

    bench.cluster.create_event = refused  # type: ignore[method-assign]
    bench.create()
    with caplog.at_level(logging.INFO):
        await bench.settle(await bench.operator())
    assert not [one for one in caplog.records if "event" in one.getMessage()]


@pytest.mark.parametrize("landed", [False, True], ids=["before the call", "after the call"])
async def test_killed_at_every_call(landed: bool) -> None:
    expected, calls = await undisturbed()
    assert calls > 50
    for at in range(1, calls + 1):
        bench = Bench()
        assert await scenario(bench, FaultyPort(bench.cluster, at=at, landed=landed)), at
        assert bench.cluster.state() == expected, f"killed at call {at}"


@pytest.mark.parametrize(
    ("status", "landed"),
    [(409, False), (429, False), (500, False), (0, True)],
    ids=["409", "429", "500", "answer lost"],
)
async def test_one_call_fails(status: int, landed: bool) -> None:
    expected, calls = await undisturbed()
    for at in range(1, calls + 1):
        bench = Bench()
        error = ApiError(status, "Injected", "injected", retry_after=2.0 if status == 429 else None)
        await scenario(bench, FaultyPort(bench.cluster, at=at, error=error, landed=landed))
        assert bench.cluster.state() == expected, f"call {at} answered {status}"


async def test_two_operators_at_once_do_no_harm(bench: Bench) -> None:
    bench.create(("spec.router.replicas", 2))
    first, second = await bench.operator(), await bench.operator()
    await bench.settle(first, second)
    bench.serve_all()
    await bench.settle(first, second)
    bench.change(*EDITS)
    await bench.settle(first, second)
    bench.serve_all()
    await bench.settle(first, second)
    expected, _ = await undisturbed()
    assert bench.cluster.state() == expected
    bench.cluster.writes.clear()
    for operator in (first, second):
        await operator.resync_once()
    await bench.settle(first, second)
    assert bench.cluster.writes == []


class Refusing:
    """A cluster whose admission refuses one kind."""

    def __init__(self, bench: Bench, error: ApiError) -> None:
        self._cluster, self._error = bench.cluster, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def apply(self, manifest: dict[str, Any], uid: str | None) -> Any:
        """Refuse StatefulSets."""
        if manifest["kind"] == "StatefulSet":
            raise self._error
        return await self._cluster.apply(manifest, uid)


async def test_a_refused_child_becomes_a_condition_and_the_rest_is_made(bench: Bench) -> None:
    bench.create()
    refusing = Refusing(bench, ApiError(403, "Forbidden", "exceeded quota: gpus"))
    operator = await bench.operator(refusing)  # type: ignore[arg-type]
    await bench.work(operator, 3)
    assert bench.condition("DecodeReady")["reason"] == "ApplyRefused"
    assert "exceeded quota: gpus" in bench.condition("DecodeReady")["message"]
    assert Ref("Deployment", "models", "qwen-router") in bench.cluster.objects


async def test_nothing_is_reported_into_a_namespace_that_is_going(bench: Bench) -> None:
    bench.create()
    error = ApiError(403, "Forbidden", "namespace models is being terminated", causes=("NamespaceTerminating",))
    operator = await bench.operator(Refusing(bench, error))  # type: ignore[arg-type]
    await bench.settle(operator)
    assert "status" not in bench.cluster.objects[QWEN]


async def test_one_object_that_always_fails_is_tried_ever_less_and_delays_nobody(bench: Bench) -> None:
    class Choosy(Refusing):
        async def apply(self, manifest: dict[str, Any], uid: str | None) -> Any:
            if manifest["metadata"]["name"].startswith("bad"):
                raise ApiError(503, "ServiceUnavailable", "no")
            return await self._cluster.apply(manifest, uid)

    bench.create(name="bad")
    operator = await bench.operator(Choosy(bench, ApiError(0, "", "")))  # type: ignore[arg-type]
    await bench.work(operator, 20)
    bench.create()
    await asyncio.wait_for(operator.work_once(), 5)
    assert Ref("StatefulSet", "models", "qwen-decode") in bench.cluster.objects
    delay = operator.wakeups.failed(next(iter(operator.mirror.keys())))
    assert delay > 25
