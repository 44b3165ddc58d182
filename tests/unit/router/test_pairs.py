"""Which pairs of engines get transfers (EL-04): three failures in a row, a probe, a direction each, a new process."""

from __future__ import annotations

from pd_router.core.breaker import FAILURES_TO_OPEN
from pd_router.core.pairs import LONGEST, Direction, Pair, Pairs

QUARANTINE = 30.0

HANDOFF = Pair("p1", "d1", Direction.HANDOFF)
PULL = Pair("p1", "d1", Direction.PULL)


def allows(pairs: Pairs, pair: Pair, now: float) -> bool:
    return (pair.prefill, pair.decode) not in pairs.blocked(pair.direction, now)


def broken(pair: Pair = HANDOFF, now: float = 0.0) -> Pairs:
    pairs = Pairs(QUARANTINE)
    for _ in range(FAILURES_TO_OPEN):
        assert allows(pairs, pair, now)
        pairs.sent(pair, now)
        pairs.failed(pair, now)
    return pairs


def test_a_pair_that_fails_is_blocked_and_nothing_else_is() -> None:
    pairs = broken()
    assert not allows(pairs, HANDOFF, 1.0)
    assert pairs.blocked(Direction.HANDOFF, 1.0) == {("p1", "d1")}
    assert pairs.blocked(Direction.PULL, 1.0) == frozenset()
    for other in (PULL, Pair("p1", "d2", Direction.HANDOFF), Pair("p2", "d1", Direction.HANDOFF)):
        assert allows(pairs, other, 1.0)


def test_one_real_turn_probes_it_when_the_time_is_over() -> None:
    pairs, now = broken(), QUARANTINE
    assert pairs.blocked(Direction.HANDOFF, now) == frozenset()
    probe = pairs.sent(HANDOFF, now)
    assert pairs.blocked(Direction.HANDOFF, now) == {("p1", "d1")}
    pairs.abandoned(HANDOFF, probe)
    assert allows(pairs, HANDOFF, now)
    pairs.sent(HANDOFF, now)
    pairs.succeeded(HANDOFF)
    assert allows(pairs, HANDOFF, now)
    assert not pairs


def test_bad_probes_make_it_longer_up_to_a_limit() -> None:
    pairs, now = broken(), 0.0
    for wait in (30.0, 60.0, 120.0, 240.0, 480.0, LONGEST * QUARANTINE, LONGEST * QUARANTINE):
        assert not allows(pairs, HANDOFF, now + wait - 0.1)
        now += wait
        pairs.failed(HANDOFF, now, pairs.sent(HANDOFF, now))


def test_a_success_in_between_begins_anew_and_leaves_nothing() -> None:
    pairs = Pairs(QUARANTINE)
    for _ in range(5):
        pairs.failed(HANDOFF, 0.0)
        pairs.failed(HANDOFF, 0.0)
        pairs.succeeded(HANDOFF)
    assert allows(pairs, HANDOFF, 0.0)
    assert not pairs
    pairs.abandoned(HANDOFF, pairs.sent(HANDOFF, 0.0))
    assert not pairs


def test_a_new_process_on_either_side_is_a_new_pair() -> None:
    for key in ("p1", "d1"):
        pairs = broken()
        pairs.failed(PULL, 0.0)
        pairs.forget("p2")
        assert len([*pairs.tripped()]) == 1
        pairs.forget(key)
        assert not pairs
