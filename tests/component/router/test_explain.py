"""`/debug/explain`: who served each attempt of a turn, why, and who was passed over for which reason."""

from __future__ import annotations

from typing import Any

from support.chat import Talk
from support.deployment import Deployment
from support.fake_engine import Behaviour, Fault, Kind
from support.pod_deployment import PodDeployment
from support.specs import TWO_BY_TWO


async def told(deployment: Deployment) -> dict[str, Any]:
    return (await deployment.explain())[-1]


async def test_a_conversation(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO)
    talk = Talk(deployment)
    first = await talk.say()
    decision = await told(deployment)
    assert (decision["decode_reason"], decision["prefill_reason"]) == ("least loaded", "least outstanding tokens")
    assert decision["reason"] == "not_found"
    assert "holder" not in decision
    await talk.say("Go on.")
    decision = await told(deployment)
    holder = next(engine for engine in deployment.decodes if first.decodes[0] in engine.generates)
    assert (decision["decode"], decision["decode_reason"], decision["holder"]) == (holder.url, "holder", holder.url)
    assert (decision["attached"], decision["found_by"]) == (True, "history")
    assert decision["holder_tokens"] > 100


async def test_an_engine_whose_breaker_is_open(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    bad = deployment.prefill
    bad.default = Behaviour(fault=Fault(Kind.STATUS, status=500))
    for _ in range(12):
        await Talk(deployment).say()
    decision = await told(deployment)
    assert decision["prefill_rejected"] == {bad.url: "failing: its breaker is open"}


async def test_an_engine_that_is_down(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    talk = Talk(deployment)
    await talk.say()
    holder = next(engine for engine in deployment.decodes if engine.generates)
    await holder.kill()
    await deployment.wait_ready(3)
    await talk.say("Go on.")
    decision = await told(deployment)
    assert decision["decode_rejected"] == {holder.url: "not ready"}
    assert decision["decode_reason"] in ("holder not available", "least loaded")


async def test_an_engine_that_drains(pods: PodDeployment) -> None:
    other = pods.decodes[1]
    pods.join(other)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", other: "ready"})
    talk = Talk(pods)
    first = await talk.say()
    holder, rest = (pods.decode, other) if first.decodes[0] in pods.decode.generates else (other, pods.decode)
    pods.move(holder, deleting=True)
    await pods.wait_told()
    await talk.say("Go on.")
    decision = await told(pods)
    assert (decision["decode"], decision["decode_rejected"]) == (pods.name(rest), {pods.name(holder): "draining"})
    assert (decision["reason"], decision["decode_reason"]) == ("holder_draining", "holder not available")


async def test_each_attempt_is_told(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    for engine in deployment.decodes:
        engine.next(
            Behaviour(fault=Fault(Kind.STATUS, status=500)),
            when=lambda _record: len(deployment.records(deployment.decodes)) == 1,
        )
    await Talk(deployment).say()
    decision = await told(deployment)
    [tried] = decision["tried"]
    assert tried["failed"] == "decode"
    assert {tried["decode"], decision["decode"]} == {engine.url for engine in deployment.decodes}
    assert {tried["prefill"], decision["prefill"]} == {engine.url for engine in deployment.prefills}
