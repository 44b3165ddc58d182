"""Writes a stream event by event, or cut at planned byte offsets, whatever the events are (RP-02)."""

from __future__ import annotations

import asyncio

from aiohttp import web

from support.fake_engine.behaviour import Behaviour


class Recutter:
    """Writes a stream event by event, or cut at planned byte offsets."""

    def __init__(self, response: web.StreamResponse, behaviour: Behaviour) -> None:
        self._response = response
        self._cuts = sorted(behaviour.cuts) if behaviour.cuts is not None else None
        self._delay = behaviour.cut_delay
        self._held = b""
        self._sent = 0

    async def write(self, data: bytes) -> None:
        """Send ``data``, keeping back what stands after the last planned cut so far."""
        if self._cuts is None:
            await self._response.write(data)
            return
        self._held += data
        while self._cuts and self._cuts[0] <= self._sent + len(self._held):
            size = self._cuts.pop(0) - self._sent
            if size > 0:
                await self._send(size)

    async def flush(self) -> None:
        """Send what was kept back."""
        if self._held:
            await self._send(len(self._held))

    async def _send(self, size: int) -> None:
        await self._response.write(self._held[:size])
        self._held = self._held[size:]
        self._sent += size
        await asyncio.sleep(self._delay)
