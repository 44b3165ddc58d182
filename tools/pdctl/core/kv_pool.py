"""One decode engine's KV blocks: in use, held for a turn that may come, or free with what they last contained.

Free blocks are taken in vLLM's order: those that contain nothing, then the ones that were freed first, each
conversation's last block before its first. A conversation thus loses its end first, and its beginning stays readable.

What is held follows the connector's rules of leases. Beyond the cap a new one takes the place of those that nobody has
spoken for, the earliest first and none that could be spared, until all of it has room, and otherwise holds its leading
blocks. Where turns need the memory the same go first, then what was spoken for longest ago. A turn shares its blocks
with the one that it continues, and inherits the good word for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_LEADING: Final = 0
_REST: Final = 1
"""Of a turn's free blocks: those that were held, and the ones behind them, which were free before."""


@dataclass(slots=True)
class Held:
    """A turn's leading blocks, out of others' reach until ``ends`` (seconds)."""

    blocks: int
    ends: float
    spoken: bool = False
    """Somebody has said that they are wanted."""
    shared: int = 0
    """So many of them a running turn uses as well."""


class Pool:
    """Counts of blocks. What a finished turn leaves is known by a number, its `mark`, that the caller chooses.

    Args:
        size: blocks.
        cap: most of them that may be held.
    """

    def __init__(self, size: int, cap: int | None = None) -> None:
        self.size = size
        self.cap = size if cap is None else cap
        self.running = 0
        self.held_blocks = 0
        """Held and not in use."""
        self._kept = 0
        """Held, in use or not."""
        self._empty = size
        # What is to be given up first stands in front in both: nobody else speaks for a silent one, and whoever speaks
        # puts his at the end.
        self._silent: OrderedDict[int, Held] = OrderedDict()
        self._spoken: OrderedDict[int, Held] = OrderedDict()
        self._left: OrderedDict[tuple[int, int], int] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that a turn can have at once: empty ones and what is left of finished turns."""
        return self._empty + sum(self._left.values())

    def held(self, mark: int) -> Held | None:
        """What is held under this mark."""
        return self._spoken.get(mark) or self._silent.get(mark)

    def intact(self, mark: int) -> int:
        """How many leading blocks contain what they did."""
        held = self.held(mark)
        leading = self._left.get((mark, _LEADING), 0) if held is None else held.blocks
        return leading + self._left.get((mark, _REST), 0)

    def fits(self, need: int, mark: int, own: int, *, reclaim: bool) -> bool:
        """Whether a turn can have ``need`` blocks, ``own`` of which are its conversation's leading ones.

        ``reclaim``: whether what is held may be taken.
        """
        own = min(own, self.intact(mark))
        others = self.size - self.running - own
        if not reclaim:
            held = self.held(mark)
            others -= self.held_blocks - (0 if held is None else min(own, held.blocks))
        return need - own <= others

    def take(self, need: int, mark: int, own: int) -> None:
        """Give a turn ``need`` blocks; call `fits` first. It continues the turn with this mark, if ``own`` are over 0.

        What is held is taken last, and only as far as it takes.
        """
        own = min(own, self.intact(mark))
        held = self.held(mark)
        if held is not None:
            held.shared = min(own, held.blocks)
            self.held_blocks -= held.shared
            self._take_left((mark, _REST), own - held.shared)
        else:
            own_leading = min(own, self._left.get((mark, _LEADING), 0))
            self._take_left((mark, _LEADING), own_leading)
            self._take_left((mark, _REST), own - own_leading)
        more = need - own
        while more:
            more -= self._take_some(more)
        self.running += need

    def finish(self, blocks: int, mark: int, before: int = -1, *, hold: int = 0, ends: float = math.inf) -> int:
        """A turn has ended. Its first ``hold`` blocks are held until ``ends``, or as many as there is room for.

        ``before``: the mark of the turn that it continued. That one's blocks are held no longer on its account.

        Returns:
            How many blocks are held.
        """
        self.running -= blocks
        kept = self._make_room(hold, before)
        old = self.held(before)
        inherits = old is not None and old.spoken and old.blocks <= min(kept, old.shared)
        self._leave((mark, _REST if kept else _LEADING), blocks - kept)
        if old is not None:
            self._forget(before, old)
            self._leave((before, _LEADING), old.blocks - old.shared)
        if kept:
            (self._spoken if inherits else self._silent)[mark] = Held(kept, ends, inherits)
            self.held_blocks += kept
            self._kept += kept
        return kept

    def speak(self, mark: int, ends: float) -> None:
        """Somebody says that what is held under this mark is wanted, at least until ``ends``."""
        held = self._silent.pop(mark, None) or self._spoken.pop(mark)
        held.spoken, held.ends = True, ends
        self._spoken[mark] = held

    def release(self, mark: int) -> None:
        """Hold these no longer; they become the last that are taken. Nothing where they are not held."""
        held = self.held(mark)
        if held is not None:
            self._forget(mark, held)
            self._leave((mark, _LEADING), held.blocks - held.shared)

    # -- inside --------------------------------------------------------------------------------------
    def _make_room(self, blocks: int, before: int) -> int:
        """Release what gives way to a new one of so many blocks. Returns how many of these can be held."""
        old = self.held(before)
        common = 0 if old is None else min(old.shared, blocks)
        over = self._kept + blocks - common - self.cap
        helps: dict[int, int] = {}
        for mark, held in self._silent.items():
            if over <= 0:
                break
            helps[mark] = held.blocks - (common if mark == before else 0)
            over -= helps[mark]
        kept = blocks - max(0, over)
        # What seemed to help may not be needed in the end.
        over = min(0, over)
        for mark in reversed(list(helps)):
            if over + helps[mark] <= 0:
                over += helps.pop(mark)
        for mark in helps:
            self.release(mark)
        return kept

    def _forget(self, mark: int, held: Held) -> None:
        del (self._spoken if held.spoken else self._silent)[mark]
        self._kept -= held.blocks
        self.held_blocks -= held.blocks - held.shared

    def _leave(self, key: tuple[int, int], blocks: int) -> None:
        if blocks:
            self._left[key] = blocks

    def _take_left(self, key: tuple[int, int], blocks: int) -> None:
        if blocks:
            self._left[key] -= blocks
            if not self._left[key]:
                del self._left[key]

    def _take_some(self, most: int) -> int:
        if self._empty:
            taken = min(most, self._empty)
            self._empty -= taken
            return taken
        if not self._left:
            self.release(next(iter(self._silent or self._spoken)))
            return 0
        key, blocks = next(iter(self._left.items()))
        taken = min(most, blocks)
        self._take_left(key, taken)
        return taken
