"""The trace file: what is read, what is written, and which lines are refused with which words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.core.kv_trace import TraceError, Turn, format_trace, parse_trace, reusable_tokens

TWO = [
    '{"session_id": "a", "timestamp": 1500, "input_length": 100, "output_length": 20, "hash_ids": [1, 2]}',
    "",
    '{"session_id": "b", "input_length": 7, "output_length": 3}',
    '{"session_id": "a", "delay": 250, "input_length": 150, "output_length": 10, "tool": true}',
]


def test_turns_are_put_together_by_session() -> None:
    first, second = parse_trace(TWO)
    assert first == [
        Turn(100, 20, not_before_s=1.5, fresh=True),
        Turn(150, 10, wait_s=0.25, after_tool=True),
    ]
    assert second == [Turn(7, 3, fresh=True)]


def test_lines_without_a_session_are_conversations_of_one_turn() -> None:
    line = '{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [0, 1, 2]}'
    assert parse_trace([line, line]) == [[Turn(655, 52, fresh=True)]] * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ('{"output_length": 1}', "line 2: input_length must be a whole number of tokens, at least 1"),
        ('{"input_length": true, "output_length": 1}', "line 2: input_length must be"),
        ('{"input_length": 1, "output_length": 0}', "line 2: output_length must be"),
        ('{"input_length": 1, "output_length": 1, "delay": -1}', "line 2: delay must be milliseconds"),
        ('{"input_length": 1, "output_length": 1, "timestamp": NaN}', "line 2: timestamp must be milliseconds"),
        ('{"input_length": 1, "output_length": 1, "tool": 1}', "line 2: tool must be true or false"),
        ('{"session_id": [], "input_length": 1, "output_length": 1}', "line 2: session_id must be"),
        ('{"session_id": "a", "input_length": 1, "output_length": 1}', "line 2: needs delay or timestamp"),
    ],
    ids=["json", "object", "no-input", "bool-input", "no-output", "delay", "nan", "tool", "session", "no-time"],
)
def test_a_line_that_is_no_turn_is_named(line: str, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace([TWO[0], line])
    assert str(caught.value).startswith(says)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(TraceError, match="no turn"):
        parse_trace(["\n"])


milliseconds = st.integers(0, 10_000_000).map(lambda value: value / 1000)
turns = st.builds(
    Turn,
    prompt_tokens=st.integers(1, 1000),
    reply_tokens=st.integers(1, 1000),
    wait_s=milliseconds,
    not_before_s=milliseconds,
    after_tool=st.booleans(),
    fresh=st.booleans(),
)


@given(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_is_written_is_read_back(clients: list[list[Turn]]) -> None:
    clients = [
        [Turn(**{**{name: getattr(first, name) for name in Turn.__slots__}, "fresh": True}), *rest]
        for first, *rest in clients
    ]
    lines = list(format_trace(clients))
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert parse_trace(lines) == clients


@pytest.mark.parametrize(
    ("before", "turn", "tokens"),
    [
        (None, Turn(100, 1), 0),
        (Turn(100, 20), Turn(150, 1), 120),
        (Turn(100, 20), Turn(110, 1), 110),
        (Turn(100, 20), Turn(99, 1), 0),
        (Turn(100, 20), Turn(150, 1, fresh=True), 0),
    ],
    ids=["first", "grown", "reasoning-dropped", "rewritten", "fresh"],
)
def test_what_the_turn_before_left(before: Turn | None, turn: Turn, tokens: int) -> None:
    assert reusable_tokens(before, turn) == tokens
