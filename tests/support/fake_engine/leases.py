"""Promises of a fake engine to keep a turn's blocks, and its endpoint that prolongs and ends them.

Separate from the connector because a promise is a reference that can be taken back at any time: no handle, no proof and
no read depends on it. The endpoint reads and answers as the connector's does, by the same functions; what a router may
not send is a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from aiohttp import web

from pd_connector.core import lease_request
from pd_connector.core.lease_message import NewEnd
from pd_connector.core.lease_request import Refused
from pd_wire import lease
from support.fake_engine.blocks import BlockPool

if TYPE_CHECKING:
    from support.fake_engine.engine import FakeEngine
    from support.fake_engine.fabric import Clock


class LeaseFault(StrEnum):
    """How the endpoint goes wrong."""

    FORGETS = "says that nothing is held"
    REFUSES = "status 400"
    FAILS = "status 503"
    ABSENT = "status 404"
    HANGS = "no answer"
    GARBAGE = "no JSON"
    OTHERS = "an answer about other leases"
    CLOSES = "closes the connection"


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """One request to the endpoint: when, on the fabric's clock; what was asked; what was answered."""

    at: float
    asked: dict[str, int]
    left: dict[str, int]
    headers: dict[str, str]


@dataclass(slots=True)
class _Promise:
    blocks: tuple[int, ...]
    end: float


class Promises:
    """References to blocks of finished turns, each until a time on the fabric's clock."""

    def __init__(self, pool: BlockPool, clock: Clock, most: int) -> None:
        self._pool = pool
        self._clock = clock
        self._most = most
        self._held: dict[str, _Promise] = {}

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks more may be promised."""
        self.expire()
        return sum(len(one.blocks) for one in self._held.values()) + blocks <= self._most

    def promise(self, promised: lease.Lease, blocks: Sequence[int]) -> None:
        """Take over the references of a finished turn."""
        self._held[promised.token] = _Promise(tuple(blocks), self._clock.now() + promised.seconds)

    def set(self, token: str, seconds: int) -> int:
        """Let a promise end so many seconds from now. Returns what is left; 0: it is not held."""
        self.expire()
        held = self._held.get(token)
        if held is None:
            return 0
        if seconds == 0:
            self._end(token)
            return 0
        held.end = self._clock.now() + seconds
        return seconds

    def left(self) -> dict[str, float]:
        """Seconds left of each that is held."""
        self.expire()
        now = self._clock.now()
        return {token: held.end - now for token, held in self._held.items()}

    def expire(self) -> None:
        """End those whose time is over."""
        now = self._clock.now()
        for token, held in list(self._held.items()):
            if held.end <= now:
                self._end(token)

    def give_up_one(self) -> bool:
        """End the one that ends next, because somebody needs blocks. Returns whether there was one."""
        if not self._held:
            return False
        self._end(min(self._held, key=lambda token: self._held[token].end))
        return True

    def _end(self, token: str) -> None:
        self._pool.release(self._held.pop(token).blocks)


async def serve_leases(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Answer one request to the endpoint."""
    try:
        if request.method != "POST":
            raise Refused("only POST is served here", status=405)
        batch = lease_request.parse(await request.read())
    except Refused as refusal:
        engine.fabric.violate(engine.name, f"leases: {refusal}")
        return _refusal(refusal)
    asked = {item.token: item.seconds for item in batch}
    if len(asked) != len(batch):
        engine.fabric.violate(engine.name, "leases: a token stands twice in one batch")
    fault = engine.lease_fault
    left = {
        token: max(rank.promises.set(token, seconds) for rank in engine.ranks) if fault is None else 0
        for token, seconds in asked.items()
    }
    headers = {name.lower(): value for name, value in request.headers.items()}
    engine.lease_calls.append(LeaseCall(engine.fabric.clock.now(), asked, left, headers))
    first = batch[0].token
    match fault:
        case LeaseFault.HANGS:
            await asyncio.Event().wait()
        case LeaseFault.CLOSES:
            if request.transport is not None:
                request.transport.close()
        case LeaseFault.GARBAGE:
            return web.Response(text=f"<html>{first}</html>")
        case LeaseFault.OTHERS:
            others = [NewEnd("0" * lease.TOKEN_DIGITS, 60) for _ in batch]
            return _answer(lease_request.answer(others, [60] * len(batch)))
        case LeaseFault.REFUSES | LeaseFault.FAILS | LeaseFault.ABSENT:
            return _refusal(Refused(f"not with {first}", "leases", int(fault.value.rpartition(" ")[2])))
        case _:
            pass
    return _answer(lease_request.answer(batch, [left[item.token] for item in batch]))


def _answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refusal(refusal: Refused) -> web.Response:
    return _answer(refusal.body(), refusal.status)
