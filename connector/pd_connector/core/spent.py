"""Which handles this engine has already used.

In the Pinned mode a handle is spent by its first use: the holder frees the blocks, and a second read returns whatever
stands there by then, with a proof that still fits. The router sends a handle once; this is the reader's own check.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

CAPACITY: Final = 16384
"""Handles remembered. A handle outlives its lease by nothing, so this covers 34 turns a second at a lease of 480 s."""


class SpentHandles:
    """The last `CAPACITY` handles, by holder and the holder's request."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def spend(self, holder: str, request_id: str) -> bool:
        """Remember a use; ``True`` when the handle was fresh."""
        key = (holder, request_id)
        fresh = key not in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return fresh
