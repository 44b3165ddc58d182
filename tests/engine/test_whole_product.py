"""The whole product on real parts: helm install, kubectl apply, real vLLM in real pods, and an unchanged OpenAI client.

The file that is applied is the example itself. What else happens in a cluster (scaling, rollouts, faults) is tested in
`tests/cluster` with engines that start in a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdctl.core.commands import Urls
from pdctl.core.measurements import Leg
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.demo_ground import ClusterGround
from pdctl.shell.console import Console
from pdctl.shell.model_maker import WORDS_FILE, cached_tiny_model
from support.clusters import cluster_for_tests, eventually, remove_abandoned
from support.engine_pair import Pairs

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
TURNS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(pairs: Pairs) -> AsyncIterator[EmbeddedCluster]:
    """A cluster on an otherwise idle machine: no pair of the other tests runs meanwhile."""
    await pairs.stop()
    remove_abandoned()
    cached_tiny_model(print)
    with cluster_for_tests("engine") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def urls(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Urls]:
    """The example, applied and ready."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment().items():
            patch.setenv(name, value)
        logs = tmp_path_factory.mktemp("pods")
        chart, example = ROOT / "charts/pd-operator", ROOT / "examples/cpu-tiny.yaml"
        ground = ClusterGround(chart, example, "tiny", "tiny", logs, Console(show_lines=False))
        await ground.install()
        yield await ground.start(Leg.ON)
        await ground.stop()


async def test_a_client_through_the_service_reuses_from_turn_two_on(cluster: EmbeddedCluster, urls: Urls) -> None:
    words = str(cached_tiny_model(print) / WORDS_FILE)
    chat = ("-m", "support.cluster_chat", "--url", urls.router, "--turns", str(TURNS), "--words", words)
    environment = f"PYTHONPATH={ROOT / 'tests'}"
    out = cluster.run(cluster.inside(["env", environment, sys.executable, *chat]))
    turns = [json.loads(line) for line in out.splitlines()]
    assert len(turns) == TURNS
    assert all(turn["reply"].strip() for turn in turns)
    fetch = f"import urllib.request; print(urllib.request.urlopen('{urls.admin}/debug/explain').read().decode())"
    decisions = json.loads(cluster.run(cluster.inside([sys.executable, "-c", fetch])))
    pulled = [one.get("pulled_tokens") or 0 for one in decisions if one["api"] == "chat.completions"]
    assert pulled[0] == 0
    assert min(pulled[1:]) > 500, pulled
    assert {one["linked_by"] for one in decisions if one["attached"]} == {"history"}


async def test_the_object_says_that_kv_flows(cluster: EmbeddedCluster, urls: Urls) -> None:
    def flowing() -> bool:
        status = json.loads(cluster.kubectl("get", "pdd", "tiny", "-o", "json"))["status"]
        conditions = {one["type"]: one["status"] for one in status["conditions"]}
        return conditions["TransfersFlowing"] == "True" and conditions["Ready"] == "True"

    eventually("TransfersFlowing", flowing)
    status = json.loads(cluster.kubectl("get", "pdd", "tiny", "-o", "json"))["status"]
    assert status["url"] == "http://tiny-router.default.svc:80"
    assert [status[role]["ready"] for role in ("prefill", "decode", "router")] == ["1/1"] * 3


async def test_no_container_was_restarted(cluster: EmbeddedCluster, urls: Urls) -> None:
    pods = json.loads(cluster.kubectl("get", "pods", "-o", "json"))["items"]
    containers = [one for pod in pods for one in pod["status"]["containerStatuses"]]
    assert len(containers) == 3
    assert [one["restartCount"] for one in containers] == [0, 0, 0]
