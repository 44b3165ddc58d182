"""When an engine that keeps failing gets work: not while open, one trial after it, and never "never again"."""

from __future__ import annotations

import pytest

from pd_router.core.breaker import FAILURES_TO_OPEN, MAX_OPEN_SECONDS, OPEN_SECONDS, TRIAL_SECONDS, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows(now)
        breaker.sent(now)
        breaker.failed(now)
    return breaker


def test_it_opens_and_allows_one_trial_when_the_time_is_over() -> None:
    breaker = opened()
    assert not breaker.allows(OPEN_SECONDS - 0.1)
    assert breaker.allows(OPEN_SECONDS)
    breaker.sent(OPEN_SECONDS)
    assert not breaker.allows(OPEN_SECONDS)


def test_a_good_trial_closes_it() -> None:
    breaker = opened()
    breaker.sent(OPEN_SECONDS)
    breaker.succeeded()
    breaker.sent(OPEN_SECONDS)
    assert breaker.allows(OPEN_SECONDS)


def test_each_bad_trial_opens_it_for_longer_up_to_a_limit() -> None:
    breaker, now = opened(), 0.0
    for wait in (OPEN_SECONDS, 2 * OPEN_SECONDS, 4 * OPEN_SECONDS, 8 * OPEN_SECONDS, MAX_OPEN_SECONDS):
        assert not breaker.allows(now + wait - 0.1)
        now += wait
        assert breaker.allows(now)
        breaker.sent(now)
        breaker.failed(now)


@pytest.mark.parametrize("end", [Breaker.abandoned, Breaker.succeeded])
def test_a_trial_without_a_verdict_may_be_made_again(end: object) -> None:
    breaker = opened()
    breaker.sent(OPEN_SECONDS)
    assert callable(end)
    end(breaker)
    assert breaker.allows(OPEN_SECONDS)


def test_a_trial_that_nobody_reports_on_does_not_close_the_engine_for_ever() -> None:
    breaker = opened()
    breaker.sent(OPEN_SECONDS)
    assert not breaker.allows(OPEN_SECONDS + TRIAL_SECONDS - 0.1)
    assert breaker.allows(OPEN_SECONDS + TRIAL_SECONDS)
    breaker.sent(OPEN_SECONDS + TRIAL_SECONDS)
    assert not breaker.allows(OPEN_SECONDS + TRIAL_SECONDS)
