"""The rules for attaching a handle, one row per rule (HL-01 to HL-05, HL-13, HL-20, HL-24, IS-01, EL-01, EL-06)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.history import make_reply
from pd_router.core.linking import Keyring
from pd_router.core.placement import Engine
from pd_router.core.policy import (
    Decision,
    Drop,
    NotStored,
    bypass_obstacle,
    decide,
    fresh,
    judge_handle,
    newest_keys,
    told_retention,
)
from pd_router.core.request import Api, Prepared, prepare
from pd_router.core.settings import Bypass
from pd_router.core.store import Entry, Found
from pd_router.core.store_memory import MemoryStore

TTL = 450.0
HOSTS = frozenset({"10.0.0.1", "10.0.0.2"})
D1 = Engine("d1", "http://d1", "decode", "g1", "7", ready=True)
D2 = Engine("d2", "http://d2", "decode", "g1", "1", ready=True)
HISTORY_KEY, ID_KEY = b"h" + b"k" * 16, b"0" + b"k" * 16
USER = {"role": "user", "content": "hi"}


def handle(**changes: Any) -> dict[str, Any]:
    whole = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": 384,
        "remote_blocks_expiry_time": 12.5,
        "pd_proof": {"v": 1},
        **changes,
    }
    return {name: value for name, value in whole.items() if value is not ...}


def chat(**fields: Any) -> Prepared:
    raw = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    return prepare(Api.CHAT, raw, {}, frozenset())


def entry(inexact: str | None = None, incarnation: str = "7", generation: str = "g1", **changes: Any) -> Entry:
    return Entry.of(
        handle(**changes),
        holder="d1",
        incarnation=incarnation,
        generation=generation,
        arrived=1000.0,
        turn=1,
        inexact=inexact,
    )


def judged(
    kept: Entry | None,
    key: bytes = HISTORY_KEY,
    prepared: Prepared | None = None,
    now: float = 1001.0,
    engines: tuple[Engine, ...] = (D1, D2),
    threshold: int = 64,
    local: int = 0,
    trust: bool = True,
) -> Decision:
    found = Found(kept, key) if kept is not None else None
    return decide(
        prepared or chat(),
        found,
        now=now,
        engines=engines,
        hosts=HOSTS,
        ttl=TTL,
        shared_ttl=3600.0,
        threshold=threshold,
        local_tokens=local,
        trust_history=trust,
    )


NO_PROOF = {"pd_proof": ...}
INEXACT_TURN = {"messages": [USER, {"role": "assistant", "content": "a", "reasoning": "r"}, USER]}

ROWS: list[tuple[str, dict[str, Any], Drop | None]] = [
    ("proven, by history", {"kept": entry()}, None),
    ("proven, by id", {"kept": entry(), "key": ID_KEY}, None),
    ("proven, inexact reply", {"kept": entry("tool calls in the reply"), "key": ID_KEY}, None),
    ("proven, inexact turn", {"kept": entry(), "prepared": chat(**INEXACT_TURN)}, None),
    ("proven, several groups", {"kept": entry(remote_block_ids=[[1], [2]])}, None),
    ("not found", {"kept": None}, Drop.NOT_FOUND),
    ("not linkable", {"kept": entry(), "prepared": chat(n=2)}, Drop.NOT_LINKABLE),
    # HL-01, HL-02, IS-03: without a proof only an exact history counts, and an id never does.
    ("unproven, exact history", {"kept": entry(**NO_PROOF)}, None),
    ("unproven, by id", {"kept": entry(**NO_PROOF), "key": ID_KEY}, Drop.UNPROVEN),
    ("unproven, inexact reply", {"kept": entry("reasoning in the reply", **NO_PROOF)}, Drop.UNPROVEN),
    ("unproven, inexact turn", {"kept": entry(**NO_PROOF), "prepared": chat(**INEXACT_TURN)}, Drop.UNPROVEN),
    ("history not trusted", {"kept": entry(**NO_PROOF), "trust": False}, Drop.UNPROVEN),
    ("history not trusted, proven", {"kept": entry(), "trust": False}, None),
    ("proof is null", {"kept": entry(pd_proof=None), "key": ID_KEY}, Drop.UNPROVEN),
    # HL-20
    ("unproven, several groups", {"kept": entry(remote_block_ids=[[1], [2]], **NO_PROOF)}, Drop.SEVERAL_GROUPS),
    # HL-04: age at dispatch, on the router's clock
    ("just fresh", {"kept": entry(), "now": 1000.0 + TTL - 0.001}, None),
    ("just too old", {"kept": entry(), "now": 1000.0 + TTL}, Drop.EXPIRED),
    ("far too old", {"kept": entry(), "now": 1000.0 + TTL + 1}, Drop.EXPIRED),
    # EL-01, EL-06, EL-07
    ("holder left", {"kept": entry(), "engines": (D2,)}, Drop.HOLDER_GONE),
    ("nobody there", {"kept": entry(), "engines": ()}, Drop.HOLDER_GONE),
    (
        "holder not ready",
        {"kept": entry(), "engines": (Engine("d1", "", "decode", "g1", "7", False),)},
        Drop.HOLDER_GONE,
    ),
    ("holder restarted", {"kept": entry(incarnation="6")}, Drop.HOLDER_RESTARTED),
    (
        "holder restarting",
        {"kept": entry(incarnation="6"), "engines": (Engine("d1", "", "decode", "g1", "7", False),)},
        Drop.HOLDER_RESTARTED,
    ),
    (
        "holder draining",
        {"kept": entry(), "engines": (Engine("d1", "", "decode", "g1", "7", True, True),)},
        Drop.HOLDER_DRAINING,
    ),
    (
        "holder failing",
        {"kept": entry(), "engines": (Engine("d1", "", "decode", "g1", "7", True, failing=True),)},
        Drop.HOLDER_FAILING,
    ),
    ("other generation", {"kept": entry(generation="g0")}, Drop.OTHER_GENERATION),
    # IS-01
    ("foreign host", {"kept": entry(remote_host="169.254.169.254")}, Drop.FOREIGN_HOST),
    # HL-13
    ("at the threshold", {"kept": entry(remote_num_tokens=64)}, None),
    ("below the threshold", {"kept": entry(remote_num_tokens=63)}, Drop.BELOW_THRESHOLD),
    ("P has most of it", {"kept": entry(), "local": 321}, Drop.BELOW_THRESHOLD),
    ("P has some of it", {"kept": entry(), "local": 320}, None),
    ("threshold off", {"kept": entry(remote_num_tokens=3), "threshold": 0}, None),
]


@pytest.mark.parametrize(("name", "case", "drop"), ROWS)
def test_rules(name: str, case: dict[str, Any], drop: Drop | None) -> None:
    decision = judged(**case)
    assert decision.drop is drop
    assert decision.attach is (drop is None)


def test_every_reason_of_the_router_has_a_row() -> None:
    # What is decided before a handle is looked for, or after engines were chosen.
    outside = {Drop.DISABLED, Drop.NO_TENANT, Drop.REFUSED_BY_PREFILL, Drop.PAIR_QUARANTINED, Drop.BYPASSED}
    assert {drop for _, _, drop in ROWS} - {None} == set(Drop) - outside


def test_a_decision_shows_how_far_the_handle_came() -> None:
    assert judged(None).stages == ()
    assert judged(entry(), now=9999.0).stages == ("found",)
    assert judged(entry(**NO_PROOF), ID_KEY).stages == ("found", "live")
    assert judged(entry()).stages == ("found", "live")
    assert (judged(entry(), ID_KEY).linked_by, judged(entry()).linked_by) == ("conversation_id", "history")
    assert Decision.recompute() == Decision(False, None, None, "")


def test_a_dropped_entry_still_names_its_holder() -> None:
    decision = judged(entry(**NO_PROOF), ID_KEY)
    assert decision.entry is not None
    assert decision.entry.holder == "d1"


@settings(deadline=None)
@given(st.floats(0, 2000), st.floats(1, 1000))
def test_freshness_is_age_below_ttl(age: float, ttl: float) -> None:
    kept = entry()
    assert fresh(kept, 1000.0 + age, ttl) is (1000.0 + age - 1000.0 < ttl)


# -- decode alone --------------------------------------------------------------------------------

LIMITS = Bypass(tokens=100, share=0.25, turns=2)


def talk(new: int = 80, **fields: Any) -> Prepared:
    """A second turn with so many new bytes."""
    messages = [USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "x" * new}]
    return chat(messages=messages, **fields)


def bypassed(
    prepared: Prepared | None = None,
    kept: Entry | None = None,
    limits: Bypass = LIMITS,
    turns: int = 0,
    chosen: str = "d1",
    place: int | None = 1,
) -> str | None:
    """``place``: which of the turn's look-up keys led to the entry; None is an id."""
    prepared = prepared or talk()
    keys = Keyring(b"s" * 32).lookup_keys("t", prepared)
    decision = decide(
        prepared,
        Found(kept or entry(), ID_KEY if place is None else keys[place]),
        now=1001.0,
        engines=(D1, D2),
        hosts=HOSTS,
        ttl=TTL,
        shared_ttl=3600.0,
        threshold=64,
        newest_keys=newest_keys(prepared, keys),
    )
    return bypass_obstacle(prepared, decision, chosen, turns, limits)


def longer() -> Prepared:
    more = [{"role": "assistant", "content": "sure"}, {"role": "user", "content": "y"}]
    return chat(messages=[USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "x"}, *more])


def behind(tokens: int) -> Entry:
    return replace(entry(), behind=tokens)


@pytest.mark.parametrize(
    ("name", "case", "obstacle"),
    [
        ("short suffix", {}, None),
        ("off", {"limits": Bypass()}, "off"),
        ("at the absolute threshold", {"prepared": talk(400)}, None),
        ("above the absolute threshold", {"prepared": talk(404)}, "101 new tokens"),
        ("above the share", {"prepared": talk(200), "kept": entry(remote_num_tokens=100)}, "50 new tokens of 150"),
        ("grown since, within", {"kept": behind(80)}, None),
        ("grown since, beyond", {"kept": behind(81)}, "101 new tokens"),
        ("decode nearly busy", {"turns": 2}, None),
        ("decode busy", {"turns": 3}, "decode has 3 turns"),
        ("another decode", {"chosen": "d2"}, "the holder was not chosen"),
        ("by id", {"place": None}, "the history does not end in what decode has"),
        ("an older turn", {"prepared": longer(), "place": 2}, "the history does not end in what decode has"),
        ("the last turn", {"prepared": longer(), "place": 1}, None),
        ("inexact reply", {"kept": entry("tool calls in the reply")}, "tool calls in the reply"),
        ("inexact turn", {"prepared": chat(**INEXACT_TURN)}, "reasoning in the history"),
        ("expired", {"kept": replace(entry(), arrived=0.0)}, "nothing that decode is known to have"),
    ],
)
def test_when_decode_serves_alone(name: str, case: dict[str, Any], obstacle: str | None) -> None:
    found = bypassed(**case)
    assert found == obstacle or (obstacle is not None and found is not None and found.endswith(obstacle))


def test_a_prompt_that_ends_in_an_answer_has_one_newest_key() -> None:
    ends = chat(messages=[USER, {"role": "assistant", "content": "ok"}])
    keys = Keyring(b"s" * 32).lookup_keys("t", ends)
    assert list(newest_keys(ends, keys)) == list(keys[:1])
    assert len(newest_keys(longer(), Keyring(b"s" * 32).lookup_keys("t", longer()))) == 2


# -- handles that are not kept -------------------------------------------------------------------
MALFORMED: list[dict[str, Any]] = [
    {"remote_block_ids": None},
    {"remote_block_ids": [1, 2]},
    {"remote_block_ids": [["1"]]},
    {"remote_block_ids": [[-1]]},
    {"remote_block_ids": [[2**40]]},
    {"remote_block_ids": []},
    {"remote_block_ids": [[]]},
    {"remote_port": "5600"},
    {"remote_port": 0},
    {"remote_host": None},
    {"remote_host": ""},
    {"remote_engine_id": 5},
    {"remote_request_id": ...},
    {"remote_num_tokens": 0},
    {"remote_num_tokens": "9"},
    {"remote_blocks_expiry_time": ...},
    {"remote_blocks_expiry_time": "soon"},
    {"do_remote_decode": False},
]


@pytest.mark.parametrize("changes", MALFORMED)
def test_a_malformed_handle_is_not_kept(changes: dict[str, Any]) -> None:
    assert judge_handle(handle(**changes), HOSTS) is NotStored.MALFORMED


def test_a_good_handle_is_kept_and_only_from_live_hosts() -> None:
    assert judge_handle(handle(), HOSTS) is None
    assert judge_handle(handle(unknown={"a": 1}), HOSTS) is None
    assert judge_handle(None, HOSTS) is NotStored.NO_HANDLE
    for host in ("169.254.169.254", "10.0.0.1.evil", "localhost"):
        assert judge_handle(handle(remote_host=host), HOSTS) is NotStored.FOREIGN_HOST
    assert judge_handle(handle(), frozenset()) is NotStored.FOREIGN_HOST


# -- the pieces together -------------------------------------------------------------------------
class Conversation:
    """Plays turns against the pure core, as one tenant of one router."""

    def __init__(self, proven: bool = True) -> None:
        self.store = MemoryStore(1 << 20, 100, TTL, 480.0)
        self.ring = Keyring(b"k" * 32)
        self.proven = proven

    def turn(
        self, messages: list[dict[str, Any]], reply: str, tenant: str = "t", now: float = 0.0, **fields: Any
    ) -> Decision:
        prepared = chat(messages=messages, **fields)
        keys = self.ring.lookup_keys(tenant, prepared)
        number = self.store.begin(keys, now)
        decision = decide(
            prepared,
            self.store.take(keys, now),
            now=now,
            engines=(D1,),
            hosts=HOSTS,
            ttl=TTL,
            shared_ttl=3600.0,
            threshold=64,
        )
        answer = make_reply({"role": "assistant", "content": reply}, "stop", None)
        kept = Entry.of(
            handle() if self.proven else handle(**NO_PROOF),
            holder="d1",
            incarnation="7",
            generation="g1",
            arrived=now,
            turn=number,
            inexact=prepared.inexact or answer.inexact,
        )
        self.store.put(kept, self.ring.store_keys(tenant, prepared, answer), now)
        return decision


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.mark.parametrize("proven", [True, False])
def test_a_conversation_without_ids_reuses_from_turn_two_on(proven: bool) -> None:
    talk = Conversation(proven)
    assert talk.turn(said("q1"), "a1").drop is Drop.NOT_FOUND
    assert talk.turn(said("q1", "a1", "q2"), "a2").attach
    assert talk.turn(said("q1", "a1", "q2", "a2", "q3"), "a3").attach


UNSAFE: list[tuple[str, dict[str, Any]]] = [
    ("other text", {"messages": said("z1", "a1", "q2")}),
    ("edited question", {"messages": said("q1!", "a1", "q2")}),
    ("edited answer", {"messages": said("q1", "a1!", "q2")}),
    ("regenerated", {"messages": said("q1")}),
    ("other tools", {"messages": said("q1", "a1", "q2"), "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("other salt", {"messages": said("q1", "a1", "q2"), "cache_salt": "x"}),
    ("other tenant, same text", {"messages": said("q1", "a1", "q2"), "tenant": "u"}),
    ("too late", {"messages": said("q1", "a1", "q2"), "now": TTL}),
]


@pytest.mark.parametrize(("name", "second"), UNSAFE)
@pytest.mark.parametrize("with_id", [True, False])
def test_without_a_proof_the_router_alone_does_not_attach(name: str, second: dict[str, Any], with_id: bool) -> None:
    fields = {"conversation_id": "c"} if with_id else {}
    talk = Conversation(proven=False)
    talk.turn(said("q1"), "a1", **fields)
    assert not talk.turn(reply="a2", **second, **fields).attach


@pytest.mark.parametrize(
    ("name", "second"), [row for row in UNSAFE if "tenant" in row[1] or "late" in row[0] or "tools" in row[0]]
)
def test_with_a_proof_tenant_scope_and_age_still_hold(name: str, second: dict[str, Any]) -> None:
    talk = Conversation()
    talk.turn(said("q1"), "a1", conversation_id="c")
    assert not talk.turn(reply="a2", **second, conversation_id="c").attach


def test_two_turns_at_once_get_one_handle() -> None:
    talk = Conversation()
    talk.turn(said("q1"), "a1")
    prepared = chat(messages=said("q1", "a1", "q2"))
    keys = talk.ring.lookup_keys("t", prepared)
    taken = [talk.store.take(keys, 1.0) for _ in range(2)]
    assert [found is not None for found in taken] == [True, False]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, ("", "")),
        ({"pd_mode": "Pinned", "pd_fallback": "no hook"}, ("Pinned", "no hook")),
        ({"pd_mode": "Unpinned"}, ("Unpinned", "")),
        ({"pd_mode": "Leased", "pd_lease": "0" * 32 + "-60"}, ("Leased", "")),
        ({"pd_mode": 7, "pd_fallback": ["x"]}, ("", "")),
        ({"pd_mode": "Pinned", "pd_fallback": "x" * 1000}, ("Pinned", "x" * 200)),
    ],
)
def test_what_a_handle_tells_of_its_engine(more: dict[str, Any], told: tuple[str, str]) -> None:
    assert told_retention(handle(**more)) == told


@pytest.mark.parametrize("mode", ["Unpinned", "Leased"])
def test_each_kind_of_handle_has_its_own_lifetime(mode: str) -> None:
    longer = {"pd_mode": mode, "pd_moment": "0123456789abcdef-2a", "remote_blocks_expiry_time": None}
    for more, age, drop in (
        ({}, TTL - 1.0, None),
        ({}, TTL, Drop.EXPIRED),
        (longer, TTL, None),
        (longer, 3599.0, None),
        (longer, 3600.0, Drop.EXPIRED),
    ):
        kept = entry(**more)
        assert judged(kept, now=kept.arrived + age).drop is drop, (more, age)
