"""When an engine that keeps failing gets work: not while open, one trial after it, and never "never again"."""

from __future__ import annotations

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
        breaker.failed(now, trial=breaker.sent(now))


def test_a_trial_without_a_verdict_may_be_made_again() -> None:
    breaker = opened()
    breaker.abandoned(breaker.sent(OPEN_SECONDS))
    assert breaker.allows(OPEN_SECONDS)


def test_only_who_is_the_trial_ends_it() -> None:
    breaker = opened()
    first = breaker.sent(OPEN_SECONDS)
    breaker.abandoned(first)
    second = breaker.sent(OPEN_SECONDS)
    breaker.abandoned(None)
    breaker.abandoned(first)
    assert not breaker.allows(OPEN_SECONDS)
    breaker.abandoned(second)
    assert breaker.allows(OPEN_SECONDS)


def test_what_is_sent_beside_a_trial_does_not_become_it() -> None:
    breaker = opened()
    trial = breaker.sent(OPEN_SECONDS)
    assert trial is not None
    assert breaker.sent(OPEN_SECONDS) is None
    assert breaker.trial is trial


def test_a_trial_that_nobody_reports_on_does_not_close_the_engine_for_ever() -> None:
    breaker = opened()
    breaker.sent(OPEN_SECONDS)
    assert not breaker.allows(OPEN_SECONDS + TRIAL_SECONDS - 0.1)
    assert breaker.allows(OPEN_SECONDS + TRIAL_SECONDS)
    breaker.sent(OPEN_SECONDS + TRIAL_SECONDS)
    assert not breaker.allows(OPEN_SECONDS + TRIAL_SECONDS)


def test_many_failures_at_one_moment_open_it_for_no_longer_than_three() -> None:
    breaker = opened()
    for _ in range(40):
        breaker.failed(0.5)
    assert breaker.allows(OPEN_SECONDS)


def test_failures_with_one_partner_do_not_open_it() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.failed(0.0, "p1")
    assert breaker.allows(0.0)
    breaker.failed(0.0, "p2")
    assert not breaker.allows(0.0)


def test_failures_with_a_partner_and_its_own_open_it() -> None:
    breaker = Breaker()
    for partner in ("p1", "", "p1"):
        breaker.failed(0.0, partner)
    assert not breaker.allows(0.0)


def test_a_success_forgets_the_partners() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.failed(0.0, "p1")
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(0.0, "p2")
    assert breaker.allows(0.0)


def test_its_state_in_words() -> None:
    breaker = opened()
    assert [breaker.state(0.0), breaker.state(OPEN_SECONDS)] == ["open", "half_open"]
    breaker.succeeded()
    assert breaker.state(OPEN_SECONDS) == "closed"
