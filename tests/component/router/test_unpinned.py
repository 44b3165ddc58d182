"""Handles to blocks that nobody keeps: any number of next turns use one, and none gets a wrong answer from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from support.chat import Talk, Turn, send
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind, Point, with_handle

UNPINNED = ("retention", "Unpinned")
ROOMY = Spec(connector=(UNPINNED,))
SMALL = Spec(connector=(UNPINNED, ("blocks", 48), ("prefix_caching", False)))
"""A decode engine with room for a few conversations, which soon writes over what it gave back."""


async def ask(deployment: Deployment, talk: Talk, texts: Sequence[str]) -> list[Turn]:
    """Several next turns of one conversation at once; every answer is right."""
    bodies = [talk.body(text) for text in texts]
    turns = await asyncio.gather(*(send(deployment, body, talk.headers) for body in bodies))
    for body, turn in zip(bodies, turns, strict=True):
        assert turn.status == 200, turn.raw
        assert turn.text == deployment.right(body).content
    return list(turns)


@pytest.mark.parametrize("link", [{}, {"conversation_id": "fork"}])
async def test_every_branch_of_a_conversation_reuses_the_same_turn(deploy: Any, link: dict[str, Any]) -> None:
    deployment = await deploy(ROOMY)
    talk = Talk(deployment, **link)
    await talk.say()
    deployment.prefill.requests.clear()
    await ask(deployment, talk, ["Go on.", "No, tell me something else.", "Go on.", "And then?"])
    carriers = [record for record in deployment.prefill.requests if record.handle_id]
    assert len(carriers) == 4
    assert len({record.handle_id for record in carriers}) == 1
    assert all(record.pulled_tokens for record in carriers)


async def test_an_answer_that_is_asked_for_again_reuses_the_turn_before_it(deploy: Any) -> None:
    deployment = await deploy(ROOMY)
    talk = Talk(deployment)
    await talk.say()
    body = talk.body("Go on.")
    for _ in range(3):
        [turn] = await ask(deployment, talk, ["Go on."])
        assert turn.body == body
        assert deployment.prefill.requests[-1].pulled_tokens


async def test_a_turn_that_fails_does_not_use_the_handle_up(deploy: Any) -> None:
    deployment = await deploy(ROOMY)
    talk = Talk(deployment)
    await talk.say()
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503)), when=with_handle)
    await ask(deployment, talk, ["Go on."])
    await ask(deployment, talk, ["Go on."])
    assert deployment.prefill.requests[-1].pulled_tokens


async def test_decode_admits_more_conversations_than_it_has_room_for(deploy: Any) -> None:
    deployment = await deploy(SMALL)
    for _ in range(12):
        await Talk(deployment).say()
    assert deployment.decode.connector.retained() == {}
    assert deployment.decode.connector.counters["waits_for_blocks"] == 0
    talk = Talk(deployment)
    await talk.say()
    turn = await talk.say("Go on.")
    assert turn.pulled


async def test_what_was_overwritten_is_computed_again_and_said(deploy: Any) -> None:
    deployment = await deploy(SMALL)
    gone = wasted = 0
    for _ in range(6):
        talks = [Talk(deployment) for _ in range(5)]
        for talk in talks:
            await talk.say()
        deployment.prefill.connector.pull_delay = 0.02
        await asyncio.gather(*(talk.say("Go on.") for talk in talks))
        deployment.prefill.connector.pull_delay = 0.0
        for told in (await deployment.explain())[-5:]:
            gone += told.get("gone_tokens", 0)
            wasted += told.get("wasted_tokens", 0)
    assert gone
    assert wasted


async def test_a_restarted_holder_is_not_asked(deploy: Any) -> None:
    deployment = await deploy(ROOMY, breaks=True)
    talk = Talk(deployment)
    await talk.say()
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    turn = await talk.say("Go on.")
    assert turn.pulled == 0


async def test_another_tenant_finds_nothing(deploy: Any) -> None:
    deployment = await deploy(ROOMY)
    talk = Talk(deployment, conversation_id="mine")
    await talk.say()
    other = Talk(deployment, conversation_id="mine", opening=talk.opening)
    other.messages = list(talk.messages)
    turn = await other.say("Go on.")
    assert turn.attached == []
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1


@pytest.mark.parametrize(("spec", "pins"), [(ROOMY, False), (Spec(), True)], ids=["Unpinned", "Pinned"])
async def test_nothing_counts_as_pinned(deploy: Any, spec: Spec, pins: bool) -> None:
    deployment = await deploy(spec)
    await Talk(deployment).say()
    figures = await deployment.metrics()
    pinned = [value for name, value in figures.items() if name.startswith("pd_router_pinned_")]
    assert any(pinned) is pins
