"""Promises of a fake engine to keep a turn's blocks, and its endpoint that prolongs and ends them.

Separate from the connector because a promise is a reference that can be taken back at any time: no handle, no proof and
no read depends on it. The endpoint is judged as the others are: what no router may send is a violation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from pd_wire import lease
from support.fake_engine.blocks import BlockPool

if TYPE_CHECKING:
    from support.fake_engine.engine import FakeEngine
    from support.fake_engine.fabric import Clock

MAX_BODY: Final = 128 * 1024
_ITEM: Final = {"token", "seconds"}


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
    if request.method != "POST":
        return _refusal(405, "use POST", None)
    raw = await request.read()
    if len(raw) > MAX_BODY:
        return _refusal(413, "too large", None)
    fault = engine.lease_fault
    items = _items(raw)
    if isinstance(items, str):
        engine.fabric.violate(engine.name, f"leases: {items}")
        return _refusal(400, items, "leases")
    asked = dict(items)
    works = fault is None
    left = {
        token: max((rank.promises.set(token, seconds) for rank in engine.ranks), default=0) if works else 0
        for token, seconds in items
    }
    now = engine.fabric.clock.now()
    engine.lease_calls.append(LeaseCall(now, asked, left, {name.lower(): one for name, one in request.headers.items()}))
    match fault:
        case LeaseFault.HANGS:
            await asyncio.Event().wait()
        case LeaseFault.CLOSES:
            if request.transport is not None:
                request.transport.close()
        case LeaseFault.GARBAGE:
            return web.Response(text=f"<html>{next(iter(asked))}</html>")
        case LeaseFault.OTHERS:
            return web.json_response({"leases": [{"token": "0" * 32, "seconds": 60} for _ in items]})
        case LeaseFault.REFUSES | LeaseFault.FAILS | LeaseFault.ABSENT:
            return _refusal(int(fault.value.rpartition(" ")[2]), next(iter(asked)), "leases")
        case _:
            pass
    return web.json_response({"leases": [{"token": token, "seconds": left[token]} for token, _ in items]})


def _items(raw: bytes) -> list[tuple[str, int]] | str:
    """Token and seconds of each, or what is wrong with the body."""
    try:
        body: Any = json.loads(raw)
    except ValueError:
        return "the body must be JSON"
    found = body.get("leases") if isinstance(body, dict) and body.keys() == {"leases"} else None
    if not isinstance(found, list) or not 1 <= len(found) <= lease.MAX_BATCH:
        return f"leases must be a list of 1 to {lease.MAX_BATCH} objects"
    items: list[tuple[str, int]] = []
    for place, one in enumerate(found):
        if not isinstance(one, dict) or one.keys() != _ITEM:
            return f"leases[{place}] must have token and seconds"
        token, seconds = one["token"], one["seconds"]
        if not isinstance(token, str) or lease.parse(f"{token}-1") is None:
            return f"leases[{place}].token must be {lease.TOKEN_DIGITS} hexadecimal digits"
        if type(seconds) is not int or not 0 <= seconds <= lease.MAX_SECONDS:
            return f"leases[{place}].seconds must be a whole number from 0 to {lease.MAX_SECONDS}"
        items.append((token, seconds))
    if len(dict(items)) != len(items):
        return "leases names a token twice"
    return items


def _refusal(status: int, message: str, param: str | None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return web.json_response({"error": error}, status=status)
