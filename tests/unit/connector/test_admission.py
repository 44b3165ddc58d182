"""Which handle may be pulled, and what vLLM gets to see of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.core.admission import Admission, Engine, Leg, Prompt, admit, leg_of
from pd_connector.core.spent import SpentHandles
from pd_wire import proof
from pd_wire.report import Verdict

BLOCK = 4
ENGINE = Engine(block_tokens=BLOCK, groups=1)
TURN = list(range(100, 123))
NEXT = [*TURN, *range(500, 520)]


def handle(tokens: list[int] = TURN, groups: int = 1, **changes: Any) -> dict[str, Any]:
    """What a decode engine returns for a turn whose computed tokens are ``tokens``, as the router sends it."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(10, 10 - (-len(tokens) // BLOCK))) for _ in range(groups)],
        "remote_engine_id": "holder",
        "remote_request_id": "turn",
        "remote_host": "10.0.0.9",
        "remote_port": 5600,
        "remote_num_tokens": len(tokens),
        "remote_blocks_expiry_time": 99.0,
        "tp_size": 1,
        "unknown_key": {"kept": True},
        "pd_proof": proof.encode(proof.prove(tokens, BLOCK, bytes(16))),
        "pd_mode": "Pinned",
        **changes,
    }


def judge(raw: Any, tokens: list[int] = NEXT, engine: Engine = ENGINE, **prompt: Any) -> Admission:
    return admit(raw, Prompt(tokens=tokens, **prompt), engine, SpentHandles())


def test_a_continuation_offers_its_whole_blocks() -> None:
    decision = judge(handle())
    assert (decision.verdict, decision.proven_tokens, decision.may_pull) == (Verdict.PROVEN, 20, True)
    assert decision.params is not None
    assert decision.params["remote_block_ids"] == [[10, 11, 12, 13, 14]]
    assert decision.params["remote_num_tokens"] == 20
    # vLLM's keys pass as they came, ours don't reach it.
    assert decision.params["unknown_key"] == {"kept": True}
    assert decision.params["remote_blocks_expiry_time"] == 99.0
    assert not [key for key in decision.params if key.startswith("pd_")]


def test_declining_later_leaves_the_address_and_no_blocks() -> None:
    decision = judge(handle())
    assert decision.declined is not None
    assert decision.notify
    assert (decision.declined["remote_block_ids"], decision.declined["remote_num_tokens"]) == ([], 0)
    assert decision.declined["remote_request_id"] == "turn"


@given(
    common=st.integers(0, 40),
    theirs=st.lists(st.integers(0, 3), max_size=30),
    mine=st.lists(st.integers(0, 3), max_size=30),
)
def test_what_is_offered_is_equal_token_by_token(common: int, theirs: list[int], mine: list[int]) -> None:
    there, here = [*range(50, 50 + common), *theirs], [*range(50, 50 + common), *mine]
    if not there:
        return
    decision = judge(handle(there), here)
    offered = decision.proven_tokens
    assert there[:offered] == here[:offered]
    assert offered % BLOCK == 0
    if decision.may_pull:
        assert decision.params is not None
        assert decision.params["remote_num_tokens"] == offered <= len(here)
        assert len(decision.params["remote_block_ids"][0]) * BLOCK == offered
        next_block = slice(offered, offered + BLOCK)
        whole = min(len(there), len(here)) >= offered + BLOCK
        assert not whole or there[next_block] != here[next_block]
    else:
        assert decision.notify
        assert offered == 0


@pytest.mark.parametrize("length", range(4, 24))
def test_a_shorter_prompt_is_proven_as_far_as_it_goes(length: int) -> None:
    decision = judge(handle(), TURN[:length])
    assert decision.verdict is Verdict.PROVEN
    assert decision.proven_tokens == min(length, 20) // BLOCK * BLOCK


def test_an_edit_trims() -> None:
    decision = judge(handle(), [*TURN[:9], 0, *TURN[10:], 7])
    assert (decision.verdict, decision.proven_tokens) == (Verdict.TRIMMED, 8)
    assert "2 of 5 blocks" in decision.reason


def test_a_turn_shorter_than_a_block_offers_nothing() -> None:
    assert judge(handle(TURN[:3])).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pd_proof": None}, "proof must be an object"),
        ({"pd_mode": "Kept"}, "pd_mode is neither Pinned nor Unpinned nor Leased"),
        ({"pd_proof": proof.encode(proof.prove(TURN, 8, bytes(16)))}, "block sizes differ"),
        ({"pd_proof": proof.encode(proof.prove(TURN, BLOCK, bytes(16), b"adapter"))}, "no block holds"),
    ],
)
def test_unproven_is_told_apart(changes: dict[str, Any], words: str) -> None:
    decision = judge(handle(**changes))
    assert (decision.verdict, decision.may_pull, decision.notify) == (Verdict.UNPROVEN, False, True)
    assert words in decision.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": [1, 2, 3]},
        {"remote_block_ids": [[1, 2]]},
        {"remote_block_ids": [[1] * 7]},
        {"remote_block_ids": [[1] * 6, [1] * 6]},
        {"remote_blocks_expiry_time": None},
        {"remote_num_tokens": "23"},
    ],
)
def test_malformed_still_releases_a_holder_that_can_be_reached(changes: dict[str, Any]) -> None:
    decision = judge(handle(**changes))
    assert (decision.verdict, decision.may_pull, decision.notify) == (Verdict.MALFORMED, False, True)
    assert decision.params is not None
    assert decision.params["remote_block_ids"] == []


@pytest.mark.parametrize("changes", [{"remote_port": "x"}, {"remote_host": None}, {"tp_size": [1]}])
def test_nobody_is_notified_at_a_broken_address(changes: dict[str, Any]) -> None:
    decision = judge(handle(**changes))
    assert (decision.verdict, decision.notify) == (Verdict.MALFORMED, False)
    assert decision.params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "unknown_key": {"kept": True},
        "tp_size": changes.get("tp_size", 1),
    }


def test_obstacles_come_before_the_proof() -> None:
    off = Engine(BLOCK, 1, pull_obstacle="flag off")
    spread = Engine(BLOCK, 1, proof_obstacle="spread over ranks")
    for decision, words in (
        (judge(handle(), engine=off), "flag off"),
        (judge(handle(), engine=spread), "spread over ranks"),
        (judge(handle(), obstacle="media"), "media"),
    ):
        assert (decision.verdict, decision.reason, decision.notify) == (Verdict.UNPROVEN, words, True)


def test_a_handle_is_used_once() -> None:
    spent = SpentHandles()
    first = admit(handle(), Prompt(NEXT), ENGINE, spent)
    second = admit(handle(), Prompt(NEXT), ENGINE, spent)
    assert first.may_pull
    assert (second.verdict, second.may_pull, second.notify) == (Verdict.UNPROVEN, False, False)
    assert "used the handle before" in second.reason


class TestSeveralGroups:
    """All or nothing: a window or state group can't be cut."""

    engine = Engine(BLOCK, groups=2)

    def test_every_token_equal_is_taken_whole(self) -> None:
        decision = judge(handle(groups=2), engine=self.engine)
        assert (decision.verdict, decision.proven_tokens) == (Verdict.PROVEN, 23)
        assert decision.params is not None
        assert decision.params["remote_block_ids"] == handle(groups=2)["remote_block_ids"]

    @pytest.mark.parametrize(
        "tokens",
        [[*TURN[:22], 0, *NEXT[23:]], TURN, TURN[:20], [0, *NEXT[1:]]],
        ids=["last token differs", "prompt ends with the blocks", "prompt ends before", "first token differs"],
    )
    def test_anything_less_is_nothing(self, tokens: list[int]) -> None:
        decision = judge(handle(groups=2), tokens, self.engine)
        assert (decision.verdict, decision.proven_tokens, decision.notify) == (Verdict.UNPROVEN, 0, True)

    def test_a_proof_that_does_not_reach_the_end_is_nothing(self) -> None:
        shorter = proof.encode(proof.prove(TURN[:20], BLOCK, bytes(16)))
        assert not judge(handle(groups=2, pd_proof=shorter), engine=self.engine).may_pull


def prefill_handle(tokens: int, **changes: Any) -> dict[str, Any]:
    raw = handle(list(range(tokens)), do_remote_decode=False, do_remote_prefill=True)
    del raw["remote_blocks_expiry_time"], raw["pd_proof"], raw["pd_mode"]
    return {**raw, **changes}


class TestDecodeLeg:
    """D and a prefill engine's handle."""

    def test_a_fitting_handle_passes_as_it_came(self) -> None:
        raw = prefill_handle(len(NEXT))
        decision = judge(raw)
        assert (decision.leg, decision.may_pull, decision.retain, decision.notify) == (Leg.DECODE, True, True, False)
        assert decision.params == raw

    def test_retention_can_be_refused(self) -> None:
        decision = judge(prefill_handle(len(NEXT), pd_retain=False))
        assert not decision.retain
        assert decision.params is not None
        assert "pd_retain" not in decision.params

    @pytest.mark.parametrize("value", [True, None, 0, "no"])
    def test_only_false_refuses_retention(self, value: object) -> None:
        assert judge(prefill_handle(len(NEXT), pd_retain=value)).retain

    @pytest.mark.parametrize(
        "raw",
        [
            prefill_handle(len(NEXT), remote_block_ids=None),
            prefill_handle(len(NEXT), remote_block_ids=[]),
            prefill_handle(len(NEXT), remote_block_ids=[[1], [2]]),
            prefill_handle(len(NEXT) + 20),
            prefill_handle(8),
            {"do_remote_prefill": True},
        ],
    )
    def test_what_does_not_fit_is_computed_here_and_still_retained(self, raw: dict[str, Any]) -> None:
        decision = judge(raw)
        assert (decision.leg, decision.may_pull, decision.retain) == (Leg.DECODE, False, True)
        assert decision.params is not None
        assert decision.params["do_remote_prefill"] is False
        assert decision.notify == ("remote_host" in raw)

    def test_positions_count_not_the_prompt(self) -> None:
        # P stops short of the tokens that a drafter needs computed here.
        assert judge(prefill_handle(40), length=40).may_pull
        assert not judge(prefill_handle(36), length=40).may_pull

    def test_other_block_sizes_are_for_vllm(self) -> None:
        assert judge(prefill_handle(len(NEXT), remote_block_ids=[[1, 2, 3]])).may_pull


@pytest.mark.parametrize(
    ("raw", "leg"),
    [
        ({"do_remote_decode": True}, Leg.PREFILL),
        ({"do_remote_decode": True, "do_remote_prefill": False}, Leg.PREFILL),
        ({"do_remote_prefill": True, "do_remote_decode": None}, Leg.DECODE),
        ({"do_remote_decode": True, "do_remote_prefill": True}, Leg.NONE),
        ({"do_remote_decode": False, "do_remote_prefill": False}, Leg.NONE),
        ({"do_remote_decode": 1}, Leg.NONE),
        ({"do_remote_prefill": "true"}, Leg.NONE),
        ({}, Leg.NONE),
        (None, Leg.NONE),
        ([1], Leg.NONE),
        ("x", Leg.NONE),
    ],
)
def test_the_leg_is_named_by_one_true_flag(raw: object, leg: Leg) -> None:
    assert leg_of(raw) is leg
    assert judge(raw).leg is leg


def test_no_handle_no_verdict() -> None:
    none = {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None, "remote_port": None}
    decision = judge(none)
    assert (decision.verdict, decision.notify, decision.params) == (None, False, {"do_remote_decode": True})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = {**handle(), "do_remote_prefill": True, "pd_retain": False}


@given(raw=st.fixed_dictionaries({}, optional={key: JSON | st.just(value) for key, value in FIELDS.items()}))
def test_whatever_arrives_vllm_gets_what_it_can_take(raw: dict[str, Any]) -> None:
    decision = judge(raw)
    params = decision.params
    if params is None:
        assert decision.leg is Leg.NONE
        return
    assert not [key for key in params if key.startswith("pd_")]
    if not decision.may_pull:
        assert not params.get("remote_block_ids")
        assert not params.get("do_remote_prefill")
    if decision.notify:
        assert decision.declined is not None
        assert isinstance(decision.declined["remote_port"], int)
