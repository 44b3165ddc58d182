"""The items of finished responses, so that the next turn may name them by `previous_response_id` alone.

Separate from the store of handles because this is content, not KV: it outlives a handle, is read many times, and is
kept only where the client's `store` allows it. Each response holds its own items and the name of the one before, so a
long conversation is kept once. Kept in memory and bounded by bytes; the least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from pd_router.core.jsontext import decode_exactly, encode, lost_integers

_OVERHEAD: Final = 400
"""Bytes of an entry besides its items: keys, the object, the place in the table."""
MAX_CHAIN: Final = 4096
"""Responses that one conversation is followed back through."""

Key = tuple[str, str]
"""Tenant and the answer's id."""


@dataclass(frozen=True, slots=True)
class _Kept:
    before: str | None
    raw: bytes

    @property
    def size(self) -> int:
        return len(self.raw) + _OVERHEAD


class Responses(Protocol):
    """What a turn asks of one. Where it has to wait, as for that of another process, it gets an awaitable."""

    def put(self, tenant: str, answer_id: str, before: str | None, items: Sequence[Any]) -> bool | Awaitable[bool]:
        """Keep what a turn added; whether it is kept."""

    def recall(self, tenant: str, answer_id: str) -> list[Any] | Awaitable[list[Any] | None] | None:
        """All items up to and with a response; None when one of them is not kept."""


class ResponseStore:
    """Items by tenant and response id.

    Args:
        cap_bytes: bound of what is held; 0 keeps nothing.
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, answer_id: str, before: str | None, items: Sequence[Any]) -> bool:
        """Keep what a turn added. Returns whether it is kept.

        Args:
            before: the response that the turn named, whose items are not repeated in `items`.
            items: the turn's own input and its output.
        """
        try:
            raw = encode(list(items))
        except ValueError:
            return False
        return self.put_encoded(tenant, answer_id, before, raw)

    def put_encoded(self, tenant: str, answer_id: str, before: str | None, raw: bytes) -> bool:
        """The same for items that are JSON text already."""
        kept = _Kept(before, raw)
        if not answer_id or kept.size > self._cap:
            return False
        self.drop(tenant, answer_id)
        self._kept[tenant, answer_id] = kept
        self.bytes += kept.size
        while self.bytes > self._cap:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size
        return (tenant, answer_id) in self._kept

    def recall(self, tenant: str, answer_id: str) -> list[Any] | None:
        """All items up to and with a response; None when it, or one that it builds on, is not kept."""
        chain = self.recall_encoded(tenant, answer_id)
        return None if chain is None else [item for raw in chain for item in _decode(raw)]

    def recall_encoded(self, tenant: str, answer_id: str) -> list[bytes] | None:
        """The same as JSON texts, oldest first."""
        chain: list[bytes] = []
        at: str | None = answer_id
        while at is not None:
            kept = self._kept.get((tenant, at))
            if kept is None or len(chain) == MAX_CHAIN:
                return None
            # From the newest to the oldest, so that the oldest, without which none is of use, is given up last.
            self._kept.move_to_end((tenant, at))
            chain.append(kept.raw)
            at = kept.before
        return chain[::-1]

    def drop(self, tenant: str, answer_id: str) -> bool:
        """Forget one response. Returns whether it was kept."""
        kept = self._kept.pop((tenant, answer_id), None)
        if kept is None:
            return False
        self.bytes -= kept.size
        return True


def _decode(raw: bytes) -> list[Any]:
    items: list[Any] = decode_exactly(raw) if lost_integers(raw) else orjson.loads(raw)
    return items
