"""A release that does not carry the params on an endpoint: decode serves it alone, and people can see it (RP-19)."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, send
from support.deployment import Deployment, Spec
from support.waiting import until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "tiny", "input": TEXT, "conversation_id": "old"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]},
}


async def shown(deployment: Deployment, version: str | None) -> list[dict[str, Any]]:
    """`/debug/fleet`, once every engine's version is known."""

    async def known() -> list[dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(deployment.router.admin_url + "/debug/fleet") as response,
        ):
            fleet: list[dict[str, Any]] = await response.json()
        return fleet if all(member["version"] == version for member in fleet) else []

    return await until(known)


@pytest.mark.parametrize("version", ["0.28.1", "unknown"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_old_or_unknown_release(deploy: Any, path: str, stream: bool, version: str) -> None:
    deployment = await deploy(Spec(engine=(("version", version),)))
    for _ in range(2):
        body = {**BODIES[path], "stream": stream}
        turn = await send(deployment, body, {"Authorization": f"Bearer sk-old-{path}-{stream}"}, path=path)
        assert turn.status == 200, turn.raw
        legs = 1 if path.endswith("/completions") else 0
        assert len(turn.prefills) == legs
        assert [record.params is not None for record in turn.decodes] == [bool(legs)]
    why = (await deployment.explain())[-1].get("link_fault")
    assert why == (None if legs else "this release's endpoint carries no params")


async def test_it_is_shown_to_people(deploy: Any) -> None:
    deployment = await deploy()
    for member in await shown(deployment, "0.32.0"):
        assert member["carries"]["responses"] == {"request": True, "whole": True, "streamed": True}
        assert member["carries"]["messages"] == {"request": True, "whole": True, "streamed": True}
    old = await deploy(Spec(engine=(("version", "0.28.1"),)))
    for member in await shown(old, "0.28.1"):
        assert member["carries"]["responses"] == {"request": False, "whole": False, "streamed": False}
        assert member["carries"]["chat.completions"]["request"]


async def test_a_new_process_is_asked_anew(deploy: Any) -> None:
    deployment = await deploy(breaks=True)
    await shown(deployment, "0.32.0")
    for engine in deployment.engines:
        object.__setattr__(engine.config, "version", "0.33.1")
    try:
        await deployment.heal()
        await shown(deployment, "0.33.1")
    finally:
        for engine in deployment.engines:
            object.__setattr__(engine.config, "version", "0.32.0")
    turn = await send(deployment, BODIES["/v1/messages"], {"x-api-key": "sk-anew"}, path="/v1/messages")
    assert json.loads(turn.raw)["type"] == "message"
    assert len(turn.prefills) == 1
