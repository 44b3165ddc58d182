"""How much decode memory the handles that were given out still hold: an estimate, since nobody tells the router (E14).

Separate from the store because the two live differently: a handle that is overwritten or evicted here is gone from the
store and still pinned on its engine until the engine's own TTL. Kept in a few time slots per engine rather than per
handle, so that its size depends on the fleet and not on the traffic. Slots make it late by up to one slot, on the safe
side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_SLOTS: Final = 16
"""Slots per TTL: an estimate at most 1/16 of the TTL too old."""


@dataclass(slots=True)
class Pinned:
    """Args: ttl: seconds for which an engine keeps the blocks of a handle."""

    ttl: float
    _slots: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """Engine → slot number → [handles, tokens]."""

    def add(self, holder: str, arrived: float, tokens: int) -> None:
        """A handle arrived."""
        slots = self._slots.setdefault(holder, {})
        number = self._slot(arrived)
        slot = slots.get(number)
        if slot is None:
            for old in [old for old in slots if old < number - _SLOTS]:
                del slots[old]
            slots[number] = [1, tokens]
        else:
            slot[0] += 1
            slot[1] += tokens

    def release(self, holder: str, arrived: float, tokens: int) -> None:
        """A handle was sent to a reader, which gives the blocks back."""
        slot = self._slots.get(holder, {}).get(self._slot(arrived))
        if slot is not None:
            slot[0] = max(0, slot[0] - 1)
            slot[1] = max(0, slot[1] - tokens)

    def forget(self, holder: str) -> None:
        """The engine's process is gone, and its memory with it."""
        self._slots.pop(holder, None)

    def totals(self, now: float) -> tuple[dict[str, int], dict[str, int]]:
        """Handles and tokens per engine."""
        oldest = self._slot(now) - _SLOTS
        handles: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for holder, slots in self._slots.items():
            live = [slot for number, slot in slots.items() if number >= oldest]
            handles[holder] = sum(slot[0] for slot in live)
            tokens[holder] = sum(slot[1] for slot in live)
        return handles, tokens

    def _slot(self, when: float) -> int:
        return int(when * _SLOTS // self.ttl)
