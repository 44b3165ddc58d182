"""Turns without a router: prompts of token ids straight to the engines of a running pair.

Separate from `engine_pair` because a test that reads a handle many times, late, or from three places at once needs what
the router is there to prevent. What counts is the log-probability of the token that P samples: with one wrong block in
the prompt it differs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from support.engine_pair import Pair


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer: the log-probability of its token, what D needs, and what became of the handle."""

    logprob: float
    params: dict[str, Any]
    report: dict[str, Any]
    seconds: float

    @property
    def pulled(self) -> int:
        """Tokens that P read and used."""
        return int(self.report.get("pulled_tokens", 0))

    @property
    def gone(self) -> int:
        """Tokens of blocks that had been reused before the read."""
        return int(self.report.get("gone_tokens", 0))

    @property
    def wasted(self) -> int:
        """Tokens of blocks that were reused during the read."""
        return int(self.report.get("wasted_tokens", 0))


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids that no other number's prompt shares a block with."""
    step = 7 + 2 * (number % 97)
    return [1000 + (number * 31 + step * place) % 5000 for place in range(tokens)]


async def prefill(pair: Pair, tokens: list[int], handle: dict[str, Any] | None = None) -> Prefilled:
    """The first leg. `handle` is sent as it is."""
    params = handle or {"do_remote_decode": True, "do_remote_prefill": False}
    sent = {"model": "tiny", "prompt": tokens, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer, seconds = await _post(pair, pair.deployment.urls.prefill[0], {**sent, "kv_transfer_params": params})
    given = answer["kv_transfer_params"]
    report = given.pop("pd_report", None) or {}
    return Prefilled(float(answer["choices"][0]["logprobs"]["token_logprobs"][0]), given, report, seconds)


async def decode(pair: Pair, tokens: list[int], params: dict[str, Any] | None, answer_tokens: int = 4) -> Any:
    """The second leg; returns the handle that it leaves, or what stands there instead."""
    sent: dict[str, Any] = {"model": "tiny", "prompt": tokens, "temperature": 0, "max_tokens": answer_tokens}
    if params is not None:
        sent["kv_transfer_params"] = params
    answer, _ = await _post(pair, pair.deployment.urls.decode[0], {**sent, "ignore_eos": True})
    return answer.get("kv_transfer_params")


async def turn(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """A whole turn; returns decode's handle."""
    first = await prefill(pair, tokens)
    handle: dict[str, Any] = await decode(pair, tokens, first.params)
    return handle


async def _post(pair: Pair, url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    async with pair.session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer, time.monotonic() - began
