"""Plays conversations through a router as any OpenAI client would: streamed chat, no conversation id, no extra field.

Measures TTFT where the user is: from sending the request to the first piece of text.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

REQUEST_SECONDS: Final = 600.0
SHOWN_ERROR: Final = 300
RETRIED: Final = (429, 503)
PATIENCE_SECONDS: Final = 120
"""How long to come again, in all, when an engine is too busy to answer its health checks."""
LEAK: Final = b"kv_transfer_params"


class PlayError(RuntimeError):
    """A turn that didn't end as a turn should; the message says which request and what came instead."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. ``ttft_ms`` is None when no text came; ``ending`` is the finish reason."""

    text: str
    request_id: str
    ttft_ms: float | None
    prompt_tokens: int | None
    reply_tokens: int | None
    ending: str | None


@dataclass(frozen=True, slots=True)
class _Wait:
    """The router asks to come again, as OpenAI clients do. The next attempt is timed anew."""

    seconds: int
    refusal: str


class Conversation:
    """One conversation: remembers what was said and sends it all again each turn."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str, reply_tokens: int) -> None:
        self._session = session
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._reply_tokens = reply_tokens
        self._messages: list[dict[str, str]] = []

    async def ask(self, question: str) -> Reply:
        """Send the conversation so far with one more question, and read the streamed answer to its end.

        Raises:
            PlayError: an error status that doesn't pass, an error in the stream, no clean ending, or a handle in it.
        """
        self._messages.append({"role": "user", "content": question})
        body = {
            "model": self._model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._reply_tokens,
            "temperature": 0,
        }
        patience = PATIENCE_SECONDS
        try:
            while isinstance(answer := await self._send(body), _Wait):
                patience -= answer.seconds
                if patience < 0:
                    raise PlayError(answer.refusal)
                await asyncio.sleep(answer.seconds)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PlayError(f"the request failed: {error or type(error).__name__}") from error
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer

    async def _send(self, body: dict[str, Any]) -> Reply | _Wait:
        sent = time.perf_counter()
        async with self._session.post(self._url, json=body) as response:
            if response.status == 200:
                return await _read(response, sent)
            refusal = f"the router answered {response.status}: {(await response.text())[:SHOWN_ERROR]}"
            after = response.headers.get("retry-after", "")
            if response.status in RETRIED and after.isdigit():
                return _Wait(max(1, int(after)), refusal)
            raise PlayError(refusal)


def open_session() -> aiohttp.ClientSession:
    """A session for `Conversation`: one connection per turn in flight, long deadlines, big lines allowed."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS), read_bufsize=1 << 20)


async def _read(response: aiohttp.ClientResponse, sent: float) -> Reply:
    pieces: list[str] = []
    ttft: float | None = None
    usage: dict[str, Any] = {}
    ending: str | None = None
    done = False
    async for raw in response.content:
        line = raw.strip()
        if LEAK in line:
            raise PlayError("the stream holds kv_transfer_params, which must never reach a client")
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise PlayError(f"the stream broke off: {json.dumps(event['error'])[:SHOWN_ERROR]}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                ttft = ttft if ttft is not None else (time.perf_counter() - sent) * 1e3
                pieces.append(text)
            ending = choice.get("finish_reason") or ending
    if not done:
        raise PlayError("the stream ended without [DONE]")
    return Reply(
        text="".join(pieces),
        request_id=response.headers.get("x-request-id", ""),
        ttft_ms=ttft,
        prompt_tokens=usage.get("prompt_tokens"),
        reply_tokens=usage.get("completion_tokens"),
        ending=ending,
    )
