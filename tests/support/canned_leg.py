"""A pool whose only engine gives one answer, for tests of what a leg makes of it; no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pd_router.shell.exchange import Address


class CannedLeg:
    """Stands in for the pool, the member and the exchange. ``asked`` is the last request's head and body."""

    def __init__(self, status: int, raw: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.status, self.raw, self.headers = status, raw, headers
        self.address = Address("engine", 1)
        self.asked: tuple[bytes, bytes] = (b"", b"")

    async def request(self, _address: Address, head: bytes, body: bytes, _within: float) -> Self:
        self.asked = (head, body)
        return self

    async def head(self) -> int:
        return self.status

    async def body(self) -> bytes:
        return self.raw

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")
