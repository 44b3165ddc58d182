"""A pair of fake engines on one fabric, per connector mode; any violation that a test did not take fails it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from support.fake_engine import Clock, ConnectorConfig, EngineConfig, Fabric, FakeEngine, Template


@dataclass(frozen=True, slots=True)
class Pair:
    """One prefill and one decode engine."""

    fabric: Fabric
    prefill: FakeEngine
    decode: FakeEngine

    @property
    def clock(self) -> Clock:
        return self.fabric.clock


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """Start a pair; keyword arguments are `ConnectorConfig` fields for both roles, plus ``template``."""
    async with AsyncExitStack() as stack:

        async def make(
            mode: Literal["stock", "verified"] = "verified", template: Template | None = None, **fields: Any
        ) -> Pair:
            fabric = Fabric()
            engines = []
            for role in ("prefill", "decode"):
                connector = replace(ConnectorConfig(role, mode=mode), **fields)
                engine = FakeEngine(EngineConfig(connector, template=template or Template()), fabric)
                await engine.start()
                stack.push_async_callback(engine.kill)
                engines.append(engine)
            pair = Pair(fabric, *engines)
            stack.callback(_no_violation_is_left, fabric)
            return pair

        yield make


def _no_violation_is_left(fabric: Fabric) -> None:
    assert fabric.violations == []
