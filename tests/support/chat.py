"""A client for router tests: conversations whose every byte is kept and whose every answer is compared.

Separate from the deployment because this is the other side: it knows HTTP and the OpenAI bodies, nothing of handles.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.deployment import Deployment
from support.fake_engine import AnswerStyle, Record
from support.legs import events_of

TEXT = "Please describe the harbour in the morning, the boats, the gulls, and what the old pilot said about it. " * 2
"""Long enough for a handle to be worth using: more than 64 tokens."""

CONTENT = b"kv="
"""What every answer of a fake engine begins with."""

_numbers = itertools.count(1)


@dataclass(slots=True)
class Turn:
    """One answer. ``error`` names what broke the connection, if anything did."""

    body: dict[str, Any]
    status: int
    headers: Mapping[str, str]
    raw: bytes
    error: str | None = None
    prefills: list[Record] = field(default_factory=list)
    decodes: list[Record] = field(default_factory=list)

    @property
    def events(self) -> list[Any]:
        """Stream events, ``[DONE]`` as text."""
        return events_of(self.raw)

    @property
    def json(self) -> Any:
        """An unstreamed body."""
        return json.loads(self.raw)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, put together from a stream if need be."""
        if not self.body.get("stream"):
            message: dict[str, Any] = self.json["choices"][0]["message"]
            return message
        merged: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for event in self.events:
            if event == "[DONE]" or not event.get("choices") or event["choices"][0]["index"]:
                continue
            delta = event["choices"][0]["delta"]
            merged["content"] += delta.get("content") or ""
            if delta.get("reasoning"):
                merged["reasoning"] = merged.get("reasoning", "") + delta["reasoning"]
            for part in delta.get("tool_calls") or ():
                if part.get("id"):
                    calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        if calls:
            merged["tool_calls"] = calls
        return merged

    @property
    def text(self) -> str:
        """The answer's text, of either API."""
        if "messages" in self.body:
            return str(self.message["content"])
        if not self.body.get("stream"):
            return str(self.json["choices"][0]["text"])
        return "".join(event["choices"][0]["text"] for event in self.events if event != "[DONE]" and event["choices"])

    @property
    def attached(self) -> list[str]:
        """Ids of D's handles that went to prefill engines for this turn."""
        return [record.handle_id for record in self.prefills if record.handle_id is not None]

    @property
    def pulled(self) -> int:
        """Tokens that prefill read from decode for this turn."""
        return sum(record.pulled_tokens or 0 for record in self.prefills)


class Talk:
    """One conversation of one tenant. Texts and tenants are unique per object unless given."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        tenant: str | None = "",
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        style: AnswerStyle | None = None,
        opening: str | None = None,
        **fields: Any,
    ) -> None:
        """``tenant`` None sends no principal. ``fields`` go into every body."""
        number = next(_numbers)
        self.deployment = deployment
        self.headers = dict(headers or {})
        if tenant is not None:
            self.headers.setdefault("Authorization", f"Bearer sk-canary-{tenant or number}")
        self.fields = {"model": "tiny", "stream": stream, **fields}
        self.style = style
        self.opening = opening if opening is not None else f"Conversation {number}. "
        self.messages: list[dict[str, Any]] = []

    def body(self, text: str | None, **fields: Any) -> dict[str, Any]:
        """The next body; ``text`` None adds no message."""
        first = "" if self.messages else self.opening
        said = [] if text is None else [{"role": "user", "content": first + text}]
        return {**self.fields, "messages": [*self.messages, *said], **fields}

    async def say(
        self,
        text: str | None = TEXT,
        *,
        check: bool = True,
        at_content: Callable[[], object] | None = None,
        **fields: Any,
    ) -> Turn:
        """Say something and remember the answer; with ``check``, fail unless it is the right one.

        ``text`` None adds no message. ``at_content`` is called when the first content has arrived.
        """

        def seen(raw: bytes) -> None:
            if at_content is not None and CONTENT in raw:
                at_content()

        body = self.body(text, **fields)
        turn = await send(self.deployment, body, self.headers, seen=seen)
        if check:
            assert turn.status == 200, turn.raw
            assert_right(self.deployment, turn, self.style)
        if turn.status == 200 and turn.error is None:
            self.messages = [*body["messages"], turn.message]
        return turn


def assert_right(deployment: Deployment, turn: Turn, style: AnswerStyle | None = None) -> None:
    """Fail unless the answer is complete and the one that recomputing gives."""
    right = deployment.right(turn.body, style)
    assert turn.error is None
    if turn.body.get("stream"):
        assert turn.events[-1] == "[DONE]"
    if right.tool is not None:
        function = turn.message["tool_calls"][0]["function"]
        assert (function["name"], function["arguments"]) == right.tool
    else:
        assert turn.text == right.content


async def send(
    deployment: Deployment,
    body: Mapping[str, Any] | bytes,
    headers: Mapping[str, str] | None = None,
    *,
    path: str | None = None,
    seconds: float = 30.0,
    seen: Callable[[bytes], object] | None = None,
) -> Turn:
    """POST one body to the router, reading the answer to its end however it ends.

    ``seen`` is called with the body so far whenever a piece of it has arrived.
    """
    parsed = json.loads(body) if isinstance(body, bytes) and _is_json(body) else body
    parsed = dict(parsed) if isinstance(parsed, Mapping) else {}
    path = path or ("/v1/completions" if "prompt" in parsed else "/v1/chat/completions")
    marks = {engine: len(engine.generates) for engine in deployment.engines}
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    turn = Turn(parsed, 0, {}, b"")
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.post(
                deployment.router.url + path, data=data, headers={"Content-Type": "application/json", **(headers or {})}
            ) as response,
        ):
            turn.status, turn.headers = response.status, response.headers
            deployment.seen.append(b"\r\n".join(b": ".join(pair) for pair in response.raw_headers))
            async for piece in response.content.iter_any():
                turn.raw += piece
                if seen is not None:
                    seen(turn.raw)
    except (aiohttp.ClientError, ConnectionError) as error:
        turn.error = type(error).__name__
    deployment.seen.append(turn.raw)
    for engine in deployment.engines:
        new = engine.generates[marks[engine] :]
        (turn.prefills if engine in deployment.prefills else turn.decodes).extend(new)
    return turn


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True
