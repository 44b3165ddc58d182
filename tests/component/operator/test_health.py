"""Liveness that proves progress, the metrics page, and the command line."""

from __future__ import annotations

import aiohttp
import pytest

from pd_operator.shell.health import BLIND_LOOKS, LONGEST_WAIT, Sites, Vitals
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.options import parse_options
from pd_operator.shell.wakeups import Key, Wakeups


class Bench:
    """Vitals on a clock that the test moves."""

    def __init__(self) -> None:
        self.time = 0.0
        self.wakeups = Wakeups(lambda: self.time)
        self.vitals = Vitals(lambda: self.time, 300.0, self.wakeups)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_all_is_well_while_looks_are_tried(bench: Bench) -> None:
    for _ in range(10):
        bench.time += 900.0
        bench.vitals.looked(0)
        assert bench.vitals.complaint() is None


async def test_no_look_for_three_periods(bench: Bench) -> None:
    bench.time += 3 * 300.0 + 61.0
    assert "no complete look" in str(bench.vitals.complaint())


async def test_watches_that_bring_nothing(bench: Bench) -> None:
    for _ in range(BLIND_LOOKS - 1):
        bench.vitals.looked(3)
    assert bench.vitals.complaint() is None
    bench.vitals.looked(3)
    assert "no watch" in str(bench.vitals.complaint())
    bench.vitals.looked(0)
    assert bench.vitals.complaint() is None


async def test_an_object_that_no_worker_takes(bench: Bench) -> None:
    bench.wakeups.wake(Key("n", "a"))
    bench.time += LONGEST_WAIT + 1.0
    bench.vitals.looked(0)
    assert "waited" in str(bench.vitals.complaint())


async def test_both_pages(bench: Bench) -> None:
    metrics = Metrics()
    metrics.writes.labels("Service", "absent").inc()
    sites = Sites(bench.vitals, metrics)
    await sites.start(("127.0.0.1", 0), ("127.0.0.1", 0))
    health, page = (f"http://127.0.0.1:{port}" for port in sites.ports)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{health}/healthz") as answer:
                assert (answer.status, await answer.text()) == (200, "ok\n")
            bench.time += 5000.0
            async with session.get(f"{health}/healthz") as answer:
                assert answer.status == 503
            async with session.get(f"{page}/metrics") as answer:
                text = await answer.text()
    finally:
        await sites.stop()
    assert 'pd_operator_writes_total{kind="Service",why="absent"} 1.0' in text
    assert "process_resident_memory_bytes" in text


ENVIRON = {"PD_ROUTER_IMAGE": "r:1", "PD_CONNECTOR_IMAGE": "c:1"}


def test_the_command_line() -> None:
    options = parse_options(
        ["run", "--namespace", "a", "--namespace", "b", "--namespace", "a", "--resync", "60", "--health", "[::]:80"],
        {**ENVIRON, "PD_IMAGE_PULL_SECRETS": "x,y", "PD_OPERATOR_NAMESPACE": "system"},
    )
    assert options.namespaces == ("a", "b")
    assert (options.router_image, options.connector_image, options.image_pull_secrets) == ("r:1", "c:1", ("x", "y"))
    assert (options.resync, options.health, options.operator_namespace) == (60.0, ("::", 80), "system")
    assert options.image_pull_policy is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "--all-namespaces --namespace is required"),
        (["run", "--all-namespaces", "--namespace", "a"], "not allowed with"),
        (["run", "--all-namespaces", "--resync", "0"], "must be above 0"),
        (["run", "--all-namespaces", "--health", "8080"], "must be HOST:PORT"),
        ([], "command"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(argv, ENVIRON)
    assert words in capsys.readouterr().err


def test_images_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["run", "--all-namespaces"], {})
    assert "--router-image" in capsys.readouterr().err
