"""The short cut for framed reads says and keeps what the long way says and keeps, however the bytes are cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.sse import SseFilter

HANDLE = {"remote_block_ids": [[1, 2]], "remote_engine_id": "e", "remote_request_id": "r"}


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {"content": text} if text is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [choice], **more}) + b"\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


FIRST = event("Hello")
LAST = [event("", "stop", kv_transfer_params=HANDLE), b"data: [DONE]\n\n"]


def bodies_of(read: bytes) -> list[bytes]:
    """A patient parser of whole chunks."""
    bodies = []
    while read:
        line, rest = read.split(b"\r\n", 1)
        size = int(line, 16)
        bodies.append(rest[:size])
        assert rest[size : size + 2] == b"\r\n"
        read = rest[size + 2 :]
    return bodies


def relay(reads: list[bytes], short_cut: bool) -> tuple[bytes, SseFilter, int]:
    """What the client gets, the filter, and how many reads took the short cut."""
    stream, sent, taken = SseFilter(), [], 0
    sent.append(stream.feed(FIRST))
    passed = stream.passer(lambda framed: sent.extend(bodies_of(framed)))
    for read in reads:
        if short_cut and passed(read):
            taken += 1
        else:
            sent.append(stream.feed(b"".join(bodies_of(read))))
    sent.append(stream.flush())
    return b"".join(sent), stream, taken


texts = st.text(st.sampled_from('ab "\\é漢😀\n{}[]') | st.characters(codec="utf-8"), max_size=12)
tricky = st.sampled_from(["[DONE]", "kv_transfer_params", "}\n\n", "data: x"])
middles = st.lists(
    st.one_of((texts | tricky).map(event), st.just(b": ping\n\n"), st.just(event("x", kv_transfer_params=HANDLE))),
    max_size=12,
)


@given(middles, st.data())
def test_any_grouping_gives_the_same(events: list[bytes], data: st.DataObject) -> None:
    whole = b"".join([*events, *LAST])
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8).map(sorted))
    at_events = data.draw(st.booleans())
    pieces = (
        [*events, *LAST]
        if at_events
        else [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if b > a]
    )
    reads: list[bytes] = []
    while pieces:
        count = data.draw(st.integers(1, 3))
        reads.append(b"".join(chunk(piece) for piece in pieces[:count]))
        pieces = pieces[count:]
    short, short_filter, _ = relay(reads, short_cut=True)
    long, long_filter, _ = relay(reads, short_cut=False)
    assert short == long
    assert b'"kv_transfer_params":' not in short
    assert short_filter.handle == long_filter.handle == HANDLE
    assert short_filter.reply() == long_filter.reply()
    assert short_filter.ending() is long_filter.ending()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_plain_tokens_take_the_short_cut(count: int) -> None:
    reads = [b"".join(chunk(event(f"token{n}")) for n in range(count)) for _ in range(4)]
    assert relay(reads, short_cut=True)[2] == 4


def test_a_large_event_takes_it_too() -> None:
    assert relay([chunk(event("x" * 300_000))], short_cut=True)[2] == 1


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(chunk(event("a", kv_transfer_params=HANDLE)), id="handle"),
        pytest.param(chunk(b"data: [DONE]\n\n"), id="done"),
        pytest.param(chunk(event("a"))[:-1], id="cut in its frame"),
        pytest.param(chunk(event("a")) + b"0\r\n\r\n", id="with the last chunk"),
        pytest.param(chunk(event("a")[:-1]), id="event not over"),
        pytest.param(chunk(event("a")) + chunk(event("b")[:9]) + chunk(event("b")[9:]), id="event over two chunks"),
        pytest.param(b"+" + chunk(event("a")), id="signed size"),
        pytest.param(chunk(event("a")).replace(b"\r\n", b";x=1\r\n", 1), id="chunk extension"),
        pytest.param(b"1_0\r\n" + b"x" * 14 + b"\n\n\r\n", id="underscore"),
        pytest.param(b"\n\n\r\n", id="no size"),
        pytest.param(
            chunk(event("a").replace(b'"a"', b'"a\n: kv_transfer_params\nb"')), id="line of its own among the letters"
        ),
    ],
)
def test_what_is_not_plain_is_left_alone(read: bytes) -> None:
    stream = SseFilter()
    stream.feed(FIRST)
    assert stream.passer(lambda _: pytest.fail("nothing may be written"))(read) is False


def test_nothing_passes_in_the_middle_of_an_event() -> None:
    stream = SseFilter()
    stream.feed(FIRST)
    stream.feed(event("half")[:10])
    assert stream.passer(lambda _: pytest.fail("nothing may be written"))(chunk(event("a"))) is False


def test_a_long_stream_is_bounded_and_has_no_reply() -> None:
    stream = SseFilter(max_kept=2_000)
    stream.feed(FIRST)
    passed = stream.passer(lambda _: None)
    for n in range(100):
        assert passed(chunk(event(f"token {n} " + "x" * 50)))
    assert sum(len(one) for one in (*stream._events, *stream._letters)) < 4_000
    for last in LAST:
        stream.feed(last)
    assert stream.reply() is None
    assert stream.handle == HANDLE


def test_of_tokens_only_the_letters_are_kept() -> None:
    reads = [chunk(event(text)) for text in ("Hi", " there", "\n", '"', " one", " more", "é", "")]
    _, stream, taken = relay(reads, short_cut=True)
    assert taken == len(reads)
    assert len(stream._events) == 4  # the first, "Hi there", and two with escapes
    assert stream._letters == [b" one", b" more", "é".encode(), b""]
    stream.feed(LAST[0])
    reply = stream.reply()
    assert reply is not None
    assert reply.message["content"] == 'HelloHi there\n" one moreé'


ODD = [
    event("x", kv_transfer_params=HANDLE),
    event("x", usage={"prompt_tokens": 3}),
    event("kv_transfer_params"),
    event('said "kv_transfer_params": 1'),
    event("x").replace(b'"x"', rb'"x\u006b\u0076_transfer_params"'),
    event("x").replace(b'"x"', b'"x","kv_transfer_params":{"remote_engine_id":"e"},"y":"z"'),
    event("x").replace(b'"x"', b'"x'),
    event("x").replace(b"\n\n", b"\r\n\r\n"),
    b'data: {"error":{"message":"no","code":500}}\n\n',
    b": kv_transfer_params\n\n",
    event('line\nend \\ and "'),
    event(None),
]


@given(st.lists(st.sampled_from(ODD) | texts.map(event), max_size=4), st.integers(0, 60), st.booleans())
def test_many_events_at_once_are_as_the_same_one_by_one(odd: list[bytes], at: int, counting: bool) -> None:
    tokens = [event(f"token {n} ") for n in range(60)]
    events = [FIRST, *tokens[:at], *odd, *tokens[at:], *LAST]
    at_once, one_by_one = (SseFilter(correct=(lambda text: text) if counting else None) for _ in range(2))
    sent = at_once.feed(b"".join(events)) + at_once.flush()
    assert sent == b"".join([*map(one_by_one.feed, events), one_by_one.flush()])
    assert (at_once.handle, at_once.error, at_once.poisoned, at_once.started) == (
        one_by_one.handle,
        one_by_one.error,
        one_by_one.poisoned,
        one_by_one.started,
    )
    assert at_once.reply() == one_by_one.reply()
    assert at_once.ending() is one_by_one.ending()
    assert at_once.usage == one_by_one.usage


def test_of_many_tokens_at_once_the_letters_are_kept() -> None:
    stream = SseFilter()
    stream.feed(b"".join([FIRST, *(event(f"token {n} ") for n in range(60)), *LAST]))
    assert len(stream._events) == 2
    assert sum(map(len, stream._events)) < 1_500
    assert stream.handle == HANDLE
