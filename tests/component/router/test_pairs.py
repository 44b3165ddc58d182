"""Two engines that can't reach each other while both serve others (EL-04): only the pair gets no transfers."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from support.chat import Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, FakeEngine
from support.specs import TWO_BY_TWO
from support.waiting import until

SHORT = Spec(prefills=2, decodes=2, flags=(("--pair-quarantine", "0.5"),))
"""Two pairs of each kind, quarantines that end within a test."""


async def fleet(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """`/debug/fleet` by engine."""
    url = deployment.router.admin_url + "/debug/fleet"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return {member["engine"]: member for member in await response.json()}


async def quarantined(deployment: Deployment) -> set[tuple[str, str, str]]:
    """(prefill, decode, direction) of the pairs that get no transfers."""
    return {
        (key, one["decode"], one["direction"])
        for key, member in (await fleet(deployment)).items()
        for one in member["quarantined_with"]
    }


def cut(reader: FakeEngine, holder: FakeEngine) -> None:
    """From here on `reader` can't read the blocks of `holder`."""
    reader.connector.cut_off.add(holder.name)


async def a_pair(deployment: Deployment) -> tuple[FakeEngine, FakeEngine, FakeEngine, FakeEngine]:
    """Prefill and decode engine of a turn, which equals that take turns will make a pair again, and the two others."""
    turn = await Talk(deployment).say()
    by = {id(record): engine for engine in deployment.engines for record in engine.generates}
    first, bad = by[id(turn.prefills[0])], by[id(turn.decodes[0])]
    [second] = [engine for engine in deployment.prefills if engine is not first]
    [good] = [engine for engine in deployment.decodes if engine is not bad]
    return first, second, bad, good


async def until_quarantined(deployment: Deployment) -> None:
    async def found() -> bool:
        await Talk(deployment).say()
        return bool(await quarantined(deployment))

    await until(found, pause=0.0)


def failed(engine: FakeEngine) -> int:
    return sum(record.status not in (200, None) for record in engine.generates)


async def test_a_pair_that_cannot_hand_over_gets_no_turns_and_its_engines_do(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    first, _, bad, good = await a_pair(deployment)
    cut(bad, first)
    for _ in range(16):
        await Talk(deployment).say()
    assert await quarantined(deployment) == {(first.url, bad.url, "handoff")}
    sample = f'pd_router_pair_quarantined{{decode="{bad.url}",direction="handoff",prefill="{first.url}"}}'
    assert (await deployment.metrics())[sample] == 1.0
    seen = failed(bad)
    assert seen == 3
    for engine in deployment.engines:
        engine.requests.clear()
    for _ in range(12):
        await Talk(deployment).say()
    assert failed(bad) == 0
    assert {len(engine.generates) > 0 for engine in deployment.engines} == {True}
    members = await fleet(deployment)
    assert {member["breaker"] for member in members.values()} == {"closed"}
    told = (await deployment.explain())[-12:]
    reasons = [
        decision.get("prefill_rejected", {}).get(first.url) for decision in told if decision["decode"] == bad.url
    ]
    assert set(reasons) == {"pair in quarantine: hand-off"}
    assert len(good.generates) > 0


@pytest.mark.parametrize("load_failure", ["fail", "finish_error", "recompute"])
async def test_a_pair_that_cannot_pull_is_not_asked_to(deploy: Any, load_failure: Any) -> None:
    # "recompute" answers 200 and says in its report that the read failed: slow turns, and no error anywhere (EN-12).
    deployment = await deploy(Spec(prefills=1, decodes=2), breaks=True)
    prefill, (bad, _) = deployment.prefill, deployment.decodes
    prefill.default = Behaviour(load_failure=load_failure)
    cut(prefill, bad)
    attached = {bad.url: 0}
    reasons = set()
    for _ in range(8):
        talk = Talk(deployment)
        await talk.say()
        turn = await talk.say("Go on.")
        told = (await deployment.explain())[-1]
        if told["holder" if "holder" in told else "decode"] == bad.url or bad.url in str(told.get("tried")):
            attached[bad.url] += len(turn.attached)
        reasons.add(told.get("reason"))
    assert await quarantined(deployment) == {(prefill.url, bad.url, "pull")}
    assert "pair_quarantined" in reasons
    assert attached[bad.url] == 3
    assert {member["breaker"] for member in (await fleet(deployment)).values()} == {"closed"}


async def test_another_prefill_engine_reads_instead(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    first, second = deployment.prefills
    for holder in deployment.decodes:
        cut(first, holder)
    wanted = {(first.url, holder.url, "pull") for holder in deployment.decodes}

    async def found() -> bool:
        # Two at a time, so that the reader of a second turn is not always the same.
        talks = [Talk(deployment), Talk(deployment), Talk(deployment)]
        for talk in talks:
            await talk.say()
        await asyncio.gather(*(talk.say("Go on.") for talk in talks))
        return await quarantined(deployment) == wanted

    await until(found, pause=0.0)
    for _ in range(4):
        talk = Talk(deployment)
        await talk.say()
        turn = await talk.say("Go on.")
        assert turn.pulled > 100
        assert second.generates[-1] is turn.prefills[-1]
    # The engine that can't pull still does first turns.
    assert any(record.handle_id is None for record in first.generates[-6:])


async def test_a_turn_probes_the_pair_after_a_while(deploy: Any) -> None:
    deployment = await deploy(SHORT, breaks=True)
    first, _, bad, _ = await a_pair(deployment)
    cut(bad, first)
    await until_quarantined(deployment)
    bad.connector.cut_off.clear()

    async def healed() -> bool:
        await Talk(deployment).say()
        await Talk(deployment).say(n=2, check=False)  # without prefill: whose turn it is shifts, and so do the pairs
        return not await quarantined(deployment)

    await until(healed)
    for _ in range(6):
        await Talk(deployment).say()
    assert {record.fate for record in deployment.records()} <= {"ended", "failed"}
    assert await quarantined(deployment) == set()


async def test_a_pair_in_quarantine_is_better_than_none(deploy: Any) -> None:
    deployment = await deploy(Spec(prefills=2), breaks=True)
    first, second = deployment.prefills
    decode = deployment.decode
    cut(decode, first)
    await until_quarantined(deployment)
    decode.connector.cut_off.clear()
    await second.kill()
    await deployment.wait_ready(2)
    turn = await Talk(deployment).say()
    assert turn.prefills[-1] is first.generates[-1]
    assert (await deployment.explain())[-1]["prefill_reason"] == "all pairs are in quarantine"
    await second.restart()
    await deployment.wait_ready(3)


async def test_a_new_process_is_a_new_pair(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    first, _, bad, _ = await a_pair(deployment)
    cut(bad, first)
    await until_quarantined(deployment)
    await bad.restart()

    async def forgotten() -> bool:
        return not await quarantined(deployment)

    await until(forgotten)
    await deployment.wait_ready(4)


async def test_no_client_sees_any_of_it(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    (first, second), (bad, other) = deployment.prefills, deployment.decodes
    cut(bad, first)
    cut(first, bad)
    cut(second, other)

    async def converse() -> None:
        talk = Talk(deployment, stream=True)
        for _ in range(4):
            await talk.say()

    await asyncio.gather(*(converse() for _ in range(12)))
