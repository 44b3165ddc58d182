"""A running router's log: a line per turn that says what happened, the request's id in every line about it."""

from __future__ import annotations

import json
from typing import Any

from pd_router.shell.logs import LINE_KEYS, TURN_KEYS
from support.chat import Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind, with_handle
from support.waiting import until


async def turns(deployment: Deployment, request_id: str) -> list[dict[str, Any]]:
    """All lines with that id; waits for the one about the turn, which comes after the answer."""

    async def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in deployment.router.log.splitlines()]
        mine = [line for line in lines if line.get("request_id") == request_id]
        return mine if any(line["message"] == "turn" for line in mine) else []

    return await until(found)


async def test_a_line_per_turn(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, stream=True)
    first = await talk.say()
    [line] = await turns(deployment, first.headers["x-request-id"])
    assert (line["level"], line["logger"], line["status"], line["stream"]) == ("info", "pd_router.turns", 200, True)
    assert (line["attached"], line["reason"], line["ending"], line["stored"]) == (False, "not_found", "clean", "stored")
    second = await talk.say("Go on.")
    [line] = await turns(deployment, second.headers["x-request-id"])
    assert (line["attached"], line["linked_by"]) == (True, "history")
    assert line["pulled_tokens"] == second.pulled > 0
    assert set(line) <= {*LINE_KEYS, *TURN_KEYS}
    for part in ("queue_ms", "prefill_ms", "handoff_ms", "first_token_ms", "ttft_ms"):
        assert 0 <= line[part] <= line["total_ms"]


async def test_every_line_about_a_turn_has_its_id(deploy: Any) -> None:
    deployment = await deploy()
    talk = Talk(deployment, headers={"X-Request-Id": "mine-17"})
    await talk.say()
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500)), when=with_handle)
    talk.headers["X-Request-Id"] = "mine-18"
    await talk.say("Go on.")
    refused, again, turn = await turns(deployment, "mine-18")
    assert "status 500" in refused["message"]
    assert "trying again" in again["message"]
    assert turn["retries"] == ["prefill: status_5xx"]
    assert turn["attempts"] == 2


async def test_requests_that_are_refused_leave_a_line_too(deploy: Any) -> None:
    deployment = await deploy()
    turn = await Talk(deployment, model="of-nobody").say(check=False)
    [line] = await turns(deployment, turn.headers["x-request-id"])
    assert (line["status"], line["attempts"]) == (404, 0)
    assert "model" not in line, "a name that was refused may be anything"


async def test_text_for_people(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--log-format", "text"),)))
    turn = await Talk(deployment).say()

    async def written() -> bool:
        return f"INFO pd_router.turns turn request_id={turn.headers['x-request-id']} api=" in deployment.router.log

    await until(written)
