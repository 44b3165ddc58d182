"""A fresh cluster in memory for each test of the operator."""

from __future__ import annotations

import pytest

from support.operator_bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A fresh cluster."""
    return Bench()
