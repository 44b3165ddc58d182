"""Which leases are prolonged, by which right, until when, and which are ended: examples, and a model of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.leases import DELAY, MAX_ENDING, Batch, Leases, Outcome, Why
from pd_wire.lease import MAX_BATCH, Lease

D = "d1"
HOUR = 3600.0


def lease(number: int = 1, seconds: int = 60) -> Lease:
    return Lease(f"{number:032x}", seconds)


ONE = lease()


@dataclass
class Engine:
    """The promises of one engine: token to the time at which it ends. It looks at nothing but what it is told."""

    ends: dict[str, float] = field(default_factory=dict)
    posts: list[float] = field(default_factory=list)
    renewals: list[float] = field(default_factory=list)
    heard: dict[str, int] = field(default_factory=dict)
    """How often it was asked to prolong which."""
    silent: bool = False
    deaf: bool = False
    """It answers nothing because it hears nothing."""
    most: int = 3600
    """Seconds that it promises at a time."""

    def promise(self, one: Lease, now: float) -> None:
        self.ends[one.token] = now + one.seconds

    def left(self, token: str, now: float) -> float:
        return max(0.0, self.ends.get(token, 0.0) - now)

    def answer(self, batch: Batch, now: float) -> list[int] | None:
        assert 1 <= len(batch.items) <= MAX_BATCH
        assert len({token for token, _ in batch.items}) == len(batch.items)
        self.posts.append(now)
        for token, seconds in batch.items:
            self.heard[token] = self.heard.get(token, 0) + bool(seconds)
        if any(seconds for _, seconds in batch.items):
            self.renewals.append(now)
        if self.deaf:
            return None
        left: list[int] = []
        for token, seconds in batch.items:
            assert 0 <= seconds <= HOUR
            held = self.left(token, now) > 0
            if held:
                self.ends[token] = now + min(seconds, self.most)
            left.append(min(seconds, self.most) if held else 0)
        return None if self.silent else left


class Scene:
    """Leases over engines, with time that passes."""

    def __init__(self, heartbeat: float = 0.0) -> None:
        self.leases = Leases(heartbeat)
        self.engine = Engine()
        self.now = 1000.0
        self.outcomes: list[Outcome] = []

    def wait(self, seconds: float) -> None:
        """Let time pass; whatever is due is said at once, and answered at once."""
        end = self.now + seconds
        for _ in range(100_000):
            at = self.leases.next_at()
            if at > end:
                break
            self.now = max(self.now, at)
            for holder in self.leases.due(self.now):
                batch = self.leases.batch(holder, self.now)
                if batch is not None:
                    left = self.engine.answer(batch, self.now)
                    self.outcomes.append(self.leases.answered(holder, batch, left, self.now))
        else:
            raise AssertionError("it never comes to rest")
        self.now = end

    def left(self, one: Lease = ONE) -> float:
        return self.engine.left(one.token, self.now)

    def leave(self, one: Lease = ONE) -> Lease:
        """A turn ended on the engine."""
        self.engine.promise(one, self.now)
        return one

    def begin(self, one: Lease = ONE, ends: float | None = None) -> None:
        self.leases.begin(D, one, self.engine.ends[one.token] if ends is None else ends, self.now)

    def end(self, one: Lease = ONE) -> None:
        self.leases.end(D, one.token, self.now)

    def hold(self, seconds: float, one: Lease = ONE, *, exact: bool = False) -> bool:
        ends = self.now + one.seconds
        return self.leases.hold(D, one, self.now + seconds, ends, self.now, exact=exact)

    @property
    def total(self) -> Outcome:
        return Outcome(
            sum(one.renewed for one in self.outcomes),
            tuple(why for one in self.outcomes for why in one.released),
            tuple(token for one in self.outcomes for token in one.gone),
            tuple(token for one in self.outcomes for token in one.lost),
        )


def test_without_a_right_nothing_is_done_and_it_runs_out() -> None:
    scene = Scene()
    scene.leave()
    assert scene.leases.next_at() == math.inf
    scene.wait(61.0)
    assert (scene.left(), scene.engine.posts, len(scene.leases)) == (0, [], 0)


def test_while_a_turn_runs_it_holds_and_then_for_its_seconds() -> None:
    scene = Scene()
    scene.leave()
    scene.wait(50.0)
    scene.begin()
    for _ in range(40):
        scene.wait(30.0)
        assert scene.left() > 15.0
    scene.end()
    assert len(scene.leases) == 0
    scene.wait(60.0)
    assert scene.left() == 0
    assert len(scene.engine.posts) <= 1200 / 20 + 1


def test_an_engine_hears_of_a_new_right_at_once_and_of_the_others_at_their_time() -> None:
    scene = Scene()
    for number in range(1, 12):
        scene.hold(600.0, scene.leave(lease(number)))
        scene.wait(2 * DELAY)
        assert scene.total.renewed == number
    scene.wait(10.0)
    assert scene.total.renewed == 11


def test_two_turns_on_one_lease() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.begin()
    scene.end()
    scene.wait(200.0)
    assert scene.left() > 0
    scene.end()
    scene.end()
    assert len(scene.leases) == 0


def test_after_tool_calls_it_holds_for_so_long_and_is_never_shortened() -> None:
    for seconds in (10.0, 600.0):
        scene = Scene()
        scene.leave()
        scene.hold(seconds)
        scene.wait(max(seconds, 60.0) - 1.0)
        assert scene.left() > 0
        scene.wait(61.0)
        assert (scene.left(), scene.leases.next_at()) == (0, math.inf)


@pytest.mark.parametrize("seconds", [1, 5, 59, 61, 90, 600])
def test_what_the_client_asks_for_is_kept_to_within_a_second(seconds: int) -> None:
    scene = Scene()
    scene.leave()
    scene.hold(seconds, exact=True)
    scene.wait(seconds - 0.5)
    assert scene.left() > 0
    scene.wait(2.0)
    assert (scene.left(), scene.leases.next_at(), len(scene.leases)) == (0, math.inf, 0)


@pytest.mark.parametrize("before", [None, 1.0, 15.0], ids=["first", "a second after another", "between two beats"])
@pytest.mark.parametrize(
    ("seconds", "exact"),
    [*((seconds, True) for seconds in (1, 57, 58, 59, 60, 61, 62, 600)), *((s, False) for s in (1, 10, 59, 60, 61))],
)
def test_an_engine_hears_of_every_right_at_once(before: float | None, seconds: int, exact: bool) -> None:
    scene = Scene()
    if before is not None:
        scene.hold(HOUR, scene.leave(lease(2)))
        scene.wait(before)
    scene.hold(seconds, scene.leave(), exact=exact)
    scene.wait(DELAY)
    assert scene.engine.heard[ONE.token] == 1
    left = scene.left()
    assert left == 60.0 if not exact else left <= min(60, seconds)
    scene.wait(seconds - 1.0)
    assert scene.left() > 0
    scene.wait(62.0)
    assert scene.left() == 0


def test_of_a_right_that_has_passed_before_it_was_told_nothing_is_said() -> None:
    scene = Scene()
    scene.hold(DELAY / 2, scene.leave())
    scene.wait(100.0)
    assert (scene.engine.posts, len(scene.leases)) == ([], 0)


def test_a_hold_is_told_at_once_although_the_next_turn_has_begun() -> None:
    """As agents with quick tools do: the turn's own lease would be the first to give way."""
    scene = Scene()
    scene.hold(600.0, scene.leave(lease(2)))
    scene.wait(DELAY)
    begun = scene.now
    scene.hold(600.0, scene.leave())
    scene.wait(DELAY / 2)
    scene.begin()
    scene.wait(DELAY)
    assert [round(at - begun, 3) for at in scene.engine.posts if at > begun] == [DELAY]


def test_a_hold_that_an_engine_did_not_hear_of_is_told_again_soon_and_then_ever_less_often() -> None:
    scene = Scene()
    scene.engine.deaf = True
    scene.hold(600.0, scene.leave(), exact=True)
    begun = scene.now
    scene.wait(40.0)
    told = [round(at - begun, 3) for at in scene.engine.posts]
    assert told == [0.2, 1.2, 3.2, 7.2, 15.2, 25.2, 35.2]
    scene.engine.deaf = False
    scene.wait(6.0)
    assert scene.total.renewed == 1
    # Once it answers, what is new is said at once, and one failure costs a second again.
    scene.hold(600.0, scene.leave(lease(2)), exact=True)
    scene.engine.deaf = True
    scene.wait(DELAY)
    scene.engine.deaf = False
    assert scene.total.renewed == 1
    scene.wait(1.0)
    assert scene.left(lease(2)) == 60.0


def test_an_end_is_told_at_once_together_with_others() -> None:
    scene = Scene()
    for number in range(1, 6):
        scene.leases.release(D, scene.leave(lease(number)), Why.SUPERSEDED, scene.now)
    scene.wait(DELAY)
    assert len(scene.engine.posts) == 1
    assert not any(scene.left(lease(number)) for number in range(1, 6))
    assert scene.total == Outcome(0, (Why.SUPERSEDED,) * 5)


def test_an_end_that_an_engine_did_not_hear_of_is_told_again() -> None:
    """Somebody else may have a right to it, and would prolong it for ever."""
    scene = Scene()
    scene.leave()
    scene.engine.deaf = True
    scene.leases.release(D, ONE, Why.ENDED, scene.now)
    scene.wait(0.6)
    scene.engine.deaf = False
    scene.wait(1.0)
    assert (scene.left(), scene.total.released) == (0, (Why.ENDED,))
    # One whose answer was lost is told again, too, and counts once.
    scene.engine.silent = True
    scene.leases.release(D, scene.leave(lease(2)), Why.ENDED, scene.now)
    scene.wait(0.6)
    assert scene.left(lease(2)) == 0
    scene.engine.silent = False
    scene.wait(300.0)
    assert (scene.total.released, len(scene.engine.posts)) == ((Why.ENDED,) * 2, 4)


def test_an_engine_that_never_hears_of_an_end_is_told_until_the_lease_must_be_over() -> None:
    scene = Scene()
    scene.engine.deaf = True
    scene.leases.release(D, scene.leave(), Why.ENDED, scene.now)
    scene.wait(119.0)
    assert scene.leases.next_at() < math.inf
    scene.wait(300.0)
    assert (scene.leases.next_at(), scene.leases._engines, scene.total.released) == (math.inf, {}, ())
    assert 10 <= len(scene.engine.posts) <= 20


def test_who_gives_a_lease_up_prolongs_it_no_more_but_for_a_turn_that_runs() -> None:
    scene = Scene()
    scene.hold(600.0, scene.leave(), exact=True)
    scene.wait(5.0)
    assert not scene.leases.give_up(D, ONE.token, scene.now)
    assert not scene.leases.give_up(D, lease(9).token, scene.now)
    assert not scene.leases.give_up("d9", ONE.token, scene.now)
    scene.wait(56.0)
    assert (scene.left(), scene.leases.next_at()) == (0, math.inf)
    two = scene.leave(lease(2))
    scene.hold(600.0, two, exact=True)
    scene.begin(two)
    scene.wait(5.0)
    assert scene.leases.give_up(D, two.token, scene.now)
    scene.wait(100.0)
    assert scene.left(two) > 15.0
    scene.end(two)
    scene.wait(61.0)
    assert (scene.left(two), scene.total.lost) == (0, ())


def test_no_end_while_a_turn_runs_on_it() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.begin()
    scene.leases.release(D, ONE, Why.SUPERSEDED, scene.now)
    scene.leases.release(D, ONE, Why.EVICTED, scene.now)
    scene.end()
    scene.wait(300.0)
    assert scene.left() > 0
    scene.end()
    scene.wait(DELAY)
    assert scene.left() == 0
    assert scene.total.released == (Why.SUPERSEDED,)


def test_what_was_ended_is_not_asked_for_again() -> None:
    scene = Scene()
    scene.leases.release(D, scene.leave(), Why.SUPERSEDED, scene.now)
    scene.begin()
    scene.wait(1.0)
    scene.begin()
    scene.leases.release(D, ONE, Why.EVICTED, scene.now)
    scene.wait(100.0)
    scene.end()
    assert (len(scene.engine.posts), scene.total.lost) == (1, ())


def test_no_hold_on_what_is_over_or_about_to_be() -> None:
    """A client repeats its turn, and the one that came first has left another handle or ended the conversation."""
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.leases.release(D, ONE, Why.SUPERSEDED, scene.now)
    assert not scene.hold(HOUR, exact=True)
    scene.wait(300.0)
    scene.end()
    scene.wait(DELAY)
    assert (scene.left(), scene.total.released) == (0, (Why.SUPERSEDED,))
    assert not scene.hold(HOUR)
    assert scene.leases.next_at() == math.inf
    scene.leave(lease(2))
    assert scene.hold(5.0, lease(2), exact=True)
    scene.wait(30.0)
    assert not scene.hold(HOUR, lease(2))


def test_an_engine_that_promises_less_than_it_is_asked_for_is_not_asked_without_end() -> None:
    scene = Scene()
    scene.engine.most = 10
    scene.hold(600.0, scene.leave())
    scene.wait(10.0)
    assert 2 <= len(scene.engine.posts) <= 51
    assert scene.left() > 5.0


def test_a_hold_keeps_its_end_when_a_turn_has_run_on_it() -> None:
    """Also one that is no longer than the lease, of which the engine needs to hear once only."""
    scene = Scene()
    scene.leave()
    scene.hold(30.0, exact=True)
    scene.wait(10.0)
    assert len(scene.leases) == 0
    scene.begin()
    scene.wait(60.0)
    assert scene.left() > 15.0
    scene.end()
    scene.wait(2.0)
    assert (scene.left(), len(scene.leases)) == (0, 0)


def test_an_end_whose_answer_was_lost_is_no_loss() -> None:
    scene = Scene()
    scene.hold(2.0, scene.leave(), exact=True)
    scene.engine.silent = True
    scene.wait(2.0)
    scene.engine.silent = False
    scene.wait(30.0)
    assert (len(scene.engine.posts), scene.total.lost, len(scene.leases)) == (3, (), 0)


def test_what_another_router_has_prolonged_is_prolonged_here_too() -> None:
    scene = Scene()
    scene.leave()
    scene.hold(10.0, exact=True)
    scene.wait(5.0)
    assert len(scene.leases) == 0
    scene.engine.ends[ONE.token] = scene.now + 300.0
    scene.wait(50.0)
    scene.leases.begin(D, ONE, scene.now - 1.0, scene.now, sure=False)
    scene.wait(400.0)
    assert scene.left() > 15.0


def test_a_lost_lease_is_counted_once_and_one_that_had_run_out_is_not() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.engine.ends.clear()
    scene.wait(300.0)
    assert (scene.total.lost, len(scene.engine.posts)) == ((ONE.token,), 1)
    scene.end()

    scene.leases.begin(D, lease(2), scene.now - 1.0, scene.now)
    assert len(scene.leases) == 0
    scene.leases.begin(D, lease(3), scene.now + 50.0, scene.now, sure=False)
    scene.wait(300.0)
    assert (scene.total.lost, len(scene.engine.posts)) == ((ONE.token,), 2)
    # Whoever counts what is prolonged hears of it all the same, and the engine's word stands.
    assert scene.total.gone == (ONE.token, lease(3).token)
    assert not scene.leases.hold(D, lease(3), scene.now + 600.0, scene.now + 50.0, scene.now, exact=True, sure=False)


def test_a_turn_that_comes_when_a_hold_is_nearly_over() -> None:
    scene = Scene()
    scene.leave()
    scene.hold(300.0, exact=True)
    scene.wait(295.0)
    assert 0 < scene.left() < 10.0
    scene.begin(ends=900.0)  # the handle says that it should be over by now
    scene.wait(100.0)
    assert scene.left() > 15.0
    assert scene.total.lost == ()


def test_a_hold_that_passed_while_a_turn_ran_on_it_is_ended_by_one_word() -> None:
    scene = Scene()
    scene.leave()
    scene.hold(5.0, exact=True)
    scene.begin()
    scene.wait(100.0)
    said = len(scene.engine.posts)
    assert scene.left() > 15.0
    scene.end()
    scene.wait(2.0)
    assert (scene.left(), len(scene.leases), scene.leases.next_at()) == (0, 0, math.inf)
    assert len(scene.engine.posts) == said + 1


def test_a_turn_of_a_moment_asks_for_nothing() -> None:
    scene = Scene()
    scene.leave()
    scene.wait(55.0)
    scene.begin()
    scene.wait(DELAY / 2)
    scene.end()
    scene.wait(100.0)
    assert scene.engine.posts == []


def test_a_turn_that_finds_its_lease_about_to_end_does_not_wait_for_the_beat() -> None:
    scene = Scene()
    first, second = scene.leave(), lease(2)
    scene.engine.ends[second.token] = scene.now + 5.0
    scene.begin(first)
    scene.wait(20.0)
    scene.engine.ends[second.token] = scene.now + 5.0
    scene.begin(second)
    scene.wait(1.0)
    assert scene.left(second) > 50.0


def test_renewals_of_one_engine_go_together() -> None:
    scene = Scene()
    for number in range(1, 101):
        scene.begin(scene.leave(lease(number)))
        scene.wait(0.5)
    scene.wait(600.0)
    assert len(scene.engine.posts) <= 650 / 20 + 1
    assert min(scene.left(lease(number)) for number in range(1, 101)) > 15.0


def test_more_than_a_batch_are_several() -> None:
    scene = Scene()
    many = [scene.leave(lease(number)) for number in range(2 * MAX_BATCH + 5)]
    for one in many:
        scene.begin(one)
    scene.wait(200.0)
    assert min(map(scene.left, many)) > 0
    for one in many:
        scene.leases.release(D, one, Why.ENDED, scene.now)
        scene.end(one)
    scene.wait(10.0)
    assert not any(map(scene.left, many))


def test_ends_that_wait_are_bounded() -> None:
    scene = Scene()
    scene.engine.deaf = True
    for number in range(MAX_ENDING + 10):
        scene.leases.release(D, lease(number), Why.EVICTED, scene.now)
    scene.engine.deaf = False
    scene.wait(30.0)
    assert len(scene.total.released) == MAX_ENDING


def test_a_heartbeat_that_is_set_is_kept_to_unless_a_lease_would_end() -> None:
    slow = Scene(heartbeat=25.0)
    slow.leave()
    slow.begin()
    slow.wait(1000.0)
    assert all(
        later - earlier >= 25.0 for earlier, later in zip(slow.engine.posts, slow.engine.posts[1:], strict=False)
    )
    assert slow.left() > 0
    late = Scene(heartbeat=1000.0)
    late.leave()
    late.begin()
    late.wait(500.0)
    assert late.left() > 15.0


def test_an_engine_that_says_nothing_is_asked_seldom_and_hears_all_when_it_is_back() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.engine.deaf = True
    scene.leases.release(D, lease(9), Why.EVICTED, scene.now)
    scene.wait(100.0)
    assert 3 <= len(scene.engine.posts) <= 14
    assert scene.total == Outcome()
    scene.engine.deaf = False
    scene.leave()
    scene.wait(15.0)
    assert (scene.total.renewed, scene.total.released) == (1, (Why.EVICTED,))
    assert scene.left() > 15.0


def test_a_process_that_is_gone_takes_its_promises_along() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.leases.release(D, lease(2), Why.EVICTED, scene.now)
    [holder] = [D]
    scene.now += 30.0
    batch = scene.leases.batch(holder, scene.now)
    assert batch is not None
    scene.leases.forget(D)
    assert (len(scene.leases), scene.leases.next_at()) == (0, math.inf)
    scene.begin(lease(3), ends=scene.now + 60.0)
    # The answer of the process before says nothing about those of this one.
    assert scene.leases.answered(D, batch, [0] * len(batch.items), scene.now) == Outcome()
    assert len(scene.leases) == 1
    scene.end()


def test_what_changes_while_a_batch_is_under_way() -> None:
    scene = Scene()
    scene.leave()
    scene.begin()
    scene.now += 30.0
    batch = scene.leases.batch(D, scene.now)
    assert batch is not None
    assert batch.items == ((ONE.token, 60),)
    assert scene.leases.due(scene.now + 100.0) == []
    scene.leases.release(D, ONE, Why.ENDED, scene.now)
    scene.end()
    scene.hold(600.0, lease(2))
    assert scene.leases.answered(D, batch, scene.engine.answer(batch, scene.now), scene.now) == Outcome()
    scene.wait(DELAY)
    assert scene.left() == 0


# -- any history, against a model --------------------------------------------------------------------
_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("leave"), st.integers(0, 3), st.sampled_from([6, 9, 60])),
        st.tuples(st.just("begin"), st.integers(0, 3), st.none()),
        st.tuples(st.just("end"), st.integers(0, 3), st.none()),
        st.tuples(st.just("tools"), st.integers(0, 3), st.integers(1, 200)),
        st.tuples(st.just("exactly"), st.integers(0, 3), st.integers(1, 200)),
        st.tuples(st.just("release"), st.integers(0, 3), st.none()),
        st.tuples(st.just("wait"), st.just(0), st.floats(0.0, 90.0)),
    ),
    max_size=40,
)


@dataclass
class Model:
    """What one lease should be: who has a right to it, in the simplest words."""

    lease: Lease
    turns: int = 0
    until: float = 0.0
    exact: bool = False
    over: bool = False
    since: float = 0.0
    """When the last turn on it ended."""


@settings(deadline=None, max_examples=300)
@given(ops=_OPS, heartbeat=st.sampled_from([0.0, 1.0, 15.0]))
def test_a_lease_holds_while_there_is_a_right_and_ends_when_it_is_ended(ops: list[Any], heartbeat: float) -> None:
    scene = Scene(heartbeat)
    models: dict[int, Model] = {}
    numbers = iter(range(1, 1000))
    for verb, slot, value in ops:
        model = models.get(slot)
        if verb == "leave" and (model is None or not model.turns):
            models[slot] = Model(scene.leave(lease(next(numbers), value)))
        elif verb == "wait":
            before = scene.now
            scene.wait(value)
            for one in models.values():
                check(scene, one, before)
        elif model is None:
            continue
        elif model.over and verb != "end":
            assert verb == "leave" or not scene.hold(90.0, model.lease)
        elif verb == "begin" and scene.left(model.lease) > 1.0:
            scene.begin(model.lease)
            model.turns += 1
        elif verb == "end" and model.turns:
            scene.end(model.lease)
            model.turns -= 1
            model.since = scene.now
        elif verb in ("tools", "exactly") and scene.left(model.lease) > 1.0:
            assert scene.hold(value, model.lease, exact=verb == "exactly")
            model.until, model.exact = scene.now + value, verb == "exactly"
        elif verb == "release":
            scene.leases.release(D, model.lease, Why.SUPERSEDED, scene.now)
            model.over = True
    assert scene.total.lost == ()
    for model in models.values():
        while model.turns:
            scene.end(model.lease)
            model.turns -= 1
    scene.wait(HOUR)
    assert (scene.leases.next_at(), len(scene.leases), scene.leases._engines) == (math.inf, 0, {})
    assert not any(scene.left(model.lease) for model in models.values())


def check(scene: Scene, model: Model, before: float) -> None:
    """What must hold now that time has passed since `before`."""
    left = scene.left(model.lease)
    if model.turns:
        assert left > 0
    elif model.over:
        assert left == 0 or scene.now - before < DELAY
    elif scene.now < model.until:
        assert left > 0
    else:
        assert left <= model.lease.seconds + 1e-6
        if model.exact and scene.now > max(model.until, model.since, before) + 2.0:
            assert left == 0
