"""Messages between the processes of one router, and how its limits are divided."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.__main__ import parse_settings
from pd_router.core.addresses import Endpoint, SettingsError
from pd_router.core.settings import Limits, Settings
from pd_router.core.worker_wire import (
    Kind,
    Message,
    Reader,
    plain,
    read_entry,
    read_keys,
    write,
    write_entry,
    write_keys,
)
from pd_router.core.workers import MAX_DELAY, STEADY, Backoff, Joining, share_of
from unit.router.store_behaviour import entry

WORDS = st.lists(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8), max_size=4)


# -- messages ----------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.sampled_from(Kind), WORDS, st.binary(max_size=40)), max_size=5), st.integers(1, 40))
def test_messages_arrive_as_they_were_sent_however_they_are_cut(
    sent: list[tuple[Kind, list[Any], bytes]], piece: int
) -> None:
    stream = b"".join(write(*message) for message in sent)
    reader, found = Reader(), []
    for start in range(0, len(stream), piece):
        found += reader.feed(stream[start : start + piece])
    assert found == [Message(*message) for message in sent]


@pytest.mark.parametrize(
    "noise", [b"\0" + b"\xff" * 8, b"\x09" + b"\0\0\0\2" + b"\0" * 4 + b"[]", b"\0\0\0\0\2\0\0\0\0[x"]
)
def test_what_is_no_message_is_an_error(noise: bytes) -> None:
    with pytest.raises(ValueError):
        list(Reader().feed(noise))


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_every_text_travels_as_a_text_of_its_own(one: str, other: str) -> None:
    [message] = Reader().feed(write(Kind.TELL, [plain(one), plain(other)]))
    assert (message.words[0] == message.words[1]) is (one == other)


@given(st.lists(st.binary(max_size=20)))
def test_keys_travel(keys: list[bytes]) -> None:
    [message] = Reader().feed(write(Kind.TELL, [write_keys(keys)]))
    assert read_keys(message.words[0]) == keys


def test_an_entry_travels_whole_but_for_what_is_one_process_own() -> None:
    sent = entry(7, arrived=123.456789, pd_proof={"v": 1}, incarnation="3")
    sent.inexact, sent.rank, sent.behind, sent.sent = "why", 2, 55, 120.000000001
    sent.lease, sent.conversations = "0" * 32 + "-60", ("ab", "cd")
    [message] = Reader().feed(write(Kind.ASK, [write_entry(sent)], sent.raw))
    got = read_entry(message.words[0], message.raw, "9")
    own = {"incarnation", "keys", "ticket"}
    names = set(type(sent).__slots__) - own
    assert {name: getattr(got, name) for name in names} == {name: getattr(sent, name) for name in names}
    assert (got.incarnation, got.keys, got.ticket) == ("9", (), None)


# -- shares ------------------------------------------------------------------------------------------
def settings_of(workers: int, **limits: int) -> Settings:
    return Settings(Endpoint("h", 0), Endpoint("h", 9), workers=workers, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("workers", "inflight", "queue", "shares"),
    [(2, 1024, 1024, (512, 512)), (3, 10, 0, (4, 0)), (64, 1, 1, (1, 1)), (4, 4, 5, (1, 2))],
)
def test_places_are_divided_and_rounded_up(workers: int, inflight: int, queue: int, shares: tuple[int, int]) -> None:
    share = share_of(settings_of(workers, max_inflight=inflight, max_queue=queue), 8000)
    assert (share.limits.max_inflight, share.limits.max_queue) == shares
    assert share.listen == Endpoint("h", 8000)


def test_a_worker_that_keeps_ending_waits_longer_and_one_that_was_steady_does_not() -> None:
    backoff = Backoff()
    waits = [backoff.ended(1.0) for _ in range(20)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert waits == sorted(waits)
    assert waits[-1] == MAX_DELAY
    assert backoff.ended(STEADY) == 0.1


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_worker_is_told(replaces: bool) -> None:
    joining = Joining(3, 12, 4711, 8000, replaces)
    assert Joining.read(joining.written()) == joining


@pytest.mark.parametrize("value", ["0", "-1", "65", "1000000"])
def test_a_number_of_workers_that_cannot_be(value: str) -> None:
    flags = ["--listen", ":1", "--admin", ":2", "--prefill", "http://a:1", "--decode", "http://b:1"]
    with pytest.raises(SettingsError, match=f"--workers: must be from 1 to 64, got {value}"):
        parse_settings([*flags, "--workers", value])
    assert parse_settings([*flags, "--workers", "64"])[0].workers == 64
    assert parse_settings(flags)[0].workers == 1
