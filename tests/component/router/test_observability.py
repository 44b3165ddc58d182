"""The funnel, the reasons and `/debug/explain` say what really happened (BM-08, E18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from support.chat import Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind, with_handle
from support.specs import NEVER_PULLS

STAGES = ("eligible", "found", "live", "attached", "proven", "pulled")


class Watch:
    """What counters gained since it was made."""

    def __init__(self, deployment: Deployment, before: Mapping[str, float]) -> None:
        self._deployment, self._before = deployment, before

    async def gained(self, name: str, **labels: str) -> float:
        """Growth of one sample; a sample that does not exist is 0."""
        after = await self._deployment.metrics()
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = f"pd_router_{name}{{{inside}}}" if labels else f"pd_router_{name}"
        return after.get(sample, 0.0) - self._before.get(sample, 0.0)

    async def stages(self) -> list[int]:
        """Growth of each stage of the funnel, in order."""
        return [int(await self.gained("reuse_stage_total", stage=stage)) for stage in STAGES]


async def watch(deployment: Deployment) -> Watch:
    return Watch(deployment, await deployment.metrics())


async def test_a_turn_that_reuses_passes_every_stage(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    watching = await watch(deployment)
    await talk.say()
    assert await watching.stages() == [1, 0, 0, 0, 0, 0]
    turn = await talk.say("Go on.")
    assert await watching.stages() == [2, 1, 1, 1, 1, 1]
    assert await watching.gained("pulled_tokens_total") == turn.pulled > 100
    assert await watching.gained("handles_stored_total") == 2
    decisions = await deployment.explain()
    assert decisions[-1]["attached"] is True
    assert decisions[-1]["pulled_tokens"] == turn.pulled
    assert decisions[-2]["attached"] is False


@pytest.mark.parametrize(
    ("spec", "reason", "tenant"),
    [
        (Spec(flags=(("--reuse", "off"),)), "disabled", ""),
        (Spec(), "no_tenant", None),
    ],
)
async def test_why_a_turn_is_not_eligible(deploy: Any, spec: Spec, reason: str, tenant: str | None) -> None:
    deployment = await deploy(spec)
    watching = await watch(deployment)
    await Talk(deployment, tenant=tenant).say()
    assert await watching.stages() == [0] * len(STAGES)
    assert await watching.gained("reuse_drop_total", reason=reason) == 1
    assert (await deployment.explain())[-1]["reason"] == reason


async def test_each_drop_has_a_reason(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    drops = {name: value for name, value in (await deployment.metrics()).items() if "reuse_drop_total" in name}
    assert drops
    last = (await deployment.explain())[-1]
    assert last["reason"]
    assert last["request_id"]
    assert last["status"] == 200
    for key in ("prefill", "decode", "ttft_ms", "total_ms"):
        assert last[key]


async def test_pulled_tokens_are_what_prefill_reports(deploy: Any) -> None:
    # Decode's usage says that everything was cached; only prefill knows (E18).
    deployment = await deploy(NEVER_PULLS)
    talk = Talk(deployment)
    await talk.say()
    watching = await watch(deployment)
    await talk.say("Go on.")
    assert await watching.gained("reuse_stage_total", stage="attached") == 1
    assert await watching.gained("reuse_stage_total", stage="pulled") == 0
    assert await watching.gained("pulled_tokens_total") == 0


@pytest.mark.parametrize(
    ("spec", "outcome"),
    [(Spec(), "pulled"), (NEVER_PULLS, "nothing"), (Spec(mode="stock"), "unknown")],
    ids=["reads", "never reads", "says nothing"],
)
async def test_what_became_of_handles_is_told_per_engine(deploy: Any, spec: Spec, outcome: str) -> None:
    # 200 and no byte moved: over a whole fleet an engine that never reads is hidden by those that do (EN-12).
    deployment = await deploy(spec)
    watching = await watch(deployment)
    talk = Talk(deployment)
    for _ in range(3):
        await talk.say()
    assert await watching.gained("engine_pulls_total", engine=deployment.prefill.url, outcome=outcome) == 2
    url = deployment.router.admin_url + "/debug/fleet"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        shown = {member["engine"]: member["pulls"] for member in await response.json()}
    assert shown[deployment.prefill.url][outcome] >= 2


async def test_a_refused_proof_is_counted(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, conversation_id="refused")
    await talk.say()
    talk.messages = [{"role": "user", "content": "Something else entirely. " * 20}]
    watching = await watch(deployment)
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    assert await watching.gained("reuse_stage_total", stage="attached") == 1
    assert await watching.gained("reuse_stage_total", stage="proven") == 0


async def test_retries_are_counted_by_reason(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    watching = await watch(deployment)
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500)), when=with_handle)
    await talk.say("Go on.")
    assert await watching.gained("retries_total", leg="prefill", reason="status_5xx") == 1
    assert (await deployment.explain())[-1]["retries"] == ["prefill: status_5xx"]


async def test_readiness(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    await deployment.router.wait_ready()
    await deployment.decode.kill()
    await deployment.router.wait_ready(False)
    await deployment.decode.restart()
    await deployment.router.wait_ready()
