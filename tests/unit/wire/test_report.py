"""The report: what P says arrives at the router as it was, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_wire.report import Report, Verdict, parse

COUNTS = st.integers(0, 1 << 24)


@given(st.builds(Report, st.sampled_from(Verdict), st.text(), COUNTS, COUNTS, COUNTS))
def test_a_report_survives_the_wire(report: Report) -> None:
    assert parse(json.loads(json.dumps(report.as_json()))) == report


@pytest.mark.parametrize(
    "value", [None, 7, [], {}, {"verdict": "proven"}, {**Report(Verdict.PROVEN, "", 1, 2, 3).as_json(), "verdict": "x"}]
)
def test_unknown_is_not_zero(value: object) -> None:
    assert parse(value) is None
