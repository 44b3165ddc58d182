"""A new generation comes in: which engines are kept, in which order they go, and that a pair that can serve stays.

Three shapes: single decisions as a table, whole rollouts step by step, and a state machine in which engines fail and
come back, specs change, and the operator is away or killed between two writes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    return Side(
        one.replicas, one.engines, one.available, wanted, one.generation, one.partition, one.user_partition, one.step
    )


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


class AnyRollout(RuleBasedStateMachine):
    """Engines fail and come back in any order while specs change and controllers work.

    The invariant: when a pair could serve before a controller's step, one can after it, unless the plan has said that
    there is a gap; and it says so only when a role has one engine, or nothing serves.
    """

    made: ModelDeployment

    @initialize(prefill=st.integers(1, 4), decode=st.integers(1, 4), modern=st.booleans(), step=st.integers(1, 2))
    def begin(self, prefill: int, decode: int, modern: bool, step: int) -> None:
        self.made = ModelDeployment(prefill, decode, modern=modern).start()
        for one in self.made.sets.values():
            one.step = step if modern else 1
        self.away = False

    @rule(generation=st.sampled_from("abc"))
    def edit(self, generation: str) -> None:
        self.made.generation = generation

    @rule(role=st.sampled_from(ROLES), number=st.integers(1, 4))
    def scale(self, role: str, number: int) -> None:
        self.made.wanted[role] = number

    @rule(role=st.sampled_from(ROLES), number=st.integers(1, 4), external=st.booleans())
    def autoscale(self, role: str, number: int, external: bool) -> None:
        self.made.wanted[role] = None if external else self.made.sets[role].replicas
        if external:
            self.made.sets[role].replicas = max(number, self.made.sets[role].replicas)

    @rule(number=st.integers(0, 7))
    def one_comes_up(self, number: int) -> None:
        pods = self.made.all_pods()
        if pods:
            pods[number % len(pods)].come_up()

    @rule(number=st.integers(0, 7))
    def one_is_ready_but_not_for_long(self, number: int) -> None:
        pods = self.made.all_pods()
        if pods:
            pods[number % len(pods)].ready = True

    @precondition(lambda self: not self.away)
    @rule(number=st.integers(0, 7))
    def one_goes_down(self, number: int) -> None:
        pods = self.made.all_pods()
        if pods:
            pods[number % len(pods)].go_down()

    @precondition(lambda self: not self.away)
    @rule(role=st.sampled_from(ROLES))
    def work(self, role: str) -> None:
        self.made.operate()
        self._control(role)

    @precondition(lambda self: not self.away)
    @rule(generation=st.sampled_from("abc"), written=st.sampled_from(ROLES), role=st.sampled_from(ROLES))
    def edit_and_end_after_one_write(self, generation: str, written: str, role: str) -> None:
        """The next process writes the rest before anything fails."""
        self.made.operate()
        if not self.made.at_rest():
            return
        self.made.generation = generation
        self.made.operate([written])
        self._control(role)
        self.made.operate()

    @precondition(lambda self: not self.away)
    @rule()
    def operator_ends(self) -> None:
        """From here on nothing fails and nobody writes; a pair must be there for a promise to be kept."""
        self.made.operate()
        self.away = bool(self.made.serving()) and not self.made.rollout.gap

    @precondition(lambda self: self.away)
    @rule(role=st.sampled_from(ROLES))
    def work_without_operator(self, role: str) -> None:
        self._control(role)

    @precondition(lambda self: self.away)
    @rule()
    def operator_begins(self) -> None:
        self.away = False

    def _control(self, role: str) -> None:
        before = self.made.serving()
        self.made.sets[role].control()
        if before and not self.made.rollout.gap:
            assert self.made.serving(), f"{role} took the last pair of {before}"

    @invariant()
    def a_gap_has_a_reason(self) -> None:
        if self.made.rollout.gap and self.made.serving():
            self.made.operate()
            single = any(one.replicas == 1 for one in self.made.sets.values())
            known = {pod.generation for pod in self.made.all_pods()} - {self.made.generation}
            assert single or len(known) > 1 or not self.made.rollout.gap

    def teardown(self) -> None:
        if hasattr(self, "made"):
            roll(self.made, self.made.generation, "prefill", start=2, slow_start=3)


AnyRollout.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyRollout = AnyRollout.TestCase
