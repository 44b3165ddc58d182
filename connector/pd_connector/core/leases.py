"""Which finished turns' blocks an engine keeps by a lease, and which it gives back first.

A lease never decides whether a read is right (`core.stamps` does), only how long blocks stay out of others' reach. So
every doubt ends one: when the engine needs memory, when all of them would hold too much, when nobody prolonged it.

The value of a lease is what the router says about its conversation. Least valuable first: those that are over, those
that nobody has ever prolonged, those prolonged longest ago. Where the cap is reached, a new lease takes the place of
ones that nobody prolonged: of two conversations that nobody has spoken up for, the later one is likelier to come back,
and otherwise a burst of single turns would shut everybody out for as long as a lease takes. A prolonged lease gives way
to no new one. Where that leaves too little room, a new lease holds as many of its leading blocks as there is room for:
a conversation that goes on at the cap keeps what it had. It inherits the good word for the turn that it continues.

Only the scheduler's thread grants and removes. The side channel's thread may find a lease and set its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Held:
    """One lease. Times are of one clock that only goes forward, in seconds."""

    token: str
    blocks: tuple[int, ...]
    ends: float
    spoken_for: float
    """When it was granted or last prolonged."""
    prolonged: bool = False

    def over(self, now: float) -> bool:
        """Whether it has run out or was ended."""
        return self.ends <= now


@dataclass(frozen=True, slots=True)
class Grant:
    """A new lease, and those that gave way to it: they are out of the table."""

    held: Held
    gave_way: list[Held]


class Leases:
    """All leases of one engine, or data-parallel rank."""

    def __init__(self, cap: int) -> None:
        """
        Args:
            cap: most blocks that all leases together may hold. Turns of a conversation share blocks; each counts once.
        """
        self.cap = cap
        self._held: dict[str, Held] = {}
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Blocks that are held, each counted once."""
        return len(self._uses)

    def grant(self, token: str, blocks: Sequence[int], now: float, seconds: float) -> Grant | None:
        """Keep a turn's blocks, or as many of the leading ones as there is room for, for ``seconds``.

        Returns:
            The new lease, or ``None`` when there is no room for one; then nothing has changed.
        """
        gave_way = self._room_for(frozenset(blocks), now)
        if gave_way is None:
            blocks, gave_way = self._part(blocks), []
            if not blocks:
                return None
        wanted = frozenset(blocks)
        spoken_for = any(
            other.prolonged and not other.over(now) and wanted.issuperset(other.blocks) for other in self._held.values()
        )
        held = Held(token, tuple(blocks), now + seconds, now, spoken_for)
        for other in gave_way:
            self.remove(other)
        self._held[token] = held
        for block in held.blocks:
            self._uses[block] = self._uses.get(block, 0) + 1
        return Grant(held, gave_way)

    def set_end(self, token: str, now: float, seconds: int) -> int:
        """Let a lease end ``seconds`` from now; 0 ends it. Any thread.

        Returns:
            The seconds that are left: ``seconds``, or 0 where no such lease is held.
        """
        held = self._held.get(token)
        if held is None or held.over(now):
            return 0
        if seconds:
            held.prolonged, held.spoken_for = True, now
        held.ends = now + seconds
        return seconds

    def any_over(self, now: float) -> bool:
        """Whether there are leases to be removed because they are over."""
        return any(held.over(now) for held in self._held.values())

    def over(self, now: float) -> list[Held]:
        """Those that are over; they stay in the table."""
        return [held for held in self._held.values() if held.over(now)]

    def by_value(self, now: float) -> list[Held]:
        """All of them, the one to give up first at the front."""
        return sorted(self._held.values(), key=lambda held: (not held.over(now), held.prolonged, held.spoken_for))

    def may_give_way(self, now: float) -> list[Held]:
        """Those that a new lease may replace, the one to give up first at the front."""
        over: list[Held] = []
        alone: list[Held] = []
        for held in self._held.values():  # in the order of their grants
            if held.over(now):
                over.append(held)
            elif not held.prolonged:
                alone.append(held)
        return over + alone

    def remove(self, held: Held) -> None:
        """Forget a lease of the table; the caller gives its blocks back."""
        del self._held[held.token]
        for block in held.blocks:
            left = self._uses[block] - 1
            if left:
                self._uses[block] = left
            else:
                del self._uses[block]

    def _part(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The leading blocks that are held already or fit under the cap."""
        room = self.cap - len(self._uses)
        part: list[int] = []
        for block in blocks:
            if block not in self._uses:
                if room <= 0:
                    break
                room -= 1
            part.append(block)
        return tuple(part)

    def _room_for(self, wanted: frozenset[int], now: float) -> list[Held] | None:
        """Which leases have to give way, or ``None`` when not enough of them may."""
        total = len(self._uses) + sum(block not in self._uses for block in wanted)
        if total <= self.cap:
            return []
        if len(wanted) > self.cap:
            return None
        chosen: list[Held] = []
        lost: dict[int, int] = {}
        for held in self.may_give_way(now):
            chosen.append(held)
            for block in held.blocks:
                lost[block] = lost.get(block, 0) + 1
                total -= lost[block] == self._uses[block] and block not in wanted
            if total <= self.cap:
                return chosen
        return None
