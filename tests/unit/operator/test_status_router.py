"""A router's counters → whether tokens flow, and the words that follow from two statuses."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed_router import STARVED_AFTER, TROUBLE_LIMIT, Flow, RouterTrack, read_router
from pd_operator.core.status_events import EVENT_LIMIT, happenings
from pd_operator.core.status_model import Condition, ConditionStatus, PDDeploymentStatus


def body(attached: int = 0, pulled_tokens: int = 0, **changes: Any) -> dict[str, Any]:
    """An answer of `/status`."""
    engines = [
        {"engine": "p", "role": "prefill", "generation": "g1", "ready": True, "draining": False},
        {"engine": "d", "role": "decode", "generation": "g1", "ready": True, "draining": False},
    ]
    funnel = {"attached": attached, "pulled_tokens": pulled_tokens}
    return {"reuse": "on", "engines": engines, "funnel": funnel, "started": 1.0, **changes}


def flows(*answers: tuple[int, int]) -> list[Flow]:
    """What a series of (attached, pulled tokens) means, one after the other."""
    track: RouterTrack | None = None
    found = []
    for attached, pulled in answers:
        answer, track = read_router(body(attached, pulled), track)
        found.append(answer.flow)
    return found


N = STARVED_AFTER


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(0, 0)], [Flow.NO_TURNS]),
        ([(N - 1, 0)], [Flow.NO_TURNS]),
        ([(N, 0)], [Flow.STARVED]),
        ([(1, 640)], [Flow.FLOWING]),
        ([(5 * N, 640)], [Flow.FLOWING]),
        ([(1, 640), (N, 640)], [Flow.FLOWING, Flow.FLOWING]),
        ([(1, 640), (N + 1, 640)], [Flow.FLOWING, Flow.STARVED]),
        ([(1, 640), (N + 1, 640), (N + 2, 700)], [Flow.FLOWING, Flow.STARVED, Flow.FLOWING]),
        ([(0, 0), (N, 0), (N + 1, 64)], [Flow.NO_TURNS, Flow.STARVED, Flow.FLOWING]),
    ],
)
def test_flow(answers: list[tuple[int, int]], expected: list[Flow]) -> None:
    assert flows(*answers) == expected


def test_blocks_that_are_gone_are_no_broken_transport() -> None:
    _, track = read_router(body(1, 640), None)
    gone = {"attached": N + 1, "pulled_tokens": 640, "gone_tokens": 3200}
    answer, track = read_router(body(funnel=gone), track)
    assert answer.flow is Flow.REUSED
    answer, track = read_router(body(funnel={**gone, "attached": N + 2, "pulled_tokens": 700}), track)
    assert answer.flow is Flow.FLOWING
    answer, _ = read_router(body(funnel={**gone, "attached": 2 * N + 2, "pulled_tokens": 700}), track)
    assert answer.flow is Flow.STARVED, "nothing more has gone since tokens flowed last"


def test_what_engines_say_of_their_blocks_is_kept() -> None:
    said = body()
    said["engines"][1] |= {"retention": "Pinned", "fallback": "too old"}
    said["engines"].append({**said["engines"][1], "ready": False, "retention": "Unpinned"})
    answer, _ = read_router(said, None)
    assert (answer.retentions, answer.fallbacks) == ({"Pinned"}, {"too old"})


def test_a_restarted_router_begins_anew() -> None:
    _, track = read_router(body(100, 6400), None)
    answer, track = read_router(body(2, 0, started=2.0), track)
    assert answer.flow is Flow.NO_TURNS
    assert track == RouterTrack(2.0, 0, 0)


REFUSED = "refused: 401 Unauthorized"


def troubles(*said: Any) -> list[str]:
    """What each of a series of answers gives as trouble; between some of them the router restarts."""
    track: RouterTrack | None = None
    found, started = [], 1.0
    for one in said:
        if one == "restart":
            started += 1
            continue
        answer, track = read_router(body(discovery={"listed": True, "trouble": one}, started=started), track)
        found.append(answer.trouble)
    return found


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([None, None], ["", ""]),
        ([None, REFUSED, None], ["", "", ""]),
        ([None, REFUSED, REFUSED, None, REFUSED], ["", "", REFUSED, "", ""]),
        ([REFUSED], [REFUSED]),
        ([None, "restart", REFUSED], ["", REFUSED]),
    ],
    ids=["sees", "for a moment", "twice in a row", "as the operator starts", "as the router starts"],
)
def test_trouble_counts_when_it_lasts(said: list[Any], expected: list[str]) -> None:
    assert troubles(*said) == expected


@pytest.mark.parametrize("discovery", [None, {}, "?", {"trouble": None}])
def test_a_router_with_a_fixed_list_has_no_trouble(discovery: Any) -> None:
    assert read_router(body(discovery=discovery), None)[0].trouble == ""


def test_a_long_trouble_is_cut() -> None:
    (trouble,) = troubles("x" * 5000 + "\nend")
    assert len(trouble) == TROUBLE_LIMIT
    assert trouble.endswith("x end")


@pytest.mark.parametrize(
    ("change", "pairs"),
    [({}, True), ({"ready": False}, False), ({"draining": True}, False), ({"generation": "g2"}, False)],
)
def test_a_pair_is_two_ready_engines_of_one_generation(change: dict[str, Any], pairs: bool) -> None:
    value = body()
    value["engines"][0].update(change)
    assert read_router(value, None)[0].pairs is pairs


@pytest.mark.parametrize(
    "value", [None, [], {}, {"reuse": "maybe"}, {"reuse": "on"}, body(funnel={"attached": "x", "pulled_tokens": 0})]
)
def test_what_is_no_status_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        read_router(value, None)


def condition(kind: str, status: ConditionStatus, reason: str, message: str = "m") -> Condition:
    """One condition."""
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time="t")


def status(*conditions: Condition) -> PDDeploymentStatus:
    """A status of these conditions."""
    return PDDeploymentStatus(conditions=conditions)


TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def test_a_change_is_told_once_with_its_reason() -> None:
    before = status(condition("Ready", FALSE, "Starting"), condition("Progressing", TRUE, "Starting"))
    after = status(condition("Ready", FALSE, "CrashLooping"), condition("Progressing", FALSE, "CrashLooping"))
    assert [(one.kind, one.reason) for one in happenings(before, after)] == [("Warning", "CrashLooping")]


def test_good_news_are_normal() -> None:
    news = happenings(status(condition("Ready", FALSE, "Starting")), status(condition("Ready", TRUE, "AllReady")))
    assert [(one.kind, one.reason) for one in news] == [("Normal", "AllReady")]


def test_another_message_is_no_event() -> None:
    before, after = condition("Ready", FALSE, "Starting", "0 of 2"), condition("Ready", FALSE, "Starting", "1 of 2")
    assert happenings(status(before), status(after)) == ()


def test_nothing_known_yet_is_no_event() -> None:
    assert happenings(status(), status(condition("TransfersFlowing", UNKNOWN, "NoTurnsYet"))) == ()


def test_event_messages_are_bounded() -> None:
    news = happenings(status(), status(condition("Ready", FALSE, "InvalidSpec", "x" * 2000)))
    assert len(news[0].message) == EVENT_LIMIT
