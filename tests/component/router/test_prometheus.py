"""A real Prometheus scrapes a running router and answers what the fleet's dashboard asks; the chart's rules work."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest_asyncio

from support.chat import Talk
from support.debian import unpacked
from support.pod_deployment import PodDeployment
from support.ports import free_ports
from support.waiting import until

CHART = Path(__file__).parents[3] / "charts" / "pd-operator"
TARGET = {"namespace": "llm", "pod": "r-0", "pdserving_dev_pddeployment": "qwen", "pdserving_dev_role": "router"}
"""Labels that the chart's PodMonitor adds."""

MAY_BE_EMPTY = {
    "Breakers and quarantined pairs: B",
    "Prompt tokens waiting for prefill: A",
    "Failed legs and retries: A",
    "Failed legs and retries: B",
    "Store of handles: B",
}
"""What is asked for there exists only in trouble, or for a moment."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs."""

    url: str

    async def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of its API."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/api/v1/{path}", params=query) as response,
        ):
            body = await response.json()
        assert body["status"] == "success", body
        return body["data"]

    async def ask(self, text: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        found: list[dict[str, Any]] = (await self.get("query", query=text))["result"]
        return found


def program() -> str:
    return shutil.which("prometheus") or str(unpacked(("prometheus",), "prometheus") / "usr" / "bin" / "prometheus")


@pytest_asyncio.fixture(loop_scope="session")
async def prometheus(pods: PodDeployment, tmp_path: Path) -> AsyncIterator[Prometheus]:
    [port] = free_ports(1)
    scraped = {"targets": [urlsplit(pods.router.admin_url).netloc], "labels": TARGET}
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(CHART / "files" / "alerts.yaml")],
        "scrape_configs": [{"job_name": "routers", "static_configs": [scraped]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        program(),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    made = Prometheus(f"http://127.0.0.1:{port}")

    async def scrapes() -> bool:
        assert process.returncode is None
        try:
            return bool(await made.ask("pd_router_build_info"))
        except aiohttp.ClientError:
            return False

    try:
        await until(scrapes, seconds=60.0)
        yield made
    finally:
        process.terminate()
        await process.wait()


def dashboard() -> dict[str, str]:
    """Queries of the fleet's dashboard, by panel and letter."""
    page = json.loads((CHART / "dashboards" / "pdserving-fleet.json").read_text(encoding="utf-8"))
    return {
        f"{panel['title']}: {target['refId']}": target["expr"].replace("$namespace", "llm").replace("$deployment", ".+")
        for panel in page["panels"]
        for target in panel["targets"]
    }


async def test_the_dashboard_has_something_to_show_and_no_alert_fires(
    pods: PodDeployment, prometheus: Prometheus
) -> None:
    queries = dashboard()
    assert set(queries) >= MAY_BE_EMPTY
    silent = set(queries)

    async def shows_everything() -> bool:
        # A series that begins with the first turn has a rate from its second scrape on.
        nonlocal silent
        talk = Talk(pods, stream=True)
        await talk.say()
        await talk.say("Go on.")
        silent = {where for where in silent if not await prometheus.ask(queries[where])}
        pulled = await prometheus.ask('sum(rate(pd_router_pulled_tokens_total{namespace="llm"}[5m]))')
        return silent <= MAY_BE_EMPTY and float(pulled[0]["value"][1]) > 0

    try:
        await until(shows_everything, seconds=30.0, pause=0.3)
    except TimeoutError:
        assert silent <= MAY_BE_EMPTY
        raise
    # A rate of nothing is 0 and a share of nothing is no number: times and shares must be figures.
    for where in ("Time to first token: B", "Where it goes, p95: D", "Prompt tokens read back instead of computed: A"):
        [answer] = await prometheus.ask(queries[where])
        assert 0 < float(answer["value"][1]) < 60, where

    await rules_evaluate_and_nothing_that_is_well_fires(prometheus)


async def rules_evaluate_and_nothing_that_is_well_fires(prometheus: Prometheus) -> None:
    async def evaluated() -> list[dict[str, Any]]:
        groups = (await prometheus.get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = await until(evaluated, seconds=30.0)
    assert len(rules) > 15
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    active = {rule["name"] for rule in rules if rule["state"] != "inactive"}
    assert active <= {"PDOperatorAbsent"}, "no operator is scraped here"
