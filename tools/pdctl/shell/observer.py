"""What router and P say about one turn: the router's decision, and how far P's transfer counters moved.

Separate from the player so that scraping never falls into a measured interval: `before` is taken ahead of the request
and `after` follows its end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from pdctl.core.commands import Urls
from pdctl.core.exposition import sum_samples

SETTLE_SECONDS: Final = 5.0
"""P counts a transfer when its next step reports, which may be a little after its answer."""
POLL_SECONDS: Final = 0.1
PULLED: Final = ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"})
TRANSFER_SECONDS: Final = "vllm:nixl_xfer_time_seconds_sum"
TRANSFERS: Final = "vllm:nixl_xfer_time_seconds_count"


@dataclass(frozen=True, slots=True)
class PrefillCounters:
    """Sums over all prefill engines since their start. None: not exported."""

    pulled_tokens: float | None
    transfer_seconds: float | None
    transfers: float | None


@dataclass(frozen=True, slots=True)
class Observation:
    """One turn, as the servers saw it."""

    prefill_ms: float | None
    reported_tokens: int | None
    pulled_tokens: int | None
    transfer_ms: float | None
    decision: dict[str, Any] | None


class Observer:
    """Reads one deployment's router and prefill engines."""

    def __init__(self, session: aiohttp.ClientSession, urls: Urls) -> None:
        self._session = session
        self._urls = urls

    async def counters(self) -> PrefillCounters:
        """P's counters now."""
        pages = await asyncio.gather(*(self._text(f"{url}/metrics") for url in self._urls.prefill))
        page = "\n".join(pages)
        return PrefillCounters(
            sum_samples(page, *PULLED), sum_samples(page, TRANSFER_SECONDS), sum_samples(page, TRANSFERS)
        )

    async def turn(self, request_id: str, before: PrefillCounters) -> Observation:
        """What happened to one request, given the counters from just before it. No other request may run meanwhile."""
        decision = await self._decision(request_id)
        after = await self.counters()
        pulled = _moved(before.pulled_tokens, after.pulled_tokens)
        deadline = time.monotonic() + SETTLE_SECONDS
        while pulled and not _moved(before.transfers, after.transfers) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            after = await self.counters()
        seconds = _moved(before.transfer_seconds, after.transfer_seconds)
        decision = decision or {}
        return Observation(
            prefill_ms=decision.get("prefill_ms"),
            reported_tokens=decision.get("pulled_tokens"),
            pulled_tokens=None if pulled is None else round(pulled),
            transfer_ms=None if seconds is None else seconds * 1e3,
            decision=decision or None,
        )

    async def _decision(self, request_id: str) -> dict[str, Any] | None:
        """The router's record of a request. It is complete a moment after the client has the last byte."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            url = f"{self._urls.admin}/debug/explain"
            async with self._session.get(url, params={"request_id": request_id}) as response:
                found: list[dict[str, Any]] = await response.json()
            if found:
                return found[-1]
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(POLL_SECONDS)

    async def _text(self, url: str) -> str:
        async with self._session.get(url) as response:
            return await response.text()


def _moved(before: float | None, after: float | None) -> float | None:
    # A counter that appears during the turn began at zero; one that isn't there afterwards is unknown.
    return None if after is None else after - (before or 0.0)
