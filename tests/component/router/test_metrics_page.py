"""A running router exposes exactly the metrics that docs/metrics.md lists, and counts what happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from support import promtool
from support.chat import Talk
from support.deployment import Spec
from support.fake_engine import Behaviour, Fault, Gate, Kind, Point
from support.pod_deployment import PodDeployment

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_]+)` \| (?:counter|gauge|histogram) ", re.MULTILINE)
ROUTER_PART = PAGE.partition("## Operator")[0].partition("## Router")[2]
LISTED = set(ROW.findall(ROUTER_PART))


async def exposed(url: str) -> set[str]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        found = re.findall(r"^# TYPE (\S+) ", await response.text(), re.MULTILINE)
    return {name for name in found if not name.endswith("_created")}


async def test_a_router_in_a_cluster_exposes_what_is_listed(pods: PodDeployment) -> None:
    await Talk(pods).say()
    assert await exposed(pods.router.admin_url) == LISTED


async def test_series_have_the_labels_that_are_listed(pods: PodDeployment) -> None:
    talk = Talk(pods, stream=True)
    await talk.say()
    await talk.say("Go on.")
    async with aiohttp.ClientSession() as session, session.get(pods.router.admin_url + "/metrics") as response:
        page = await response.text()
    listed = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `([a-z_]+)` \| \w+ \| (.*?) \| ", ROUTER_PART, re.MULTILINE)
    }
    seen = 0
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert set(sample.labels) - {"le"} == listed[name], sample
                seen += 1
    assert seen > 200


async def test_prometheus_has_nothing_against_the_names(pods: PodDeployment) -> None:
    await Talk(pods).say()
    async with aiohttp.ClientSession() as session, session.get(pods.router.admin_url + "/metrics") as response:
        page = await response.text()
    code, said = promtool.run("check", "metrics", text=page)
    assert (code, said) == (0, "")


async def test_a_router_with_urls_has_all_but_discovery(deploy: Any) -> None:
    deployment = await deploy()
    assert LISTED - await exposed(deployment.router.admin_url) == {
        name for name in LISTED if name.startswith("pd_router_discovery_")
    }


async def test_the_parts_of_the_time_to_first_token_add_up(deploy: Any) -> None:
    deployment = await deploy()
    before = await deployment.metrics()
    await Talk(deployment, stream=True).say()
    await Talk(deployment).say()
    after = await deployment.metrics()

    def gained(name: str) -> float:
        return after[f"pd_router_{name}"] - before.get(f"pd_router_{name}", 0.0)

    # Of an answer that is not streamed the first content is the last.
    parts = ("handoff_seconds", "first_token_seconds")
    assert [gained(f"{name}_count") for name in ("ttft_seconds", *parts)] == [1, 1, 1]
    assert gained("turn_seconds_count") == gained("prefill_seconds_count") == gained("queue_seconds_count") == 2
    streamed = (await deployment.explain())[-2]
    whole = sum(streamed[f"{name}_ms"] for name in ("queue", "prefill", "handoff", "first_token"))
    # What lies between them is the router's own work.
    assert 0 < whole <= streamed["ttft_ms"] + 0.05


async def test_legs_are_counted_while_they_run_and_by_result(deploy: Any) -> None:
    deployment = await deploy()
    before = await deployment.metrics()
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    running = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    held = await deployment.metrics()
    gate.open()
    await running
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=422)))
    assert (await Talk(deployment).say(check=False)).status == 422
    deployment.prefill.next(Behaviour(fault=Fault(Kind.FINISH_ERROR, at=Point.BEFORE_FINISH)))
    await Talk(deployment).say()
    after = await deployment.metrics()

    def legs(role: str, result: str) -> float:
        engine = (deployment.prefill if role == "prefill" else deployment.decode).url
        name = f'pd_router_engine_legs_total{{engine="{engine}",result="{result}",role="{role}"}}'
        return after[name] - before[name]

    assert [held[f'pd_router_leg_inflight{{leg="{leg}"}}'] for leg in ("prefill", "decode")] == [0, 1]
    assert [after[f'pd_router_leg_inflight{{leg="{leg}"}}'] for leg in ("prefill", "decode")] == [0, 0]
    results = ("ok", "refused", "failed", "abandoned")
    assert [legs("prefill", result) for result in results] == [2, 1, 1, 0]
    assert [legs("decode", result) for result in results] == [2, 0, 0, 0]


async def test_a_model_that_a_client_made_up_is_no_series(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--model", "tiny"),)))
    await Talk(deployment).say()
    before = set(await deployment.metrics())
    for name in ("gpt-5", "../etc", "x" * 1000, "a\nb"):
        await Talk(deployment, model=name).say(check=False)
    gained = set(await deployment.metrics()) - before
    assert {name for name in gained if 'status="404"' not in name and "_created" not in name} == set()


async def test_tokens_that_prefill_did_not_compute(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    before = await deployment.metrics()
    turn = await talk.say("Go on.")
    after = await deployment.metrics()
    [record] = turn.prefills
    assert record.prompt_tokens is not None
    assert record.local_tokens is not None

    def gained(name: str) -> float:
        return after[f"pd_router_{name}_tokens_total"] - before[f"pd_router_{name}_tokens_total"]

    # Read back, or in prefill's own cache (BM-01).
    assert gained("pulled") == turn.pulled > 0
    assert gained("cached") == turn.pulled + record.local_tokens
    assert gained("prompt") == record.prompt_tokens
