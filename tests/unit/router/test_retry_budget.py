"""Retries are a share of turns in the long run, and a burst when the budget is full (RP-16)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.retry_budget import BURST, RetryBudget


def test_a_full_budget_allows_a_burst() -> None:
    budget = RetryBudget(0.2)
    assert sum(budget.take() for _ in range(200)) == BURST


@pytest.mark.parametrize(("share", "expected"), [(0.5, 500), (0.2, 200), (1.0, 1000)])
def test_what_lasts_is_retried_at_its_share(share: float, expected: int) -> None:
    budget = RetryBudget(share)
    retried = 0
    for _ in range(1000):
        budget.turn()
        retried += budget.take()
    assert abs(retried - expected) <= BURST


def test_none() -> None:
    budget = RetryBudget(0.0)
    budget.turn()
    assert not budget.take()


@settings(deadline=None)
@given(st.floats(0.01, 1.0), st.lists(st.booleans(), max_size=300))
def test_it_stays_within_its_bounds(share: float, steps: list[bool]) -> None:
    budget = RetryBudget(share)
    for turn in steps:
        if turn:
            budget.turn()
        else:
            budget.take()
        assert 0.0 <= budget.left <= BURST
