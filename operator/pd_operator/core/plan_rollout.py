"""How far each role's StatefulSet may replace its engines while a new generation comes in.

Engines are paired within a generation only, and each StatefulSet rolls by itself, from the highest index down to its
partition. Partitions are what this module decides, and they have to be safe without the operator: whatever the two
controllers do until the next look, a pair that can serve must stay.

What keeps serving is one of two things.

* A **new pair**: each role has an available engine of the new generation. Controllers never take those, so both roles
  may go on; each leads the other by one step at most, since an engine without a partner is idle.
* An **old pair**: each role keeps a ready engine of one earlier generation below its partition.

A role that can't keep a ready engine and replace another one has to give its engine up. It does so last: when the other
role has a new engine, or, when the other can't keep one either, both at once; the gap is then one start and not two.

Nothing is remembered: everything follows from the engines that exist. Separate from `plan`, which knows no engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Engine:
    """One pod that is not ending. `troubled`: something keeps it from running that waiting may not mend."""

    index: int
    generation: str
    ready: bool
    troubled: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """One role as it is.

    Attributes:
        replicas: live number; the wanted one while there is no StatefulSet.
        engines: pods of the role.
        available: pods that were ready for long enough, as its controller counts them.
        wanted: number that the spec asks for, None when an autoscaler decides.
        generation: that of the live template.
        partition: the live one.
        user_partition: the one in the spec: a canary, or a pause.
        step: most pods that its controller replaces at once.
    """

    replicas: int
    engines: tuple[Engine, ...] = ()
    available: int = 0
    wanted: int | None = None
    generation: str = ""
    partition: int = 0
    user_partition: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """What differs from the spec for one role.

    Attributes:
        partition: to write, never below the user's own.
        replicas: to keep for now although the spec asks for fewer; None: as the spec says.
        kept: engines of earlier generations that stay for now, because of the other role.
    """

    partition: int
    replicas: int | None = None
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """The holds of both roles, in the order in which the sides were given. `gap`: no pair can be kept."""

    holds: tuple[Hold, Hold]
    gap: bool = False


class _Means(Enum):
    """How a role can take part while an old pair serves."""

    STAGED = auto()
    """It keeps a ready engine and replaces others."""
    WAITING = auto()
    """It will, once a starting engine below the only ready one is ready."""
    SINGLE = auto()
    """It has to give up its only ready engine."""
    PAUSED = auto()
    """The user's partition keeps all of it."""


@dataclass(frozen=True, slots=True)
class _View:
    """A side at the number of engines that it is going to have."""

    side: Side
    count: int
    stale: tuple[int, ...]
    new: int
    """Available engines of the new generation."""

    @property
    def limit(self) -> int:
        """Engines that the user lets be replaced."""
        return max(0, self.count - self.side.user_partition)


def plan_rollout(generation: str, sides: tuple[Side, Side]) -> Rollout:
    """Decide both partitions.

    Args:
        generation: the one that is wanted.
        sides: prefill and decode, or the other way round.
    """
    counts, kept = _counts(sides)
    one, two = (_view(generation, side, count) for side, count in zip(sides, counts, strict=True))
    if not (one.stale or two.stale) or not (one.count and two.count):
        partitions, gap = (0, 0), False
    elif one.new and two.new:
        partitions, gap = (_in_step(generation, one, two), _in_step(generation, two, one)), False
    else:
        partitions, gap = _with_old_pair(generation, one, two)
    holds = (_hold(one, partitions[0], kept[0]), _hold(two, partitions[1], kept[1]))
    return Rollout(holds, gap)


def pairs(sides: Iterable[Iterable[Engine]]) -> frozenset[str]:
    """The generations of which every role has a ready engine."""
    one, two = (frozenset(engine.generation for engine in engines if engine.ready) for engines in sides)
    return one & two


def _counts(sides: tuple[Side, Side]) -> tuple[tuple[int, int], tuple[int | None, int | None]]:
    """How many engines each role is going to have. Fewer wait while those that stay would make no pair but may soon.

    A StatefulSet gives up its highest indices first, and in a rollout those are the ones that are new.
    """
    live = (sides[0].replicas, sides[1].replicas)
    wanted = tuple(side.replicas if side.wanted is None else side.wanted for side in sides)
    goal = (wanted[0], wanted[1])
    fewer = tuple(after < now for after, now in zip(goal, live, strict=True))
    stay = (_first(sides[0], goal[0]), _first(sides[1], goal[1]))
    if not any(fewer) or not pairs(map(_first, sides, live)) or pairs(stay):
        return goal, (None, None)
    if any(sum(engine.troubled for engine in engines) == count for engines, count in zip(stay, goal, strict=True)):
        return goal, (None, None)
    kept = tuple(now if less else None for now, less in zip(live, fewer, strict=True))
    counts = tuple(max(now, after) for now, after in zip(live, goal, strict=True))
    return (counts[0], counts[1]), (kept[0], kept[1])


def _first(side: Side, count: int) -> tuple[Engine, ...]:
    return tuple(engine for engine in side.engines if engine.index < count)


def _view(generation: str, side: Side, count: int) -> _View:
    engines = _first(side, count)
    ready = sum(engine.ready for engine in engines if engine.generation == generation)
    # Which pods are available nobody says; so many are, even when all ready ones of earlier generations are.
    others = sum(engine.ready for engine in side.engines if engine.generation != generation)
    stale = sorted(engine.index for engine in engines if engine.generation != generation)
    return _View(side, count, tuple(stale), max(0, min(ready, side.available - others)))


def _in_step(generation: str, mine: _View, other: _View) -> int:
    """The partition by which a role leads the other one by at most one step, in shares of their numbers."""
    if not other.stale:
        return 0
    reached = min(other.new + other.side.step, other.limit)
    allowed = max(mine.side.step, mine.count * reached // other.count) if reached else 0
    keep = min(mine.count - allowed, len(mine.stale))
    partition = mine.stale[keep - 1] + 1 if keep > 0 else 0
    partition = min([partition, *_in_the_way(generation, mine, partition)])
    # An engine that is not available for a moment does not take back what was allowed.
    return min(partition, mine.side.partition) if mine.side.generation == generation else partition


def _with_old_pair(generation: str, one: _View, two: _View) -> tuple[tuple[int, int], bool]:
    """Partitions while no new pair can serve yet."""
    ready = pairs((_first(one.side, one.count), _first(two.side, two.count)))
    options = [_keeping(generation, (one, two), name) for name in sorted(ready - {generation})]
    partitions, gap = min(options, key=lambda option: (option[1], sum(option[0])), default=((0, 0), True))
    return partitions, gap and generation not in ready


def _keeping(generation: str, views: tuple[_View, _View], old: str) -> tuple[tuple[int, int], bool]:
    """Partitions that keep a pair of one earlier generation, as long as that brings the rollout forward."""
    one, two = views
    floors = (_lowest(one, old) + 1, _lowest(two, old) + 1)
    means = (_means(one, floors[0], old, generation), _means(two, floors[1], old, generation))
    if _Means.PAUSED in means:
        return (one.count, two.count), False
    single = tuple(mean is _Means.SINGLE for mean in means)
    if all(single):
        return (0, 0), True
    # The other role is ahead, so that the gap is the start of one engine.
    first = 0 if single[0] and two.new else max(floors[0], _in_step(generation, one, two))
    second = 0 if single[1] and one.new else max(floors[1], _in_step(generation, two, one))
    return (first, second), any(single)


def _lowest(view: _View, old: str) -> int:
    """The index of the ready engine that costs least to keep."""
    return min(engine.index for engine in view.side.engines if engine.generation == old and engine.ready)


def _means(view: _View, floor: int, old: str, generation: str) -> _Means:
    side = view.side
    if not view.limit:
        return _Means.PAUSED
    if view.new or max(floor, side.user_partition) < view.count:
        return _Means.SINGLE if not view.new and _in_the_way(generation, view, floor) else _Means.STAGED
    below = [engine for engine in side.engines if engine.index < floor - 1]
    if any(engine.generation in (old, generation) and not engine.troubled for engine in below):
        return _Means.WAITING
    missing = _missing(view, floor - 1)
    return _Means.WAITING if missing and not _given_up(generation, side, missing) else _Means.SINGLE


def _in_the_way(generation: str, view: _View, partition: int) -> list[int]:
    """Engines that can't run and that the partition would keep, while nothing else is replaced because of them.

    Since Kubernetes 1.37 they count as unavailable wherever they are, and `step` allows no more of those.
    """
    own = view.side.user_partition
    reach = [engine for engine in view.side.engines if own <= engine.index < min(partition, view.count)]
    broken = [engine.index for engine in reach if engine.troubled and engine.generation != generation]
    broken += _given_up(generation, view.side, _missing(view, partition))
    return broken if len(broken) >= view.side.step else []


def _missing(view: _View, partition: int) -> list[int]:
    """Indices below a partition that have no engine. Where the partition holds them they are made anew as they were."""
    return sorted(set(range(min(partition, view.count))) - {engine.index for engine in view.side.engines})


def _given_up(generation: str, side: Side, missing: list[int]) -> list[int]:
    """Those that the live partition lets come in new. Held again they would come back as they were, again and again."""
    return [index for index in missing if side.generation == generation and index >= side.partition]


def _hold(view: _View, partition: int, replicas: int | None) -> Hold:
    own = view.side.user_partition
    kept = sum(index < partition for index in view.stale) if partition > own else 0
    return Hold(max(partition, own), replicas, kept)
