"""The pure parts of unpinned retention: stamps, the question and its answer, what has to be computed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.core import question
from pd_connector.core.notices import marked, without_unpinned
from pd_connector.core.overwritten import to_recompute
from pd_connector.core.question import Question, Unreadable, decode, decode_answer, encode_answer
from pd_connector.core.stamps import Stamps
from pd_wire.moment import MAX_COUNT, Moment

EPOCH, OTHER = "0123456789abcdef", "fedcba9876543210"


def test_a_block_is_intact_until_it_is_handed_over() -> None:
    stamps = Stamps(8, EPOCH)
    stamps.handed_over(3)
    ended = stamps.now
    assert stamps.intact(ended, [0, 3, 5]) == 3
    stamps.handed_over(5)
    assert stamps.intact(ended, [0, 3, 5]) == 2
    assert stamps.intact(stamps.now, [0, 3, 5]) == 3
    stamps.handed_over(0)
    assert stamps.intact(ended, [0, 3, 5]) == 0


def test_another_epoch_has_nothing() -> None:
    stamps = Stamps(8, EPOCH)
    ended = stamps.now
    assert stamps.intact(Moment(OTHER, ended.count), [1]) == 0
    stamps.renew(OTHER)
    assert stamps.intact(ended, [1]) == 0
    assert stamps.intact(stamps.now, [1]) == 1


@pytest.mark.parametrize("block", [-1, 8, 1 << 31])
def test_an_unknown_block_ends_the_count(block: int) -> None:
    stamps = Stamps(8, EPOCH)
    assert stamps.intact(stamps.now, [1, block, 2]) == 1


@given(st.lists(st.integers(0, 15), max_size=40), st.integers(0, 40), st.lists(st.integers(0, 15), max_size=10))
def test_exactly_what_was_handed_over_later_is_gone(handed: list[int], cut: int, asked: list[int]) -> None:
    stamps = Stamps(16, EPOCH)
    for block in handed[:cut]:
        stamps.handed_over(block)
    ended = stamps.now
    for block in handed[cut:]:
        stamps.handed_over(block)
    gone = set(handed[cut:])
    expected = next((place for place, block in enumerate(asked) if block in gone), len(asked))
    assert stamps.intact(ended, asked) == expected


@given(
    st.text(max_size=80).filter(lambda text: text.isascii()),
    st.integers(0, MAX_COUNT),
    st.lists(st.integers(0, (1 << 31) - 1), max_size=300),
)
def test_a_question_arrives_as_it_was_asked(engine: str, count: int, blocks: list[int]) -> None:
    asked = Question(engine, Moment(EPOCH, count), blocks)
    message = asked.encode()
    assert question.is_question(message)
    read = decode(message)
    assert (read.engine, read.moment, list(read.blocks)) == (engine, asked.moment, blocks)


@given(st.binary(max_size=120), st.integers(0, 200), st.integers(0, 255))
def test_what_is_bent_is_unreadable_or_another_question(noise: bytes, at: int, value: int) -> None:
    message = bytearray(Question("engine", Moment(EPOCH, 7), [1, 2, 3]).encode())
    message[at % len(message)] = value
    for bent in (bytes(message), bytes(message[: at % len(message)]), bytes(message) + noise, noise):
        try:
            decode(bent)
        except Unreadable:
            continue
        assert bent.startswith(b"PDQ1")


@pytest.mark.parametrize(
    "asked",
    [
        Question("e" * 70_000, Moment(EPOCH, 1), [1]),
        Question("e", Moment(EPOCH, 1), [-1]),
        Question("e", Moment(EPOCH, 1), [1 << 32]),
        Question("e", Moment("zz", 1), [1]),
        Question("e", Moment(EPOCH, 1), range(question.MAX_BLOCKS + 1)),
    ],
)
def test_what_does_not_fit_is_not_sent(asked: Question) -> None:
    with pytest.raises(ValueError, match=r"fit|at most|fromhex"):
        asked.encode()


def test_an_answer_claims_no_more_than_was_asked() -> None:
    assert decode_answer(encode_answer(3), 3) == 3
    for message in (encode_answer(4), b"", b"PDA1", encode_answer(1) + b"x", b"XXXX" + encode_answer(1)[4:]):
        with pytest.raises(Unreadable):
            decode_answer(message, 3)


@pytest.mark.parametrize(
    ("local", "asked", "intact", "expected"),
    [
        ([5, 6, 7], 3, 3, set()),
        ([5, 6, 7], 3, 1, {6, 7}),
        ([5, 6, 7], 3, 0, {5, 6, 7}),
        ([5, 6, 7], 5, 4, {7}),
        ([5, 6, 7], 5, 2, {5, 6, 7}),
        ([5, 6, 7], 5, 0, {5, 6, 7}),
        ([], 5, 0, set()),
    ],
)
def test_everything_behind_the_first_bad_block_is_computed_again(
    local: list[int], asked: int, intact: int, expected: set[int]
) -> None:
    assert to_recompute(local, asked, intact) == expected


def test_notices_of_unpinned_reads_are_told_apart() -> None:
    notices = {"a": [f"{marked('r')}:1".encode(), b"r:1", b"HB:r"], "b": [f"{marked('s')}:2".encode()]}
    assert without_unpinned(notices) == {"a": [b"r:1", b"HB:r"]}
