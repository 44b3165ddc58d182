"""When a turn ended, as text that survives any JSON reader."""

from __future__ import annotations

from typing import Any

import pytest

from pd_wire.moment import MAX_COUNT, Moment, parse

EPOCH = "0123456789abcdef"


@pytest.mark.parametrize("count", [0, 1, 1 << 53, MAX_COUNT])
def test_what_is_written_is_read(count: int) -> None:
    assert parse(str(Moment(EPOCH, count))) == Moment(EPOCH, count)


@pytest.mark.parametrize(
    "value",
    [None, 7, "", EPOCH, f"{EPOCH}-", f"{EPOCH}-g", f"{EPOCH.upper()}-1", f"{EPOCH}-{'f' * 16}", f"{EPOCH}-1\n", ["x"]],
)
def test_anything_else_is_none(value: Any) -> None:
    assert parse(value) is None
