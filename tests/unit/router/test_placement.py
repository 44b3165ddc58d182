"""Which engine serves a turn, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.placement import Engine, Loads, choose_decode, choose_prefill, choose_rank, rank_key, shunned


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


def test_an_engine_whose_breaker_is_open_is_named_as_that() -> None:
    failing = Engine("a", "http://a", "decode", "g1", "1", True, failing=True)
    choice = choose_decode([failing, B], Loads(), "a", 4)
    assert (choice.engine, dict(choice.rejected)) == (B, {"a": "failing: its breaker is open"})


@pytest.mark.parametrize(
    ("out", "holder", "chosen", "reason"),
    [
        ("", "a", "a", "holder"),
        ("a", "a", "b", "holder not available"),
        ("a", None, "b", "least loaded"),
        ("ab", "a", "a", "holder"),
        ("ab", None, "a", "least loaded"),
    ],
)
def test_decode_engines_that_nobody_can_hand_over_to_are_the_last_resort(
    out: str, holder: str | None, chosen: str, reason: str
) -> None:
    choice = choose_decode([A, B], Loads(), holder, 4, None, frozenset(out))
    assert (choice.engine.key if choice.engine else None, choice.reason) == (chosen, reason)
    named = {key for key, why in choice.rejected if why == "quarantined with every prefill engine"}
    assert named == (set(out) if chosen not in out else set())


P, Q, R = engine("p"), engine("q"), engine("r", "g2")


@pytest.mark.parametrize(
    ("blocked", "expected"),
    [
        (set(), set()),
        ({("p", "a")}, set()),
        ({("p", "a"), ("q", "a")}, {"a"}),
        ({("p", "a"), ("q", "b")}, set()),
        ({("r", "c")}, {"c"}),
    ],
)
def test_shunned(blocked: set[tuple[str, str]], expected: set[str]) -> None:
    assert shunned([A, B, C], [P, Q, R], frozenset(blocked)) == expected


def test_an_engine_that_takes_no_work_is_no_way_out() -> None:
    down = Engine("q", "", "prefill", "g1", "1", False)
    assert shunned([A], [P, down], frozenset({("p", "a")})) == {"a"}


@pytest.mark.parametrize(
    ("no_handoff", "no_pull", "chosen", "reason"),
    [
        ("", "", "p", "least outstanding tokens"),
        ("p", "", "q", "least outstanding tokens"),
        ("", "p", "q", "least outstanding tokens"),
        ("", "pq", "p", "no pair that can pull"),
        ("q", "p", "p", "no pair that can pull"),
        ("pq", "", "p", "all pairs are in quarantine"),
        ("pq", "p", "q", "all pairs are in quarantine"),
    ],
)
def test_pairs_in_quarantine_are_used_only_when_there_is_nothing_better(
    no_handoff: str, no_pull: str, chosen: str, reason: str
) -> None:
    choice = choose_prefill([P, Q], loaded(q=1), "g1", frozenset(no_handoff), frozenset(no_pull))
    assert (choice.engine.key if choice.engine else None, choice.reason) == (chosen, reason)
    other = "q" if chosen == "p" else "p"
    expected = {"p": "hand-off" if other in no_handoff else "pull"}
    shows = reason != "all pairs are in quarantine" and other in no_handoff + no_pull
    if reason == "no pair that can pull" and other not in no_handoff:
        shows = False
    assert dict(choice.rejected) == ({other: f"pair in quarantine: {expected['p']}"} if shows else {})


@pytest.mark.parametrize(
    ("rank", "turns", "ranks", "pinned"),
    [
        (None, {}, {0, 1}, None),
        (1, {}, {0, 1}, 1),
        (1, {1: 4}, {0, 1}, 1),
        (1, {1: 5}, {0, 1}, None),
        (1, {1: 9, 0: 5}, {0, 1}, 1),
        (0, {1: 9}, {0, 1}, 0),
        (1, {}, {1}, None),
        (0, {}, {0}, None),
        (5, {}, {4, 5, 6}, None),
        (1, {}, set(), None),
    ],
)
def test_a_turn_goes_back_to_its_rank_within_the_bound(
    rank: int | None, turns: dict[int, int], ranks: set[int], pinned: int | None
) -> None:
    loads = Loads()
    for number, count in turns.items():
        for _ in range(count):
            loads.open(rank_key("d", number))
    assert choose_rank("d", rank, ranks, loads, 4) == pinned


def test_an_engine_that_left_takes_its_ranks_along() -> None:
    loads = Loads()
    loads.open(rank_key("d", 1))
    loads.open("d2")
    loads.forget("d")
    assert (loads.turns(rank_key("d", 1)), loads.turns("d2")) == (0, 1)
