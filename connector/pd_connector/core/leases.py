"""Which finished turns' blocks an engine keeps by a lease, and which it gives back first.

A lease never decides whether a read is right (`core.stamps` does), only how long blocks stay out of others' reach. So
every doubt ends one: when the engine needs memory, when all of them would hold too much, when nobody prolonged it.

The value of a lease is what the router says about its conversation. Least valuable first: those that are over, those
that nobody has ever prolonged, those prolonged longest ago. Where the cap is reached, a new lease takes the place of
ones that nobody prolonged: of two conversations that nobody has spoken up for, the later one is likelier to come back,
and otherwise a burst of single turns would shut everybody out for as long as a lease takes. A prolonged lease gives way
to no new one. Where that leaves too little room, a new lease holds as many of its leading blocks as there can be room
for: a conversation that goes on at the cap keeps what it had. Nobody gives way whose blocks do not help.

A turn inherits the good word for the one that it continues, until somebody speaks for itself. Which turn that is can
only be seen on the blocks, and a turn that merely begins alike (all of a short one may be a system prompt) looks the
same. So each word is passed on once: forks would otherwise hold the cap by a word that was never said for them. It
comes back when the heir is gone first: that turn's answer was thrown away, and another one is tried.

Only the scheduler's thread grants and removes. The side channel's thread may find a lease and set its end, but not
while one is granted (the caller sees to that): what it has just been told is prolonged must not give way as one of
which nothing was heard.
"""

from __future__ import annotations

from collections import Counter
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
    continues: Held | None = None
    """The lease from which it inherited that it was prolonged."""
    heir: Held | None = None
    """The later turn's that inherited it from this one."""
    firm: bool = False
    """Its blocks are among those that no new lease displaces."""
    others: tuple[int, tuple[int, ...]] = (-1, ())
    """Its blocks that are not among those, and the state of these for which that is true."""

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
        self._firm: Counter[int] = Counter()
        """Uses by leases that give way to no new one, as of the last grant."""
        self._firm_state = 0
        """Counts when blocks came to these or went."""

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
        candidates = self.may_give_way(now)
        part = self._longest(candidates, blocks)
        gave_way = self._least(candidates, part) if part else None
        if gave_way is None:
            return None
        for other in gave_way:
            self.remove(other)
        continued = self._continued(frozenset(part), now)
        held = Held(token, part, now + seconds, now, continued is not None, continues=continued)
        if continued is not None:
            continued.heir = held
        self._held[token] = held
        for block in part:
            self._uses[block] = self._uses.get(block, 0) + 1
        return Grant(held, gave_way)

    def set_end(self, token: str, now: float, seconds: int) -> int | None:
        """Let a lease end ``seconds`` from now; 0 ends it. Any thread.

        Returns:
            The seconds that are left, ``seconds``; ``None`` where no such lease is held.
        """
        held = self._held.get(token)
        if held is None or held.over(now):
            return None
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
        if held.continues is not None:
            held.continues.heir = held.heir
        if held.heir is not None:
            held.heir.continues = held.continues
        held.continues = held.heir = None
        if held.firm:
            self._set_firm(held, False)
        for block in held.blocks:
            left = self._uses[block] - 1
            if left:
                self._uses[block] = left
            else:
                del self._uses[block]

    def _set_firm(self, held: Held, firm: bool) -> None:
        held.firm = firm
        before = len(self._firm)
        for block in held.blocks:
            if firm:
                self._firm[block] += 1
            elif self._firm[block] == 1:
                del self._firm[block]
            else:
                self._firm[block] -= 1
        self._firm_state += before != len(self._firm)

    def _continued(self, blocks: frozenset[int], now: float) -> Held | None:
        """The lease whose good word a turn with these blocks inherits: the longest that it begins with."""
        words = (
            held
            for held in self._held.values()
            if held.prolonged
            and held.heir is None
            and not held.over(now)
            and held.blocks[-1] in blocks  # many begin alike, and few are long
            and blocks.issuperset(held.blocks)
        )
        return max(words, key=lambda held: len(held.blocks), default=None)

    def _longest(self, candidates: Sequence[Held], blocks: Sequence[int]) -> tuple[int, ...]:
        """As many of the leading blocks as there is room for without any of ``candidates``."""
        soft = set(map(id, candidates))
        for held in self._held.values():
            firm = id(held) not in soft
            if firm != held.firm:
                self._set_firm(held, firm)
        room = self.cap - len(self._firm)
        part: list[int] = []
        for block in blocks:
            if block not in self._firm:
                if room <= 0:
                    break
                room -= 1
            part.append(block)
        return tuple(part)

    def _least(self, candidates: Sequence[Held], blocks: Sequence[int]) -> list[Held] | None:
        """Which of ``candidates`` have to give way for these blocks, the first ones rather than the last.

        None of them could be spared. ``None`` when all together are not enough.
        """
        wanted = frozenset(blocks)
        total = len(self._uses) + sum(block not in self._uses for block in wanted)
        lost: dict[int, int] = {}
        chosen: list[Held] = []
        for held in candidates:
            if total <= self.cap:
                break
            chosen.append(held)
            for block in self._others(held):
                lost[block] = uses = lost.get(block, 0) + 1
                total -= uses == self._uses[block] and block not in wanted
        if total > self.cap:
            return None
        # What seemed to help may not have been needed in the end.
        gave_way: list[Held] = []
        for held in reversed(chosen):
            others = self._others(held)
            back = sum(lost[block] == self._uses[block] and block not in wanted for block in others)
            if total + back <= self.cap:
                total += back
                for block in others:
                    lost[block] -= 1
            else:
                gave_way.append(held)
        return gave_way[::-1]

    def _others(self, held: Held) -> tuple[int, ...]:
        """Its blocks that can be given back at all. A long prompt that many share is walked through once, not for each
        new lease."""
        state, blocks = held.others
        if state != self._firm_state:
            blocks = tuple([block for block in held.blocks if block not in self._firm])
            held.others = (self._firm_state, blocks)
        return blocks
