"""Which engines serve a turn: a choice over a frozen picture of the fleet, returned with its reasons.

Separate from the fleet itself: filter, order, pick, all on values, so that every choice can be repeated in a test and
explained afterwards. Loads are leases that a turn opens and closes, so that no path can count up without counting down.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one moment. `incarnation` changes with its process; engines pair within a `generation`."""

    key: str
    url: str
    role: str
    generation: str
    incarnation: str
    ready: bool
    draining: bool = False
    failing: bool = False
    """Its breaker is open."""

    @property
    def takes_work(self) -> bool:
        """Whether a new turn may go there; one that drains is ready and only ends what it has."""
        return self.ready and not self.draining and not self.failing


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine, or None; the reason; and each engine that was passed over with its reason."""

    engine: Engine | None
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _Load:
    turns: int = 0
    tokens: int = 0
    opened: int = 0
    """Serial number of the newest lease: among equals the one that waited longest is next."""


@dataclass(slots=True)
class Lease:
    """One turn's share of an engine's load. Closing twice is harmless."""

    _load: _Load
    _tokens: int
    _open: bool = True

    def close(self) -> None:
        """Give the share back."""
        if self._open:
            self._open = False
            self._load.turns -= 1
            self._load.tokens -= self._tokens


@dataclass(slots=True)
class Loads:
    """Outstanding turns and prefill tokens per engine key."""

    _loads: dict[str, _Load] = field(default_factory=dict)
    _serial: int = 0

    def open(self, key: str, tokens: int = 0) -> Lease:
        """A turn goes to the engine; `tokens` is the prompt it still has to compute there."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load()
        self._serial += 1
        load.turns += 1
        load.tokens += tokens
        load.opened = self._serial
        return Lease(load, tokens)

    def turns(self, key: str) -> int:
        """Turns that are on the engine now."""
        load = self._loads.get(key)
        return load.turns if load is not None else 0

    def tokens(self, key: str) -> int:
        """Prompt tokens that the engine was asked to prefill and has not answered for."""
        load = self._loads.get(key)
        return load.tokens if load is not None else 0

    def opened(self, key: str) -> int:
        """Serial number of the last turn that went there; 0 for none."""
        load = self._loads.get(key)
        return load.opened if load is not None else 0

    def forget(self, key: str) -> None:
        """The engine left the fleet, all its ranks with it; leases still open on it stay harmless."""
        for gone in [one for one in self._loads if one == key or one.startswith(f"{key}#")]:
            del self._loads[gone]


Blocked = frozenset[tuple[str, str]]
"""(prefill, decode) keys of pairs that can't move KV now, in one direction."""
NO_PAIRS: Final[Blocked] = frozenset()


def choose_decode(
    engines: Sequence[Engine],
    loads: Loads,
    holder: str | None,
    bound: int,
    generations: frozenset[str] | None = None,
    shunned: frozenset[str] = frozenset(),
) -> Choice:
    """The holder, unless it is too busy; then the least loaded engine of its generation; without a holder the least
    loaded of all.

    Args:
        holder: key of the engine that has the conversation's blocks.
        bound: turns that the holder may have more than the least loaded engine; its prefix cache is worth that wait.
        generations: those for which a prefill engine is ready; None to pair with any.
        shunned: engines that no prefill engine can hand over to now; taken all the same when there are no others.
    """
    fit, rejected = _filter(engines, None)
    if generations is not None and (alone := [engine for engine in fit if engine.generation not in generations]):
        rejected += [(engine.key, "no prefill engine of its generation") for engine in alone]
        fit = [engine for engine in fit if engine.generation in generations]
    if shunned and any(engine.key not in shunned for engine in fit):
        rejected += [(engine.key, "quarantined with every prefill engine") for engine in fit if engine.key in shunned]
        fit = [engine for engine in fit if engine.key not in shunned]
    mine = next((engine for engine in fit if engine.key == holder), None) if holder is not None else None
    if mine is not None and (others := [engine for engine in fit if engine.generation != mine.generation]):
        # P must be of the generation of the D that the handle came from, and this D of P's.
        rejected += [(engine.key, "other generation") for engine in others]
        fit = [engine for engine in fit if engine.generation == mine.generation]
    if not fit:
        return Choice(None, "no decode engine is ready", tuple(rejected))
    least = min(fit, key=lambda engine: (loads.turns(engine.key), loads.opened(engine.key)))
    if mine is not None:
        if loads.turns(mine.key) - loads.turns(least.key) <= bound:
            return Choice(mine, "holder", tuple(rejected))
        return Choice(least, "holder too busy", (*rejected, (mine.key, "too busy")))
    return Choice(least, "holder not available" if holder else "least loaded", tuple(rejected))


def choose_prefill(
    engines: Sequence[Engine],
    loads: Loads,
    generation: str,
    no_handoff: frozenset[str] = frozenset(),
    no_pull: frozenset[str] = frozenset(),
) -> Choice:
    """The ready engine of `generation` with the fewest outstanding prompt tokens.

    Args:
        no_handoff: engines whose KV the chosen decode engine can't read now; the last resort.
        no_pull: engines that can't read the holder's KV now; better than those, and worse than any other.
    """
    fit, rejected = _filter(engines, generation)
    if not fit:
        return Choice(None, "no prefill engine of the generation is ready", tuple(rejected))
    least = min(
        fit,
        key=lambda engine: (
            engine.key in no_handoff,
            engine.key in no_pull,
            loads.tokens(engine.key),
            loads.turns(engine.key),
            loads.opened(engine.key),
        ),
    )
    if least.key in no_handoff:
        return Choice(least, "all pairs are in quarantine", tuple(rejected))
    if no_handoff:
        rejected += [(engine.key, "pair in quarantine: hand-off") for engine in fit if engine.key in no_handoff]
    if least.key in no_pull:
        return Choice(least, "no pair that can pull", tuple(rejected))
    if no_pull:
        rejected += [(engine.key, "pair in quarantine: pull") for engine in fit if engine.key in no_pull - no_handoff]
    return Choice(least, "least outstanding tokens", tuple(rejected))


def shunned(decodes: Sequence[Engine], prefills: Sequence[Engine], blocked: Blocked) -> frozenset[str]:
    """Keys of the decode engines that none of the prefill engines they could be paired with can hand over to."""
    if not blocked:
        return frozenset()
    return frozenset(
        decode.key
        for decode in decodes
        if all(
            (prefill.key, decode.key) in blocked
            for prefill in prefills
            if prefill.takes_work and prefill.generation == decode.generation
        )
    )


def choose_rank(key: str, rank: int | None, ranks: Collection[int], loads: Loads, bound: int) -> int | None:
    """The data-parallel rank of engine `key` that the turn is pinned to; None leaves it to the engine (HL-25).

    Args:
        rank: that of the holder, whose prefix cache has the conversation.
        ranks: all that the engine is known to have. Without rank 0, or with one alone, nothing is pinned: behind an
            external or hybrid balancer an address has a part of the ranks, and vLLM counts those from 0 and refuses a
            number beyond them.
        bound: turns pinned to the holder's rank beyond those of the least loaded one.
    """
    if rank is None or len(ranks) < 2 or 0 not in ranks:
        return None
    least = min((loads.turns(rank_key(key, other)) for other in ranks), default=0)
    return rank if loads.turns(rank_key(key, rank)) - least <= bound else None


def rank_key(key: str, rank: int) -> str:
    """What the load of one rank of an engine is counted under."""
    return f"{key}#{rank}"


def _filter(engines: Sequence[Engine], generation: str | None) -> tuple[list[Engine], list[tuple[str, str]]]:
    fit: list[Engine] = []
    rejected: list[tuple[str, str]] = []
    for engine in engines:
        if not engine.ready:
            rejected.append((engine.key, "not ready"))
        elif engine.failing:
            rejected.append((engine.key, "failing: its breaker is open"))
        elif engine.draining:
            rejected.append((engine.key, "draining"))
        elif generation is not None and engine.generation != generation:
            rejected.append((engine.key, "other generation"))
        else:
            fit.append(engine)
    return fit, rejected
