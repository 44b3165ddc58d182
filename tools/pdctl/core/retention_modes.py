"""What decode does with a finished turn's blocks, as numbers that the simulation understands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pd_operator.core.spec_transfer import TTL_MARGIN_SECONDS
from pd_wire.lease import DEFAULT_SECONDS, DEFAULT_SHARE
from pdctl.core.kv_pool import Held

LEASE_SECONDS: Final = float(DEFAULT_SECONDS)
LEASE_SHARE: Final = DEFAULT_SHARE
TOOL_HOLD_SECONDS: Final = 600.0
BEATS: Final = 3
"""The router prolongs a lease when a third of it has passed."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to retain.

    ``hold_s`` is how long blocks stay out of the pool's reach after a turn, and again after every sign of life; signs
    come for ``tool_hold_s`` at most, while tools run, every third of ``hold_s``. ``readable_s``: a later turn gets
    nothing (None: as long as the blocks are intact). ``share`` of the pool is the most that is held. ``reclaim``: what
    is held is given up before a turn has to wait. ``spent``: reading ends the holding at once.
    """

    name: str
    hold_s: float = 0.0
    tool_hold_s: float = 0.0
    readable_s: float | None = None
    share: float = 1.0
    reclaim: bool = False
    spent: bool = False

    def hold(self, blocks: int, now: float, wait_s: float | None, *, tools: bool) -> Held | None:
        """How blocks of a turn that ends now are held, when the next comes after ``wait_s`` (None: never)."""
        if not self.hold_s:
            return None
        beat = self.hold_s / BEATS if self.tool_hold_s else math.inf
        spoken = min(self.tool_hold_s, wait_s) if tools and wait_s is not None else 0.0
        last = spoken // beat * beat if spoken else 0.0
        return Held(blocks, now, now + last + self.hold_s, spoken, beat)


def pinned(ttl_s: float, readable_s: float | None = None) -> Mode:
    """vLLM's own way; the router uses a handle for ``readable_s``, by default as the operator sets it."""
    usable = max(ttl_s - TTL_MARGIN_SECONDS, ttl_s / 2) if readable_s is None else readable_s
    return Mode(f"Pinned {ttl_s:g} s", hold_s=ttl_s, readable_s=usable, spent=True)


def leased(seconds: float = LEASE_SECONDS, share: float = LEASE_SHARE, tool_hold_s: float = TOOL_HOLD_SECONDS) -> Mode:
    """Unpinned, and held while a sign of life comes."""
    return Mode("Leased", hold_s=seconds, tool_hold_s=tool_hold_s, share=share, reclaim=True)


UNPINNED: Final = Mode("Unpinned")
"""Blocks go back to the pool at once; whoever reads them makes sure that they are intact."""
COMPARED: Final = (pinned(480), pinned(60), leased(), UNPINNED)
