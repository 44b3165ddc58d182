"""A steady load of streamed conversations on a router's Service, from inside the cluster's network.

``python -m support.cluster_serving_load --url URL --model NAME --talks N --report FILE``: N conversations side by side
until SIGTERM, each turn compared with the one right answer. Nothing is tried twice, so every fault that a client could
see is in the report. Separate process, because only it is in that network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp

from support.cluster_serving_engine import right_answer
from support.deployment import MARKERS

TURNS: Final = 4
"""Turns of a conversation, after which another one begins."""

TURN_SECONDS: Final = 60.0
PAUSE: Final = 0.1
TEXT: Final = "Please describe the harbour in the morning, the boats, the gulls, and what the old pilot said about it. "


class Load:
    """``errors`` and the counts go into the report after every turn."""

    def __init__(self, url: str, model: str, report: Path) -> None:
        self._url, self._model, self._report = url, model, report
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []
        self._ending = asyncio.Event()

    async def run(self, talks: int) -> None:
        """Talk until SIGTERM; then every conversation ends its turn."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ending.set)
        self._write()
        timeout = aiohttp.ClientTimeout(total=TURN_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._talk_on(session, number) for number in range(talks)))

    async def _talk_on(self, session: aiohttp.ClientSession, number: int) -> None:
        begun = 0
        while not self._ending.is_set():
            begun += 1
            messages: list[dict[str, Any]] = []
            for turn in range(TURNS):
                if self._ending.is_set():
                    return
                said = f"Conversation {number}.{begun}, turn {turn}. {TEXT * 2}"
                body = {"model": self._model, "stream": True, "messages": [*messages, _message("user", said)]}
                try:
                    answer = await self._turn(session, body, f"key-{number}")
                except Exception as error:  # noqa: BLE001
                    # Whatever it is, a client saw it.
                    self._fail(f"{number}.{begun}.{turn}: {type(error).__name__} {error}")
                    await asyncio.sleep(1.0)
                    break
                self._counts["turns"] += 1
                self._counts["follow_ups"] += turn > 0
                self._write()
                messages = [*body["messages"], _message("assistant", answer)]
                await asyncio.sleep(PAUSE)

    async def _turn(self, session: aiohttp.ClientSession, body: dict[str, Any], key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            raw = await response.read()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {raw[:300]!r}")
        if leaked := [word for word in MARKERS if word.encode() in raw]:
            raise RuntimeError(f"{leaked} in the answer")
        events = [line[len(b"data: ") :] for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
        if not events or events[-1] != b"[DONE]":
            raise RuntimeError(f"the stream ends with {events[-1:]}")
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        if choices[-1]["finish_reason"] != "stop":
            raise RuntimeError(f"finish reason {choices[-1]['finish_reason']}")
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        if text != right_answer(body):
            raise RuntimeError(f"wrong KV behind the answer {text!r}")
        return text

    def _fail(self, what: str) -> None:
        self._errors.append(f"{time.strftime('%H:%M:%S')} {what}")
        self._write()

    def _write(self) -> None:
        part = self._report.with_suffix(".part")
        part.write_text(json.dumps({**self._counts, "errors": self._errors}), encoding="utf-8")
        os.replace(part, self._report)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="load")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--talks", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    await Load(arguments.url, arguments.model, arguments.report).run(arguments.talks)


if __name__ == "__main__":
    asyncio.run(_main())
