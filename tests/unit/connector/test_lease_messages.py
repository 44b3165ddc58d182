"""What may stand in a batch of new ends for leases: over HTTP, and on the side channel."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.core import lease_message, lease_request
from pd_connector.core.counts import NUMBERS, Changes
from pd_connector.core.lease_message import Answer, NewEnd, decode, decode_answer, encode, encode_answer
from pd_connector.core.lease_request import MAX_BYTES, Refused, parse
from pd_connector.core.question import Unreadable
from pd_wire.lease import MAX_BATCH, MAX_SECONDS

TOKEN = "0123456789abcdef" * 2
TOKENS = st.text("0123456789abcdef", min_size=32, max_size=32)
BATCHES = st.lists(st.builds(NewEnd, TOKENS, st.integers(0, MAX_SECONDS)), min_size=1, max_size=50)


@given(BATCHES)
def test_a_batch_arrives_as_it_was_sent(batch: list[NewEnd]) -> None:
    assert lease_message.is_change(encode(batch))
    assert decode(encode(batch)) == batch
    sent = {"leases": [{"token": item.token, "seconds": item.seconds, "later": {}} for item in batch]}
    assert parse(json.dumps(sent).encode()) == batch


@given(st.lists(st.integers(0, MAX_SECONDS), min_size=1, max_size=50), st.booleans())
def test_an_answer_arrives_as_it_was_sent(left: list[int], ended: bool) -> None:
    assert decode_answer(encode_answer(Answer(left, ended)), len(left)) == Answer(left, ended)
    batch = [NewEnd(f"{number:032x}", 1) for number in range(len(left))]
    shown = json.loads(lease_request.answer(batch, left))
    assert shown == {"leases": [{"token": f"{at:032x}", "seconds": value} for at, value in enumerate(left)]}


GOOD = encode([NewEnd(TOKEN, 60), NewEnd(TOKEN, 0)])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"PDL1",
        b"PDL1\x01",
        b"PDL1\x00\x00",
        b"PDL2" + GOOD[4:],
        GOOD[:-1],
        GOOD + b"\x00",
        GOOD[:6],
        struct.pack("<4sH", b"PDL1", 3) + GOOD[6:],
        struct.pack("<4sH", b"PDL1", MAX_BATCH + 1) + GOOD[6:24] * (MAX_BATCH + 1),
        encode([NewEnd(TOKEN, MAX_SECONDS + 1)]),
        encode([NewEnd(TOKEN, 60), NewEnd(TOKEN, 0xFFFF)]),
    ],
)
def test_a_malformed_message_is_unreadable(message: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(message)


def test_the_largest_batch_is_readable() -> None:
    batch = [NewEnd(f"{number:032x}", MAX_SECONDS) for number in range(MAX_BATCH)]
    assert decode(encode(batch)) == batch
    body = json.dumps({"leases": [{"token": item.token, "seconds": item.seconds} for item in batch]})
    assert parse(body.encode()) == batch
    assert len(body) <= MAX_BYTES


@given(st.binary(max_size=80), st.integers(0, 200), st.integers(0, 255))
def test_what_is_bent_is_unreadable_or_another_batch(noise: bytes, at: int, value: int) -> None:
    message = bytearray(GOOD)
    message[at % len(message)] = value
    for bent in (bytes(message), GOOD[: at % len(GOOD)], GOOD + noise, noise, b"PDL1" + noise):
        try:
            batch = decode(bent)
        except Unreadable:
            continue
        assert encode(batch) == bent


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"PDM1",
        encode_answer(Answer([60])),
        encode_answer(Answer([1, 2, 3])),
        encode_answer(Answer([1, 2])) + b"x",
        b"PDL1\x02\x00\x00aaaa",
        b"PDM1\x03\x00\x00aaaa",
    ],
)
def test_an_answer_to_something_else_is_unreadable(message: bytes) -> None:
    with pytest.raises(Unreadable):
        decode_answer(message, 2)


def item(**changes: Any) -> dict[str, Any]:
    return {"leases": [{"token": TOKEN, "seconds": 1}, {"token": TOKEN, "seconds": 60, **changes}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (None, "leases"),
        ([], "leases"),
        ({}, "leases"),
        ({"leases": {}}, "leases"),
        ({"leases": []}, "leases"),
        ({"leases": [{"token": TOKEN, "seconds": 1}] * (MAX_BATCH + 1)}, "leases"),
        ({"leases": ["x"]}, "leases[0]"),
        *((item(token=value), "leases[1].token") for value in (None, 7, "", TOKEN[1:], TOKEN.upper(), TOKEN + "0")),
        *((item(token=value), "leases[1].token") for value in (TOKEN + "\n", "é" * 32, [TOKEN], "١" * 32)),
        *((item(seconds=value), "leases[1].seconds") for value in (None, True, "60", 1.0, -1, MAX_SECONDS + 1, [1])),
        (item(seconds=float("nan")), "leases[1].seconds"),
        (item(seconds=10**400), "leases[1].seconds"),
    ],
)
def test_a_malformed_body_is_refused_by_its_field(body: object, param: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(json.dumps(body).encode())
    assert (caught.value.param, caught.value.status) == (param, 400)
    error = json.loads(caught.value.body())["error"]
    assert error == {"message": str(caught.value), "type": "BadRequestError", "param": param, "code": 400}
    assert param in error["message"]
    assert TOKEN.upper() not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 60_000, b'{"leases": ' + b"9" * 9000 + b"}", b'{"a": NaN}{}']
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse(body)
    assert caught.value.status == 400


def test_a_long_body_is_refused() -> None:
    good = json.dumps(item()).encode()
    assert len(parse(good + b" " * (MAX_BYTES - len(good)))) == 2
    with pytest.raises(Refused) as caught:
        parse(good + b" " * (MAX_BYTES + 1 - len(good)))
    assert caught.value.status == 413


@given(st.binary(max_size=200))
def test_no_body_raises_anything_else(body: bytes) -> None:
    with pytest.raises(Refused):
        parse(body)


def test_numbers_are_told_when_they_change() -> None:
    changes = Changes()
    assert changes.of({"leases": 0, "leases_granted": 0}) == {"leases": [0], "leases_granted": [0]}
    assert changes.of({"leases": 2, "leases_granted": 3}) == {"leases": [2], "leases_granted": [3]}
    assert changes.of({"leases": 2, "leases_granted": 3}) == {}
    assert changes.of({"leases": 1, "leases_granted": 5}) == {"leases": [1], "leases_granted": [2]}
    assert all(number.name.startswith("vllm:pd_") for number in NUMBERS.values())
