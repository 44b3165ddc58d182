"""A new generation comes in: which engines are kept, in which order they go, and that a pair that can serve stays.

Three shapes: single decisions as a table, whole rollouts step by step, and walks in which engines fail and come
back, specs change, and the operator is away or killed between two writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_operator.core.plan_rollout import Engine, Hold, Rollout, Side, plan_rollout
from support.rollout_model import ModelDeployment, ModelPod

ROLES = ("prefill", "decode")


def side(*engines: str, live: str = "a", **changes: Any) -> Side:
    """A role whose engines are written as generation and state: `a` ready, `a-` starting, `a!` in trouble."""
    made = tuple(Engine(n, text[0], len(text) == 1, text.endswith("!")) for n, text in enumerate(engines) if text)
    ready = sum(engine.ready for engine in made)
    fields: dict[str, Any] = {"replicas": len(engines), "engines": made, "available": ready, "wanted": len(engines)}
    return Side(**{**fields, "generation": live, **changes})


NEW = {"live": "b", "partition": 1}
CASES: dict[str, tuple[Side, Side, tuple[int, int], bool]] = {
    # prefill, decode, partitions, is there a gap; `b` is wanted
    "nothing old": (side("b", "b", live="b"), side("b", live="b"), (0, 0), False),
    "first creation": (side(replicas=2, wanted=2), side(replicas=2, wanted=2), (0, 0), False),
    "two and two begin": (side("a", "a"), side("a", "a"), (1, 1), False),
    "one side has a new engine": (side("a", "b", **NEW), side("a", "b-", **NEW), (1, 1), False),
    "it is not available yet": (side("a", "b", **NEW), side("a", "b", **NEW, available=1), (1, 1), False),
    "both have one": (side("a", "b", **NEW), side("a", "b", **NEW), (0, 0), False),
    "four and four begin": (side(*"aaaa"), side(*"aaaa"), (3, 3), False),
    "four and four, one each": (side(*"aaab", live="b", partition=3), side(*"aaab", live="b", partition=3),
                                (2, 2), False),
    "the slower role is waited for": (side(*"aabb", live="b", partition=2),
                                      side("a", "a", "b-", "b", live="b", partition=2), (2, 1), False),
    "an engine that blinks takes nothing back": (side(*"aabb", live="b", partition=1),
                                                 side("a", "a", "b-", "b", live="b", partition=2), (1, 1), False),
    "shares of unequal numbers": (side("a", "a"), side(*"a" * 8), (1, 4), False),
    "eight wait for the first of two": (side("a", "b-", **NEW), side(*"aaaabbbb", live="b", partition=4),
                                        (1, 4), False),
    "one and one go together": (side("a"), side("a"), (0, 0), True),
    "the single one goes last": (side("a"), side("a", "a"), (1, 1), True),
    "then it goes": (side("a", live="b", partition=1), side("a", "b", **NEW), (0, 1), True),
    "and the rest follows": (side("b-", live="b"), side("a", "b", **NEW), (0, 0), True),
    "a growing single one is none": (side("a", wanted=2), side("a", wanted=2), (1, 1), False),
    "nothing serves, nothing is kept": (side("a-", "a-"), side("a-", "a-"), (0, 0), True),
    "a broken old one is not kept": (side("a!", "a!"), side("a", "a"), (0, 0), True),
    "the only ready one is the highest": (side("a-", "a"), side("a", "a"), (2, 1), False),
    "and will stay so": (side("a!", "a"), side("a", "a"), (2, 1), True),
    "one that is missing below it may come back": (side("", "a"), side("a", "a"), (2, 1), False),
    "what was given up is not held again": (side("", "a", live="b"), side("a", "b", **NEW), (0, 1), True),
    "what comes back as it was is given up": (side("a", "a-", "c", live="b", partition=3),
                                              side("c", "b", **NEW), (0, 1), True),
    "a broken one lets no other be away": (side("a!", "a", "a"), side("a", "a"), (2, 1), True),
    "so it goes first": (side("a!", "a", "a", live="b", partition=2), side("a", "b", **NEW), (0, 1), True),
    "and does not come back": (side("", "a", "a", live="b"), side("a", "b", **NEW), (0, 1), True),
    "more may be away": (side("a!", "a", "a", step=2), side("a", "a"), (2, 1), False),
    "a broken one beside a new pair": (side("a", "a!", "a", "b", live="b", partition=3),
                                       side(*"aaab", live="b", partition=3), (1, 2), False),
    "a user's canary leaves it": (side("a!", "a", "a", user_partition=1), side("a", "a"), (2, 1), False),
    "a starting one of the wanted generation below it is": (side("b-", "a", live="a"), side("a", "a"),
                                                            (2, 1), False),
    "one of another generation below it is no help": (side("a", "c", live="c"), side("c", live="c"), (0, 0), True),
    "an aborted generation is replaced": (side("a", "c-", live="c", partition=1),
                                          side("a", "c-", live="c", partition=1), (1, 1), False),
    "two old generations serve": (side("a", "c", live="c", partition=1), side("a", "c", live="c", partition=1),
                                  (1, 1), False),
    "back to what most run": (side("b", "b", "b", "c", live="c", partition=3),
                              side("b", "b", "b", "c-", live="c", partition=3), (0, 0), False),
    "back from almost done": (side("b", "c", "c", "c", live="c"), side("b", "c", "c", "c", live="c"), (3, 3), False),
    "no engine wanted": (side(replicas=0, wanted=0), side("a", "a"), (0, 0), False),
    "a role without pods": (side(replicas=2, wanted=2), side("a", "a"), (0, 0), True),
    "a canary leads the other role": (side("a", "b", **NEW, user_partition=1), side("a", "b", **NEW), (1, 1), False),
    "a pause holds the other role": (side("a", "a", user_partition=2), side("a", "a"), (2, 2), False),
    "several at once": (side(*"a" * 8, step=3), side(*"a" * 8, step=3), (5, 5), False),
    "several at once keep one": (side("a", "a", step=4), side("a", "a", step=4), (1, 1), False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_decision(case: tuple[Side, Side, tuple[int, int], bool]) -> None:
    prefill, decode, partitions, gap = case
    made = plan_rollout("b", (prefill, decode))
    assert tuple(hold.partition for hold in made.holds) == partitions
    assert made.gap == gap
    turned = plan_rollout("b", (decode, prefill))
    assert turned == Rollout((made.holds[1], made.holds[0]), made.gap), "both roles are treated alike"


def test_what_is_held_says_that_it_waits() -> None:
    made = plan_rollout("b", (side("a", "b", **NEW), side("a", "b-", **NEW)))
    assert made.holds == (Hold(1, kept=1), Hold(1, kept=1))
    paused = plan_rollout("b", (side("a", "a", user_partition=2), side("a", "a")))
    assert [hold.kept for hold in paused.holds] == [0, 2], "a pause of the user's own waits for the user"


FEWER = {
    # prefill, decode, wanted numbers, replicas that are kept
    "new ones alone pair": (side("a", "b", **NEW), side("a-", "b", live="b"), (1, 1), (2, 2)),
    "old ones pair": (side("a", "b", **NEW), side("a", "b-", **NEW), (1, 1), (None, None)),
    "one role shrinks": (side("a-", "b", live="b"), side("b", "b", live="b"), (1, 2), (2, None)),
    "to none": (side("a-", "b", live="b"), side("b", "b", live="b"), (0, 2), (None, None)),
    "nothing serves": (side("a-", "b-", live="b"), side("b", "b", live="b"), (1, 2), (None, None)),
    "no rollout": (side("b-", "b", live="b"), side("b", "b", live="b"), (1, 2), (2, None)),
    "the rest is missing": (side("", "b", live="b"), side("b", "b", live="b"), (1, 2), (2, None)),
    "the rest is broken": (side("b!", "b", live="b"), side("b", "b", live="b"), (1, 2), (None, None)),
    "an autoscaler's": (side("a-", "b", live="b"), side("b", "b", live="b"), (None, 2), (None, None)),
}


@pytest.mark.parametrize("case", FEWER.values(), ids=FEWER.keys())
def test_fewer_engines_are_wanted(
    case: tuple[Side, Side, tuple[int | None, int | None], tuple[int | None, int | None]],
) -> None:
    prefill, decode, wanted, kept = case
    sides = (_with(prefill, wanted[0]), _with(decode, wanted[1]))
    assert tuple(hold.replicas for hold in plan_rollout("b", sides).holds) == kept


def _with(one: Side, wanted: int | None) -> Side:
    return replace(one, wanted=wanted)


# --- whole rollouts -----------------------------------------------------------------------------


def roll(made: ModelDeployment, generation: str, slow: str = "", start: int = 4, slow_start: int = 10) -> list[bool]:
    """Play a rollout, one tick after the other; engines of the slow role load longer. Was a pair there, per tick?"""
    made.generation = generation
    age: dict[int, int] = {}
    served: list[bool] = []
    for _ in range(1000):
        made.operate()
        for one in made.sets.values():
            one.control()
        for role, one in made.sets.items():
            for pod in one.pods.values():
                age[id(pod)] = age.get(id(pod), 0) + 1
                if age[id(pod)] >= (slow_start if role == slow else start):
                    pod.come_up()
        _keep.extend(made.all_pods())
        served.append(bool(made.serving()))
        if made.done():
            return served
    raise AssertionError(f"the rollout never ends: {made.sets}")


_keep: list[ModelPod] = []
"""Pods that are gone, so that no other one gets their identity."""


@pytest.mark.parametrize("modern", [True, False], ids=["1.37", "before"])
@pytest.mark.parametrize("slow", ["", "prefill", "decode"])
@pytest.mark.parametrize("numbers", [(2, 2), (2, 3), (3, 2), (4, 4), (2, 8), (8, 8)], ids=str)
def test_no_gap_with_two_or_more_of_each(numbers: tuple[int, int], slow: str, modern: bool) -> None:
    made = ModelDeployment(*numbers, modern=modern).start()
    assert all(roll(made, "b", slow))
    for role, number in zip(ROLES, numbers, strict=True):
        assert made.templates[role] == 1, "a template is written once"
        # One partition with the template, and never the same one twice.
        assert made.writes[role] <= number
        assert made.sets[role].taken == number, "every engine is replaced once"
    made.operate()
    assert sum(made.writes.values()) <= sum(numbers)


def test_two_and_two_take_one_more_write_each() -> None:
    made = ModelDeployment(2, 2).start()
    roll(made, "b", "prefill")
    assert made.writes == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize("modern", [True, False], ids=["1.37", "before"])
def test_one_and_one_are_away_for_one_start(modern: bool) -> None:
    made = ModelDeployment(1, 1, modern=modern).start()
    served = roll(made, "b", "prefill", start=4, slow_start=10)
    # A controller deletes in one look and creates in the next.
    assert served.count(False) <= 10 + 1
    assert made.writes == {"prefill": 1, "decode": 1}, "nothing can be kept, so nothing is held"


@pytest.mark.parametrize(("slow", "longest"), [("prefill", 10), ("decode", 4)])
def test_a_single_engine_is_away_for_its_own_start_only(slow: str, longest: int) -> None:
    made = ModelDeployment(1, 2).start()
    served = roll(made, "b", slow, start=4, slow_start=10)
    assert 0 < served.count(False) <= longest + 1


def test_a_new_generation_that_never_starts_leaves_the_old_one_serving_until_it_is_corrected() -> None:
    made = ModelDeployment(2, 2).start()
    made.generation = "bad"
    for _ in range(20):
        made.operate()
        for one in made.sets.values():
            one.control()
    assert made.serving() == {"a"}
    writes = dict(made.writes)
    assert all(roll(made, "c", "decode"))
    assert {role: made.writes[role] - writes[role] for role in ROLES} == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize("ticks", range(0, 60, 3))
def test_a_rollback_in_the_middle(ticks: int) -> None:
    made = ModelDeployment(3, 3).start()
    made.generation = "b"
    for tick in range(ticks):
        made.operate()
        for one in made.sets.values():
            one.control()
            for pod in one.pods.values():
                if tick % 4 == 3:
                    pod.come_up()
        assert made.serving()
    assert all(roll(made, "a", "prefill"))


def test_a_rollout_that_begins_with_more_engines_has_no_gap() -> None:
    made = ModelDeployment(1, 1).start()
    made.wanted = {"prefill": 2, "decode": 2}
    assert all(roll(made, "b", "prefill"))


def test_a_scale_down_waits_for_the_pair_that_it_would_take() -> None:
    made = ModelDeployment(2, 2).start()
    made.generation = "b"
    while made.serving() != {"b"}:
        made.operate()
        for one in made.sets.values():
            one.control()
        made.sets["prefill"].pods[max(made.sets["prefill"].pods)].come_up()
        made.sets["decode"].pods[max(made.sets["decode"].pods)].come_up()
    for one in made.sets.values():
        one.pods.setdefault(0, ModelPod("b"))
    made.sets["prefill"].pods[0] = ModelPod("a")
    made.wanted = {"prefill": 1, "decode": 1}
    made.operate()
    assert [one.replicas for one in made.sets.values()] == [2, 2]
    assert all(roll(made, "b"))
    assert [one.replicas for one in made.sets.values()] == [1, 1]


# --- anything may happen ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """The operator looks and one controller works, then the same for the other one; then engines change.

    The masks say by number, prefill first, which engines come up for good, are ready shortly, and go down.
    """

    first: str
    up: int
    shortly: int
    down: int


@dataclass(frozen=True)
class Edit:
    """Another generation is wanted. `cut`: the operator is killed after its first write, and another one goes on."""

    generation: str
    cut: bool
    first: str


@dataclass(frozen=True)
class Scale:
    """Another number is wanted; by an autoscaler, which only ever adds here, since nobody can hold what it takes."""

    role: str
    number: int
    external: bool


@dataclass(frozen=True)
class Away:
    """Nobody looks for some ticks, in which engines come up and none fails."""

    ups: tuple[int, ...]


@dataclass(frozen=True)
class Rot:
    """Engines of an earlier generation run on, and can't start any more."""

    role: str
    generation: str


@dataclass(frozen=True)
class Canary:
    """A user lets only engines from an index on be replaced."""

    role: str
    partition: int


Step = Tick | Edit | Scale | Away | Rot | Canary
MASK = st.integers(0, 255)
FEW = st.sampled_from([0, 0, 0, *(1 << bit for bit in range(8)), 255])
ROLE = st.sampled_from(ROLES)
TICK = st.builds(Tick, ROLE, MASK, MASK, FEW)
STEPS = st.one_of(
    TICK,
    TICK,
    TICK,
    st.builds(Edit, st.sampled_from("abc"), st.booleans(), ROLE),
    st.builds(Scale, ROLE, st.integers(1, 4), st.booleans()),
    st.builds(Canary, ROLE, st.integers(0, 4)),
    st.builds(Rot, ROLE, st.sampled_from("abc")),
    st.builds(Away, st.tuples(MASK, MASK, MASK)),
)


class Walk:
    """Any steps, and what must hold after each.

    When a pair could serve before a write or a controller's work, one can after it, unless the plan has said that there
    is a gap; and it says so only when a role has one engine, lacks one or has one in trouble, when engines are of three
    generations, or when nothing serves.
    """

    def __init__(self, prefill: int, decode: int, modern: bool, at_once: int) -> None:
        self.made = ModelDeployment(prefill, decode, modern=modern).start()
        for one in self.made.sets.values():
            one.step = at_once if modern else 1

    def go(self, step: Step) -> None:
        """One step."""
        if isinstance(step, Tick):
            for role in _order(step.first):
                self._operate()
                self._control(role)
            self._change(step.up, step.shortly, step.down)
        elif isinstance(step, Edit):
            self._edit(step)
        elif isinstance(step, Scale):
            self.made.wanted[step.role] = None if step.external else step.number
            if step.external:
                one = self.made.sets[step.role]
                one.replicas = max(step.number, one.replicas)
        elif isinstance(step, Rot):
            self.made.sets[step.role].rot(step.generation)
        elif isinstance(step, Canary):
            self.made.sets[step.role].user_partition = step.partition
        else:
            self._operate()
            if self.made.serving() and not self.made.rollout.gap:
                for up in step.ups:
                    self._control(ROLES[0])
                    self._control(ROLES[1])
                    self._change(up, 0, 0)

    def _edit(self, step: Edit) -> None:
        # Between two writes of an edit in the middle of another rollout, the other controller still works on that one.
        self._operate()
        cut = step.cut and self.made.at_rest()
        self.made.generation = step.generation
        if cut:
            self._operate([step.first])
            for role in _order(step.first):
                self._control(role)
            self._operate()

    def _operate(self, roles: Sequence[str] = ROLES) -> None:
        before = self.made.serving()
        self.made.operate(roles)
        stay = ([pod for index, pod in one.pods.items() if index < one.replicas] for one in self.made.sets.values())
        hopeless = any(pods and all(pod.troubled for pod in pods) for pods in stay)
        assert self.made.serving() or not before or hopeless, "a scale-down took the last pair"
        if self.made.rollout.gap and before:
            single = any(one.replicas == 1 for one in self.made.sets.values())
            known = {pod.generation for pod in self.made.all_pods()} - {self.made.generation}
            broken = any(pod.troubled for pod in self.made.all_pods())
            lacks = any(set(range(one.replicas)) - one.pods.keys() for one in self.made.sets.values())
            assert single or broken or lacks or len(known) > 1, "a gap without a reason"

    def _control(self, role: str) -> None:
        before = self.made.serving()
        self.made.sets[role].control()
        if before and not self.made.rollout.gap:
            assert self.made.serving(), f"{role} took the last pair of {before}"

    def _change(self, up: int, shortly: int, down: int) -> None:
        for number, pod in enumerate(self.made.all_pods()):
            if down >> number & 1:
                pod.go_down()
            elif up >> number & 1:
                pod.come_up()
            elif shortly >> number & 1:
                pod.be_ready()


def _order(first: str) -> list[str]:
    return sorted(ROLES, key=lambda role: role != first)


QUIET = Tick("prefill", 0, 0, 0)
COMES_BACK_AS_IT_WAS: list[Step] = [
    QUIET, Edit("c", False, "prefill"), QUIET, QUIET, Scale("prefill", 2, False), QUIET, QUIET, Away((0, 0, 10)),
    Edit("c", False, "prefill"), Scale("prefill", 3, False), QUIET, Edit("b", False, "prefill"), QUIET, QUIET, QUIET,
    QUIET, Tick("prefill", 12, 0, 0), Scale("decode", 1, False), QUIET, Tick("prefill", 0, 4, 0),
    Edit("c", False, "prefill"), Scale("decode", 2, False),
]  # fmt: skip
"""A third generation's only ready engine is the highest, and the one below it is made anew from the first template."""

ONE_CANT_START: list[Step] = [Rot("prefill", "a"), Tick("prefill", 0, 0, 1)]
"""Of a deployment that serves one engine fails and can't start any more, and another generation is to come."""


@settings(max_examples=150)
@example((1, 2), True, 1, COMES_BACK_AS_IT_WAS)
@example((2, 2), True, 1, ONE_CANT_START)
@example((3, 1), True, 1, ONE_CANT_START)
@example((3, 2), True, 1, ONE_CANT_START)
@given(
    numbers=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    modern=st.booleans(),
    at_once=st.integers(1, 2),
    steps=st.lists(STEPS, min_size=10, max_size=60),
)
def test_whatever_happens_a_pair_stays_and_the_rollout_ends(
    numbers: tuple[int, int], modern: bool, at_once: int, steps: list[Step]
) -> None:
    walk = Walk(*numbers, modern, at_once)
    for step in steps:
        walk.go(step)
    for one in walk.made.sets.values():
        one.user_partition = 0
    starts = not any(walk.made.generation in one.rotten for one in walk.made.sets.values())
    roll(walk.made, walk.made.generation if starts else "d", "prefill", start=2, slow_start=3)
