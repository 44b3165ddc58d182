"""Which engine serves a turn, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.placement import Engine, Loads, choose_decode, choose_prefill


def engine(
    key: str, generation: str = "g1", ready: bool = True, draining: bool = False, role: str = "decode"
) -> Engine:
    return Engine(key, f"http://{key}", role, generation, "1", ready, draining)


def loaded(**turns: int) -> Loads:
    loads = Loads()
    for key, count in turns.items():
        for _ in range(count):
            loads.open(key, 100)
    return loads


A, B, C = engine("a"), engine("b"), engine("c", "g2")
DOWN, DRAINING = engine("a", ready=False), engine("a", draining=True)

DECODE: list[tuple[str, list[Engine], dict[str, int], str | None, frozenset[str] | None, str | None, str]] = [
    ("nobody", [], {}, None, None, None, "no decode engine is ready"),
    ("nobody ready", [DOWN], {}, "a", None, None, "no decode engine is ready"),
    ("one", [A], {"a": 9}, None, None, "a", "least loaded"),
    ("least loaded", [A, B], {"a": 2, "b": 1}, None, None, "b", "least loaded"),
    ("holder", [A, B], {"a": 2, "b": 1}, "a", None, "a", "holder"),
    ("holder at the bound", [A, B], {"a": 5, "b": 1}, "a", None, "a", "holder"),
    ("holder over the bound", [A, B], {"a": 6, "b": 1}, "a", None, "b", "holder too busy"),
    ("holder busy alone", [A], {"a": 99}, "a", None, "a", "holder"),
    ("holder busy, rest other generation", [A, C], {"a": 99}, "a", None, "a", "holder"),
    ("holder down", [DOWN, B], {}, "a", None, "b", "holder not available"),
    ("holder draining", [DRAINING, B], {}, "a", None, "b", "holder not available"),
    ("holder unknown", [B], {}, "z", None, "b", "holder not available"),
    ("generation with prefill only", [A, C], {"a": 0, "c": 5}, None, frozenset({"g2"}), "c", "least loaded"),
    ("holder without prefill", [A, C], {}, "a", frozenset({"g2"}), "c", "holder not available"),
    ("no generation with prefill", [A, C], {}, None, frozenset(), None, "no decode engine is ready"),
]


@pytest.mark.parametrize(("name", "engines", "turns", "holder", "generations", "chosen", "reason"), DECODE)
def test_decode(
    name: str,
    engines: list[Engine],
    turns: dict[str, int],
    holder: str | None,
    generations: frozenset[str] | None,
    chosen: str | None,
    reason: str,
) -> None:
    choice = choose_decode(engines, loaded(**turns), holder, 4, generations)
    assert (choice.engine.key if choice.engine else None) == chosen
    assert choice.reason == reason


PREFILL: list[tuple[list[Engine], dict[str, int], str | None]] = [
    ([], {}, None),
    ([A, B], {"a": 1}, "b"),
    ([A, B], {"b": 1}, "a"),
    ([A, C], {"a": 9}, "a"),
    ([C], {}, None),
    ([DOWN, B], {"b": 50}, "b"),
    ([DRAINING], {}, None),
]


@pytest.mark.parametrize(("engines", "turns", "chosen"), PREFILL)
def test_prefill(engines: list[Engine], turns: dict[str, int], chosen: str | None) -> None:
    choice = choose_prefill(engines, loaded(**turns), "g1")
    assert (choice.engine.key if choice.engine else None) == chosen


def test_every_engine_that_was_passed_over_has_a_reason() -> None:
    engines = [engine("a", ready=False), engine("b", draining=True), engine("c", "g2"), engine("d"), engine("e")]
    choice = choose_decode(engines, loaded(d=9), "d", 4)
    assert dict(choice.rejected) == {"a": "not ready", "b": "draining", "c": "other generation", "d": "too busy"}
    assert dict(choose_prefill(engines, Loads(), "g2").rejected) == {
        "a": "not ready",
        "b": "draining",
        "d": "other generation",
        "e": "other generation",
    }


def test_outstanding_tokens_count_not_turns() -> None:
    loads = Loads()
    loads.open("a", 10_000)
    for _ in range(3):
        loads.open("b", 100)
    choice = choose_prefill([A, B], loads, "g1")
    assert choice.engine is B


def test_equals_take_turns() -> None:
    loads, seen = Loads(), []
    for _ in range(6):
        choice = choose_decode([A, B, engine("d")], loads, None, 4)
        assert choice.engine is not None
        seen.append(choice.engine.key)
        loads.open(choice.engine.key).close()
    assert seen == ["a", "b", "d"] * 2


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 99), st.integers(0, 3)), max_size=30))
def test_leases_balance_however_often_they_are_closed(opened: list[tuple[str, int, int]]) -> None:
    loads = Loads()
    leases: list[Any] = []
    for key, tokens, _ in opened:
        leases.append(loads.open(key, tokens))
    for lease, (_, _, times) in zip(leases, opened, strict=True):
        for _ in range(times):
            lease.close()
    still = [(key, tokens) for key, tokens, times in opened if times == 0]
    for key in "ab":
        assert loads.turns(key) == sum(other == key for other, _ in still)
        assert loads.tokens(key) == sum(tokens for other, tokens in still if other == key)


def test_an_engine_that_left_is_forgotten_and_its_leases_do_no_harm() -> None:
    loads = Loads()
    lease = loads.open("a", 5)
    loads.forget("a")
    assert (loads.turns("a"), loads.tokens("a"), loads.opened("a")) == (0, 0, 0)
    lease.close()
    assert loads.turns("a") == 0
