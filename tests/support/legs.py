"""The two legs of a turn sent by hand to a pair of engines, with whatever handle the test wants.

Separate from the router so that the engine's dangers can be shown without it, and so that an answer that went straight
to an engine can be compared with one that went through the router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from pd_wire import names
from support.fake_engine import FakeEngine

FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
"""Params of a prefill leg that has no handle to offer."""


@dataclass(frozen=True, slots=True)
class HandTurn:
    """What came of one turn: both statuses, the text, D's new handle, P's report."""

    prefill_status: int
    decode_status: int | None
    text: str | None
    handle: dict[str, Any] | None
    report: dict[str, Any] | None


async def post(url: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST a JSON body; status and JSON answer."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def hand_turn(
    prefill: FakeEngine, decode: FakeEngine, body: Mapping[str, Any], handle: Any = None, *, retain: bool = True
) -> HandTurn:
    """Send ``body`` as two unstreamed legs, ``handle`` attached to the first."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    first = {**plain, "max_tokens": 1, names.KV_PARAMS: handle if handle is not None else FIRST_TURN}
    status, answer = await post(prefill.url + path, first)
    if status != 200:
        return HandTurn(status, None, None, None, None)
    params = answer[names.KV_PARAMS]
    report = params.pop(names.REPORT_KEY, None)
    extra = {} if retain else {names.RETAIN_KEY: False}
    decode_status, answer = await post(decode.url + path, {**plain, names.KV_PARAMS: {**params, **extra}})
    if decode_status != 200:
        return HandTurn(status, decode_status, None, None, report)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return HandTurn(status, decode_status, text, answer[names.KV_PARAMS], report)


def events_of(stream: bytes) -> list[Any]:
    """Parsed ``data:`` events of a stream, ``[DONE]`` as the string."""
    found: list[Any] = []
    for block in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        for line in block.split(b"\n"):
            if line.startswith(b"data:"):
                text = line[5:].strip()
                found.append("[DONE]" if text == b"[DONE]" else json.loads(text))
    return found
