"""The made-up trace has the published figures that it is drawn from, and is the same for the same seed."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest

from pdctl.core.coding_agents import Crowd, make_trace
from pdctl.core.kv_trace import Turn, format_trace, parse_trace

CROWD = Crowd(clients=64, seconds=4 * 3600)


def draw_turns(crowd: Crowd = CROWD, seed: int = 7) -> list[Turn]:
    return [turn for turns in make_trace(crowd, random.Random(seed).random) for turn in turns]


@pytest.fixture(scope="module")
def turns() -> list[Turn]:
    return draw_turns()


def below(values: list[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values)


def test_the_same_seed_gives_the_same_turns(turns: list[Turn]) -> None:
    assert draw_turns() == turns
    assert draw_turns(seed=8) != turns


def test_users_wait_as_published(turns: list[Turn]) -> None:
    waits = [turn.wait_s for turn in turns if not turn.after_tool and turn.wait_s]
    assert len(waits) > 1000
    assert below(waits, 84) == pytest.approx(0.5, abs=0.03)
    assert below(waits, 300) == pytest.approx(0.75, abs=0.03)
    assert below(waits, 1236) == pytest.approx(0.9, abs=0.03)
    assert max(waits) == pytest.approx(3600)


def test_tools_take_as_long_as_published(turns: list[Turn]) -> None:
    waits = [turn.wait_s for turn in turns if turn.after_tool]
    assert len(waits) > 9000
    assert below(waits, 0.3) == pytest.approx(0.5, abs=0.02)
    assert below(waits, 60) == pytest.approx(0.96, abs=0.01)
    # Not put in but known: 18.4 s on average.
    assert fmean(waits) == pytest.approx(18.4, rel=0.2)


def test_model_calls_per_request_and_lengths_as_published(turns: list[Turn]) -> None:
    tool_steps = sum(turn.after_tool for turn in turns)
    assert tool_steps / (len(turns) - tool_steps) == pytest.approx(7.8, rel=0.15)
    assert median(turn.reply_tokens for turn in turns) == pytest.approx(214, rel=0.05)
    assert fmean(turn.reply_tokens for turn in turns) == pytest.approx(523, rel=0.1)


def test_no_prompt_and_answer_is_longer_than_the_agent_allows() -> None:
    crowd = Crowd(clients=20, seconds=7200, max_tokens=32_768)
    turns = draw_turns(crowd)
    assert max(turn.tokens for turn in turns) <= 32_768
    later = [turn for turn in turns if turn.wait_s]
    assert any(turn.fresh for turn in later)
    assert sum(turn.fresh for turn in later) < len(later) / 5


def test_waits_are_stretched_to_another_median() -> None:
    waits = [turn.wait_s for turn in draw_turns(Crowd(64, 4 * 3600, human_wait_s=8.4)) if not turn.after_tool]
    assert below([wait for wait in waits if wait], 8.4) == pytest.approx(0.5, abs=0.03)


def test_single_turns_come_at_the_asked_rate() -> None:
    clients = make_trace(Crowd(4, 3600, singles_per_min=30), random.Random(3).random)
    singles = clients[4:]
    assert len(singles) == pytest.approx(30 * 60, rel=0.1)
    assert all(len(turns) == 1 for turns in singles)
    assert all(turns[0].not_before_s <= 3600 for turns in singles)


def test_it_can_be_written_and_read() -> None:
    clients = make_trace(Crowd(3, 1800, singles_per_min=1), random.Random(5).random)
    read = parse_trace(format_trace(clients))
    assert [[turn.tokens for turn in turns] for turns in read] == [[turn.tokens for turn in turns] for turns in clients]
    assert [[turn.fresh for turn in turns] for turns in read] == [[turn.fresh for turn in turns] for turns in clients]
