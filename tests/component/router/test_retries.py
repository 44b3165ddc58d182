"""What is tried again, and how often (RP-16): a budget where engines are at work, none where they are gone."""

from __future__ import annotations

from typing import Any

import pytest

from support.chat import Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind, Point, with_handle
from support.specs import TWO_BY_TWO

NONE_LEFT = Spec(prefills=2, decodes=2, flags=(("--retry-share", "0"),))
"""A budget that is used up from the start."""

FAULTS = [
    Fault(Kind.STATUS, status=500),
    Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503),
    Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 429),
    Fault(Kind.FINISH_ERROR, Point.AFTER_HEADERS),
]


async def refused(deployment: Deployment) -> float:
    return (await deployment.metrics())["pd_router_retries_refused_total"]


def fail_once(deployment: Deployment, role: str, fault: Fault) -> None:
    """The first leg of that role fails, whichever engine it reaches."""
    engines = deployment.prefills if role == "prefill" else deployment.decodes
    for engine in engines:
        engine.next(Behaviour(fault=fault), when=lambda _record: len(deployment.records(engines)) == 1)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind.value} {fault.status}")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_failure_is_passed_on_when_the_budget_is_used_up(deploy: Any, role: str, fault: Fault) -> None:
    deployment = await deploy(NONE_LEFT, breaks=True)
    before = await refused(deployment)
    fail_once(deployment, role, fault)
    turn = await Talk(deployment).say(check=False)
    assert turn.status in (429, 502, 503)
    assert len(turn.prefills) == 1
    assert await refused(deployment) == before + 1
    told = (await deployment.explain())[-1]
    assert (told["attempts"], told["not_retried"]) == (1, "the retry budget is used up")
    await Talk(deployment).say()


@pytest.mark.parametrize("kind", [Kind.CLOSE, Kind.RESET])
async def test_a_lost_connection_costs_no_budget(deploy: Any, kind: Kind) -> None:
    # An engine that is gone does no work for the turn, so another attempt adds none to what is in trouble.
    deployment = await deploy(NONE_LEFT, breaks=True)
    fail_once(deployment, "decode", Fault(kind))
    turn = await Talk(deployment).say()
    assert len(turn.decodes) == 2


async def test_a_handle_that_failed_costs_no_budget(deploy: Any) -> None:
    # Reuse must not be the reason why a client sees an error.
    deployment = await deploy(NONE_LEFT, breaks=True)
    talk = Talk(deployment)
    await talk.say()
    for engine in deployment.prefills:
        engine.next(Behaviour(fault=Fault(Kind.STATUS, status=500)), when=with_handle)
    turn = await talk.say("Go on.")
    assert sorted(record.handle_id is not None for record in turn.prefills) == [False, True]


async def test_an_outage_is_not_doubled(deploy: Any) -> None:
    deployment = await deploy(NONE_LEFT, breaks=True)
    for engine in deployment.decodes:
        engine.default = Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503))
    for _ in range(20):
        turn = await Talk(deployment).say(check=False)
        assert turn.status == 503
        assert int(turn.headers["Retry-After"]) >= 1
    assert len(deployment.records(deployment.decodes)) <= 20


async def test_a_second_attempt_goes_elsewhere(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO, breaks=True)
    for role in ("prefill", "decode"):
        for engine in deployment.engines:
            engine.requests.clear()
        fail_once(deployment, role, Fault(Kind.STATUS, status=500))
        turn = await Talk(deployment).say()
        engines = deployment.prefills if role == "prefill" else deployment.decodes
        assert [len(engine.generates) for engine in engines] == [1, 1]
        told = (await deployment.explain())[-1]
        assert [one["failed"] for one in told["tried"]] == [role]
        assert told["tried"][0][role] != told[role]
        assert len(turn.decodes) == (1 if role == "prefill" else 2)


async def test_a_hand_off_that_failed_is_not_tried_with_the_same_pair(deploy: Any) -> None:
    deployment = await deploy(Spec(prefills=2), breaks=True)
    for _ in range(4):
        deployment.decode.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
        await Talk(deployment).say()
        told = (await deployment.explain())[-1]
        assert told["tried"][0]["prefill"] != told["prefill"]
