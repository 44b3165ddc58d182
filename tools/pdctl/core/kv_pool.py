"""One decode engine's KV blocks: in use, held for a turn that may come, or free with what they last contained.

Free blocks are taken in vLLM's order: those that contain nothing, then the ones that were freed first, each
conversation's last block before its first. A conversation thus loses its end first, and its beginning stays readable.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks out of the pool's reach from one time to another, in seconds.

    Every ``beat_s`` somebody says that they are still wanted, for ``spoken_s`` from the start.
    """

    blocks: int
    since_s: float
    until_s: float
    spoken_s: float = 0.0
    beat_s: float = math.inf

    def value(self, now: float) -> tuple[bool, float]:
        """What has been spoken for is worth more, and more so the later; of the rest the later one."""
        beats = min(now - self.since_s, self.spoken_s) // self.beat_s
        return beats > 0, self.since_s + (beats * self.beat_s if beats else 0.0)


class Pool:
    """Counts of blocks. What a finished turn leaves is known by a number, its `mark`, that the caller chooses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.held_blocks = 0
        self._empty = size
        self._held: dict[int, Held] = {}
        self._left: OrderedDict[int, int] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that a turn can have at once: empty ones and what is left of finished turns."""
        return self._empty + sum(self._left.values())

    def is_held(self, mark: int) -> bool:
        """Whether these blocks are out of reach still."""
        return mark in self._held

    def intact(self, mark: int) -> int:
        """How many leading blocks contain what they did."""
        held = self._held.get(mark)
        return held.blocks if held is not None else self._left.get(mark, 0)

    def fits(self, need: int, mark: int, own: int, *, reclaim: bool) -> bool:
        """Whether a turn can have ``need`` blocks, ``own`` of which are its conversation's leading ones.

        ``reclaim``: whether what is held may be taken.
        """
        own = min(own, self.intact(mark))
        others = self.size - self.running - own
        if not reclaim:
            # What is held of its own conversation is given up as it starts.
            own_held = self._held[mark].blocks if mark in self._held else 0
            others -= self.held_blocks - own_held
        return need - own <= others

    def take(self, need: int, mark: int, own: int, now: float) -> None:
        """Give a turn ``need`` blocks; call `fits` first. Its conversation's earlier blocks are held no longer.

        What is held by others is taken last, and only as far as it takes.
        """
        own = min(own, self.intact(mark))
        self.release(mark)
        if own:
            self._left[mark] -= own
            if not self._left[mark]:
                del self._left[mark]
        more = need - own
        while more:
            more -= self._take_some(more, now)
        self.running += need

    def finish(self, blocks: int, mark: int) -> None:
        """A turn has ended; its blocks contain its conversation and are free."""
        self.running -= blocks
        self._left[mark] = blocks

    def hold(self, mark: int, held: Held) -> None:
        """Put what is left under this mark, all of it, out of reach."""
        del self._left[mark]
        self._held[mark] = held
        self.held_blocks += held.blocks

    def make_room(self, blocks: int, most: float, now: float) -> bool:
        """See that so many more blocks can be held without holding more than ``most``.

        Earlier ones that nobody has spoken for give way, the earliest first; if that is not enough, none does.
        """
        over = self.held_blocks + blocks - most
        if over <= 0:
            return True
        # In the order in which they were held: nobody has spoken for them since.
        silent = [mark for mark, held in self._held.items() if not held.value(now)[0]]
        if over > sum(self._held[mark].blocks for mark in silent):
            return False
        for mark in silent:
            over -= self._held[mark].blocks
            self.release(mark)
            if over <= 0:
                break
        return True

    def release(self, mark: int) -> None:
        """Hold these no longer; they become the last that are taken. Nothing where they are not held."""
        held = self._held.pop(mark, None)
        if held is not None:
            self.held_blocks -= held.blocks
            self._left[mark] = held.blocks

    def _take_some(self, most: int, now: float) -> int:
        if self._empty:
            taken = min(most, self._empty)
            self._empty -= taken
            return taken
        if not self._left:
            self.release(min(self._held, key=lambda mark: (self._held[mark].value(now), mark)))
        mark, blocks = next(iter(self._left.items()))
        taken = min(most, blocks)
        if taken == blocks:
            del self._left[mark]
        else:
            self._left[mark] = blocks - taken
        return taken
