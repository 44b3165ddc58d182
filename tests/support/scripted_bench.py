"""A router between one scripted engine of each role, and what must be true of its log when it ends."""

from __future__ import annotations

from collections.abc import Mapping

from support.router_process import RouterProcess
from support.scripted_engine import ScriptedEngine


class ScriptedBench:
    """`start` and `stop` once each."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        self.prefill, self.decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
        self._flags = flags

    async def start(self) -> None:
        """Engines first, since the router waits for them."""
        for engine in (self.prefill, self.decode):
            await engine.start()
        self.router = RouterProcess([self.prefill.url], [self.decode.url], self._flags)
        await self.router.start()

    async def stop(self) -> None:
        """End everything. Fails where the router logged an error of its own."""
        await self.router.stop()
        log = self.router.log
        self.router.discard()
        for engine in (self.prefill, self.decode):
            await engine.stop()
        assert "Traceback" not in log, log
