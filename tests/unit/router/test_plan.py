"""One attempt's decision as a whole: engines, rank, what becomes of the handle, and what is shown of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pd_router.core.linking import Keyring
from pd_router.core.placement import Engine, Loads, rank_key
from pd_router.core.plan import Plan, View, plan, to_compute
from pd_router.core.policy import Decision, Drop, decide, newest_keys
from pd_router.core.pulls import Pull, pull_of
from pd_router.core.request import Api, Prepared, prepare
from pd_router.core.settings import Bypass
from pd_router.core.store import Entry, Found
from pd_wire.report import READ_FAILED, Report, Verdict

OFF = Bypass()
P = [Engine(key, "", "prefill", "g", "1", True) for key in ("p1", "p2")]
D = [Engine(key, "", "decode", "g", "1", True) for key in ("d1", "d2")]
HANDLE = {
    "remote_engine_id": "e_dp1",
    "remote_host": "h",
    "remote_block_ids": [[1]],
    "remote_num_tokens": 1000,
    "pd_proof": {"v": 1},
}


def turn(new: int = 40, **fields: Any) -> Prepared:
    messages = [
        {"role": "user", "content": "x" * 4000},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "y" * new},
    ]
    return prepare(Api.CHAT, json.dumps({"model": "m", "messages": messages, **fields}).encode(), {}, frozenset())


def entry(**changes: Any) -> Entry:
    made = Entry.of(HANDLE, holder="d1", incarnation="1", generation="g", arrived=0.0, turn=1, inexact=None)
    return replace(made, **changes)


def found(prepared: Prepared, kept: Entry | None = None) -> Decision:
    keys = Keyring(b"s" * 32).lookup_keys("t", prepared)
    return decide(
        prepared,
        Found(kept or entry(), keys[1]),
        now=1.0,
        engines=D,
        hosts=frozenset("h"),
        ttl=60.0,
        shared_ttl=3600.0,
        threshold=64,
        newest_keys=newest_keys(prepared, keys),
    )


def planned(
    prepared: Prepared | None = None,
    decision: Decision | None = None,
    loads: Loads | None = None,
    bypass: Bypass = OFF,
    **view: Any,
) -> Plan:
    prepared = prepared or turn()
    seen = View(D, P, loads or Loads(), **{"ranks": {"d1": {0, 1}}, **view})
    return plan(prepared, decision or found(prepared), seen, overload=4, bypass=bypass)


def test_a_plain_turn() -> None:
    made = planned()
    assert made.decision.attach
    assert made.explain() == {
        "decode": "d1",
        "decode_reason": "holder",
        "rank": 1,
        "prefill": "p1",
        "prefill_reason": "least outstanding tokens",
        "found_by": "history",
        "holder": "d1",
        "holder_tokens": 1000,
    }


def test_a_bypass_keeps_the_handle_from_being_sent() -> None:
    made = planned(bypass=Bypass(tokens=50))
    assert (made.bypass, made.decision.attach, made.decision.drop, made.prefill) == (True, False, Drop.BYPASSED, None)
    assert made.rank == 1
    made = planned(turn(400), bypass=Bypass(tokens=50))
    assert (made.bypass, made.decision.attach, made.explain()["two_legs"]) == (False, True, "100 new tokens")


def test_a_pull_goes_to_an_engine_that_can() -> None:
    made = planned(no_pull=frozenset({("p1", "d1")}))
    assert made.prefill is not None
    assert (made.prefill.engine, made.decision.attach) == (P[1], True)
    assert made.explain()["prefill_rejected"] == {"p1": "pair in quarantine: pull"}


def test_no_engine_that_can_pull_is_no_pull() -> None:
    made = planned(no_pull=frozenset({("p1", "d1"), ("p2", "d1")}))
    assert (made.decision.attach, made.decision.drop) == (False, Drop.PAIR_QUARANTINED)


def test_pulls_in_quarantine_do_not_matter_without_a_handle() -> None:
    made = planned(decision=Decision.recompute(), no_pull=frozenset({("p1", "d1"), ("p1", "d2")}))
    assert made.prefill is not None
    assert made.prefill.engine is P[0]


def test_what_failed_this_turn_is_avoided() -> None:
    made = planned(decision=Decision.recompute(), avoid={"d1"}, avoid_pairs=frozenset({("p1", "d2")}))
    assert made.prefill is not None
    assert (made.decode.engine, made.prefill.engine) == (D[1], P[1])
    made = planned(avoid={"d1", "d2", "p1", "p2"})
    assert made.decode.engine is not None
    assert made.prefill is not None
    assert made.prefill.engine is not None


@pytest.mark.parametrize(
    ("kept", "loads", "rank"),
    [
        (entry(), {}, 1),
        (entry(rank=None), {}, None),
        (entry(incarnation="0"), {}, None),
        (entry(holder="d9"), {}, None),
        (entry(), {1: 5}, None),
    ],
)
def test_the_rank_is_the_holders_while_it_is_that_process(kept: Entry, loads: dict[int, int], rank: int | None) -> None:
    busy = Loads()
    for number, count in loads.items():
        for _ in range(count):
            busy.open(rank_key("d1", number))
    prepared = turn()
    assert planned(prepared, found(prepared, kept), busy).rank == rank


def test_one_leg_needs_no_prefill() -> None:
    made = planned(turn(n=2), Decision.recompute())
    assert made.prefill is None
    assert "two_legs" not in made.explain()


def test_nobody() -> None:
    made = plan(turn(), Decision.recompute(), View((), P, Loads()), overload=4, bypass=OFF)
    assert (made.decode.engine, made.explain()["decode"]) == (None, None)


def test_what_prefill_can_read_it_need_not_compute() -> None:
    prepared = turn(400)
    whole = prepared.prompt_tokens_estimate
    assert to_compute(prepared, None) == whole
    assert to_compute(prepared, entry()) == max(100, whole - 1000)
    assert to_compute(prepared, entry(remote_tokens=10_000)) == 100


@pytest.mark.parametrize(
    ("report", "pull"),
    [
        (None, Pull.UNKNOWN),
        (Report(Verdict.PROVEN, "", 128, 0, 128), Pull.PULLED),
        (Report(Verdict.PROVEN, "in the local cache", 128, 128, 0), Pull.NOTHING),
        (Report(Verdict.UNPROVEN, "no block", 0, 0, 0), Pull.UNPROVEN),
        (Report(Verdict.PROVEN, READ_FAILED, 128, 0, 0), Pull.FAILED),
    ],
)
def test_what_became_of_a_handle(report: Report | None, pull: Pull) -> None:
    assert pull_of(report) is pull
