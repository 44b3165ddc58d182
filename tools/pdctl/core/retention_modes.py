"""What decode does with a finished turn's blocks, as numbers that the simulation understands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pd_operator.core.spec_transfer import TTL_MARGIN_SECONDS
from pd_wire.lease import DEFAULT_SECONDS, DEFAULT_SHARE

LEASE_SECONDS: Final = float(DEFAULT_SECONDS)
LEASE_SHARE: Final = DEFAULT_SHARE
TOOL_HOLD_SECONDS: Final = 600.0
BEATS: Final = 3
"""The router prolongs a lease when a third of it has passed."""
FIRST_WORD_S: Final = 0.2
"""After which an engine has heard of a right that is new, or that a lease is to end."""
HANDLE_SECONDS: Final = 3600.0
"""For which the router keeps a handle to blocks that decode has no timer for (`--unpinned-handle-ttl`)."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to retain.

    ``hold_s`` is how long blocks stay out of the pool's reach after a turn, and again after every sign of life.
    ``readable_s``: after that a later turn gets nothing. ``leased``: what is held are leases, as decode grants them and
    routers prolong them; otherwise it is held until it is read or its time is over. Then they hold ``share`` of the
    pool at most, are given up before a turn has to wait, and signs of life come while a turn of the conversation runs,
    and for ``tool_hold_s`` at most while its tools do.
    """

    name: str
    readable_s: float
    hold_s: float = 0.0
    leased: bool = False
    tool_hold_s: float = 0.0
    share: float = 1.0

    @property
    def reclaim(self) -> bool:
        """Whether a turn gets what is held for others before it has to wait."""
        return self.leased or not self.hold_s

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life for a lease."""
        return self.hold_s / BEATS


def pinned(ttl_s: float, readable_s: float | None = None) -> Mode:
    """vLLM's own way; the router uses a handle for ``readable_s``, by default as the operator sets it."""
    usable = max(ttl_s - TTL_MARGIN_SECONDS, ttl_s / 2) if readable_s is None else readable_s
    return Mode(f"Pinned {ttl_s:g} s", usable, hold_s=ttl_s)


def leased(seconds: float = LEASE_SECONDS, share: float = LEASE_SHARE, tool_hold_s: float = TOOL_HOLD_SECONDS) -> Mode:
    """Unpinned, and held while a sign of life comes."""
    return Mode("Leased", HANDLE_SECONDS, seconds, leased=True, tool_hold_s=tool_hold_s, share=share)


UNPINNED: Final = Mode("Unpinned", HANDLE_SECONDS)
"""Blocks go back to the pool at once; whoever reads them makes sure that they are intact."""
COMPARED: Final = (pinned(480), pinned(60), leased(), UNPINNED)
