"""Acceptance: streams cut anywhere come out byte for byte except for the handle, and their endings are told apart."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.sse import Ending, EventTooLarge, SseFilter, split_events
from unit.router.recorded import HANDLE, PLACES, STYLES, Recorded, big_stream, chunk, stream

EXHAUSTIVE = [
    *[stream(place, style) for place, style in zip(PLACES, STYLES * 2, strict=False)],
    *[stream(place, "last", "\r\n") for place in ("first", "finish", "extra")],
    stream("finish", "middle", "\n", ""),
    stream("finish", "first", "\n", " ", comments=True),
    stream("usage", "spaced", "\r\n", "", comments=True),
    stream("finish", "last", "\r"),
]
"""Each place, member position, line end and spelling at least once; every byte offset is tried on these."""

VARIANTS = [
    *EXHAUSTIVE,
    *[stream(place, style) for place in PLACES for style in STYLES],
    *[stream(place, "first", "\r\n") for place in PLACES],
    *[stream(place, "middle", "\n", "") for place in PLACES],
]
"""All combinations; cut at random and byte by byte."""


def relay(parts: list[bytes]) -> tuple[bytes, SseFilter]:
    stream = SseFilter()
    out = b"".join([stream.feed(part) for part in parts]) + stream.flush()
    return out, stream


def assert_clean(recorded: Recorded, parts: list[bytes]) -> None:
    out, seen = relay(parts)
    assert out == recorded.clean
    assert (seen.handle == HANDLE) is recorded.has_handle
    assert (seen.handle is None) is not recorded.has_handle


def named(recorded: Recorded) -> str:
    return recorded.name


@pytest.mark.parametrize("recorded", EXHAUSTIVE, ids=named)
def test_cut_at_every_byte_offset(recorded: Recorded) -> None:
    raw = recorded.raw
    for at in range(len(raw) + 1):
        out, seen = relay([raw[:at], raw[at:]])
        if out != recorded.clean or (seen.handle == HANDLE) is not recorded.has_handle:
            pytest.fail(f"cut at {at}")


@pytest.mark.parametrize("recorded", VARIANTS, ids=named)
def test_byte_by_byte_and_event_by_event(recorded: Recorded) -> None:
    assert_clean(recorded, [recorded.raw[at : at + 1] for at in range(len(recorded.raw))])
    assert_clean(recorded, split_events(recorded.raw))
    assert_clean(recorded, [recorded.raw])


@pytest.mark.parametrize("recorded", EXHAUSTIVE, ids=named)
def test_an_event_goes_out_with_its_last_byte(recorded: Recorded) -> None:
    blank = recorded.raw[-2:] if recorded.raw[-4:] != b"\r\n\r\n" else b"\r\n\r\n"
    dirty, clean = recorded.raw.split(blank), recorded.clean.split(blank)
    seen, at = SseFilter(), 0
    for before, after in zip(dirty[:-1], clean[:-1], strict=True):
        event = before + blank
        for byte in range(len(event) - 1):
            assert seen.feed(event[byte : byte + 1]) == b""
        assert seen.feed(event[-1:]) == after + blank
        at += len(event)
    assert at == len(recorded.raw)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), recorded=st.sampled_from(VARIANTS))
def test_cut_into_many_parts(data: st.DataObject, recorded: Recorded) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(recorded.raw)), max_size=30)))
    parts = [recorded.raw[low:high] for low, high in zip([0, *cuts], [*cuts, len(recorded.raw)], strict=True)]
    assert_clean(recorded, parts)


def test_an_event_of_300_kb_cut_around_every_edge_and_at_a_sample_of_offsets() -> None:
    recorded = big_stream()
    raw = recorded.raw
    key = raw.index(b'"kv_transfer_params"')
    edges = {0, len(raw), key, key + 20, raw.index(b"MARKER")}
    at = -1
    while (at := raw.find(b"\n\n", at + 1)) >= 0:
        edges.add(at)
    offsets = {edge + step for edge in edges for step in range(-4, 5)}
    offsets |= set(random.Random(7).sample(range(len(raw)), 60))
    for cut in sorted(offset for offset in offsets if 0 <= offset <= len(raw)):
        assert_clean(recorded, [raw[:cut], raw[cut:]])


def test_a_long_event_in_small_reads_costs_time_in_proportion_to_its_length() -> None:
    def spent(size: int) -> float:
        raw = big_stream(size).raw
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            relay([raw[at : at + 64] for at in range(0, len(raw), 64)])
            best = min(best, time.process_time() - began)
        return best

    # Eight times as long: 64 times the work if each read looked at everything again.
    assert spent(1_600_000) < 24 * spent(200_000)


@pytest.mark.parametrize("place", PLACES)
def test_last_event_without_its_blank_line(place: str) -> None:
    recorded = stream(place)
    out, seen = relay([recorded.raw.removesuffix(b"\n\n")])
    assert out == recorded.clean.removesuffix(b"\n\n")
    assert seen.ending() is Ending.CLEAN


def test_last_event_without_blank_line_may_hold_the_handle() -> None:
    raw = stream("extra").raw.removesuffix(b"data: [DONE]\n\n").removesuffix(b"\n")
    out, seen = relay([raw])
    assert b"MARKER" not in out
    assert seen.handle == HANDLE


def test_handle_spread_over_data_lines() -> None:
    raw = (
        b'data: {"choices":[],\r\n: note\r\ndata:"kv_transfer_params":\r\ndata: {"remote_host":"MARKER",\r\n'
        b'data: "a":[1,\r\ndata: 2]}\r\ndata: ,"x":1}\r\n\r\n'
    )
    out, seen = relay([raw])
    assert seen.handle == {"remote_host": "MARKER", "a": [1, 2]}
    assert b"MARKER" not in out
    assert b"kv_transfer_params" not in out
    assert out.count(b"\r\n") == raw.count(b"\r\n")
    lines = [line.removeprefix(b"data:") for line in out.split(b"\r\n") if line.startswith(b"data:")]
    assert b"".join(b"".join(lines).split()) == b'{"choices":[],"x":1}'


@pytest.mark.parametrize(
    ("payload", "left"),
    [
        (b'{"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}', b"{}"),
        (b'{"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2},"x":1}', b'{"x":1}'),
        (b'{"x":1,"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}', b'{"x":1}'),
        (
            b'{"choices":[{"kv_transfer_params":{"a":1},"index":0}],"kv_transfer_params":{"b":2}}',
            b'{"choices":[{"index":0}]}',
        ),
        (b'{"x":["kv_transfer_params"],"kv_transfer_params":{"b":2}}', b'{"x":["kv_transfer_params"]}'),
        (b'{"x":"\\"kv_transfer_params\\":1","kv_transfer_params":{"b":2}}', b'{"x":"\\"kv_transfer_params\\":1"}'),
        (b'{"x\\"kv_transfer_params":1,"kv_transfer_params":{"b":2}}', b'{"x\\"kv_transfer_params":1}'),
        (b'{"kv_transfer_params" : {"b":2}\t,\t"x":1}', b'{\t"x":1}'),
    ],
)
def test_every_member_of_that_name_goes(payload: bytes, left: bytes) -> None:
    out, seen = relay([b"data: " + payload + b"\n\n"])
    assert out == b"data: " + left + b"\n\n"
    assert seen.handle == {"b": 2}


@pytest.mark.parametrize("value", ['{"remote_host":"MARKER', '{"a":MARKER}', '"MARKER', "", "[" * 100_000 + "MARKER"])
def test_what_cannot_be_read_is_withheld_and_never_clean(value: str) -> None:
    head = stream("absent").raw.removesuffix(b"data: [DONE]\n\n")
    bad = f'data: {{"choices":[],"kv_transfer_params":{value}}}\n\ndata: [DONE]\n\n'.encode()
    out, seen = relay([head + bad])
    assert b"MARKER" not in out
    assert out == head + b"data: [DONE]\n\n"
    assert seen.poisoned
    assert seen.ending() is Ending.TRUNCATED


def test_an_error_event_that_quotes_the_handle_is_rewritten() -> None:
    quoted = "bad: {'kv_transfer_params': {'remote_host': 'MARKER'}}"
    raw = f'data: {{"error":{{"message":"{quoted}","type":"E","code":400}}}}\n\n'
    out, seen = relay([raw.encode()])
    assert b"MARKER" not in out
    assert b'"code":400' in out
    assert seen.error is not None


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"NIXL handshake with MARKER:5600 failed","code":500}}\n\n',
        b'data: {"kv\\u005ftransfer_params":{"remote_host":"MARKER"},"choices":[]}\n\n',
        b'data: {"\\u006bv_transfer_params":{"remote_host":"MARKER"},"choices":[]}\n\n',
        b": kv_transfer_params MARKER\n\n",
    ],
)
def test_what_only_looks_plain_is_cleaned_on_every_way(event: bytes, started: bool) -> None:
    head = stream("absent").raw.removesuffix(b"data: [DONE]\n\n") if started else b""
    for parts in ([head, event], [head + event], [head + event[:9], event[9:]]):
        assert b"MARKER" not in relay(parts)[0]
    seen = SseFilter()
    seen.feed(head)
    sent: list[bytes] = []
    assert not seen.passer(sent.append)(b"%x\r\n%b\r\n" % (len(event), event)) or b"MARKER" not in b"".join(sent)


def test_content_may_talk_about_the_field() -> None:
    raw = stream("absent").raw
    assert raw.count(b"kv_transfer_params") == 2
    assert relay([raw])[0] == raw


def test_a_handle_keeps_integers_of_any_size_in_its_text() -> None:
    raw = b'data: {"kv_transfer_params":{"big":123456789012345678901234567890,"f":1.10}}\n\n'
    seen = relay([raw])[1]
    assert seen.handle is not None
    assert seen.handle.raw == b'{"big":123456789012345678901234567890,"f":1.10}'


# -- when may the first byte go out --------------------------------------------------------------


def event(delta: str, finish: str = "null") -> bytes:
    return f"data: {chunk(delta, finish)}\n\n".encode()


ROLE = event('{"role":"assistant","content":""}')
ERROR = b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\n'


@pytest.mark.parametrize(
    "first",
    [
        '{"content":"x"}',
        '{"reasoning":"x"}',
        '{"reasoning_content":"x"}',
        '{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":""}}]}',
        '{"refusal":"no"}',
    ],
)
def test_starts_with_the_first_content(first: str) -> None:
    seen = SseFilter()
    seen.feed(b": ping\n\n" + ROLE)
    assert not seen.started
    seen.feed(event(first))
    assert seen.started
    assert seen.error is None


def test_starts_with_a_finish_without_content_and_with_completion_text() -> None:
    for payload in (chunk("{}", '"stop"'), '{"choices":[{"index":0,"text":"a","finish_reason":null}]}'):
        seen = SseFilter()
        seen.feed(f"data: {payload}\n\n".encode())
        assert seen.started


def test_an_error_before_content_is_known_at_once() -> None:
    seen = SseFilter()
    assert seen.feed(ROLE + ERROR + b"data: [DONE]\n\n")
    assert seen.started
    assert seen.error is not None
    assert seen.error["code"] == 500
    assert seen.ending() is Ending.ERROR_EVENT


def test_done_alone_is_no_start() -> None:
    out, seen = relay([ROLE, b"data: [DONE]\n\n"])
    assert not seen.started
    assert seen.ending() is Ending.TRUNCATED
    assert out.endswith(b"data: [DONE]\n\n")


TOKEN = event('{"content":"x"}')
DONE = b"data: [DONE]\n\n"


def finish(reason: str) -> bytes:
    return event('{"content":""}', f'"{reason}"')


@pytest.mark.parametrize(
    ("events", "complete", "aborted", "ending"),
    [
        ([TOKEN, finish("stop"), DONE], True, False, Ending.CLEAN),
        ([TOKEN, finish("length"), DONE], True, False, Ending.CLEAN),
        ([TOKEN, finish("tool_calls"), DONE], False, False, Ending.CLEAN),
        ([TOKEN, finish("stop")], True, False, Ending.CLEAN),
        ([TOKEN, finish("stop")], False, False, Ending.TRUNCATED),
        ([TOKEN], True, False, Ending.TRUNCATED),
        ([TOKEN, DONE], True, False, Ending.TRUNCATED),
        ([], True, False, Ending.TRUNCATED),
        ([TOKEN, finish("error"), DONE], True, False, Ending.ERROR_FINISH),
        ([TOKEN, finish("abort"), DONE], True, False, Ending.ABORTED),
        ([TOKEN, ERROR, DONE], True, False, Ending.ERROR_EVENT),
        ([ERROR], True, False, Ending.ERROR_EVENT),
        ([TOKEN, finish("stop"), ERROR, DONE], True, False, Ending.ERROR_EVENT),
        ([TOKEN, b'data: {"object":"error","message":"old shape"}\n\n', DONE], True, False, Ending.ERROR_EVENT),
        ([TOKEN, finish("stop"), DONE], True, True, Ending.ABORTED),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_endings(events: list[bytes], complete: bool, aborted: bool, ending: Ending, together: bool) -> None:
    seen = relay([b"".join(events)] if together else events)[1]
    assert seen.ending(complete=complete, aborted=aborted) is ending


def test_one_of_two_choices_unfinished_is_truncated() -> None:
    other = TOKEN.replace(b'"index":0', b'"index":1')
    seen = relay([TOKEN, other, finish("stop"), DONE])[1]
    assert seen.ending() is Ending.TRUNCATED
    assert seen.reply() is None


# -- bounds --------------------------------------------------------------------------------------
def test_a_stream_over_the_cap_is_relayed_and_not_linked() -> None:
    seen = SseFilter(max_kept=50_000)
    sent = [TOKEN] * 2_000 + [finish("stop"), DONE]
    assert b"".join([seen.feed(event) for event in sent]) == b"".join(sent)
    assert seen.ending() is Ending.CLEAN
    assert seen.reply() is None


def test_an_event_without_end_is_refused() -> None:
    seen = SseFilter(max_event=1_000)
    for _ in range(50):
        assert seen.feed(b"data: xxxxxxxxxxxxxx") == b""
    with pytest.raises(EventTooLarge):
        seen.feed(b"x")


def test_reading_before_the_end_does_not_freeze_the_answer() -> None:
    seen = SseFilter()
    seen.feed(TOKEN)
    assert seen.ending() is Ending.TRUNCATED
    seen.feed(finish("stop"))
    seen.feed(DONE)
    assert seen.ending() is Ending.CLEAN
    assert seen.done
    assert seen.response_id == "chatcmpl-1"
    assert seen.finish_reasons == ("stop",)
