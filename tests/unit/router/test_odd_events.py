"""Events in the middle of a stream that are not as their API has them: none passes unseen, whichever way it comes."""

from __future__ import annotations

import json

import pytest

from pd_router.core.dialect import DIALECTS
from pd_router.core.fields import Api
from pd_router.core.sse import Ending, SseFilter


def chunk(text: str, **fields: object) -> bytes:
    made = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}
    return b"data: " + json.dumps(made, separators=(",", ":")).encode() + b"\n\n"


TOKEN = chunk("yes")
RESPONSE = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"yes"}\n\n'
MESSAGE = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"yes"}}\n\n'
)
HONEST = {Api.CHAT: TOKEN, Api.COMPLETIONS: TOKEN, Api.RESPONSES: RESPONSE, Api.MESSAGES: MESSAGE}
ERRORS = [
    b'data: {"detail":"SECRETENGINE lost"}\n\n',
    b'event: error\ndata: {"message":"peer 10.0.0.1:5600 SECRETENGINE"}\n\n',
    b'data: {"message":"SECRETENGINE","type":"InternalServerError","code":500}\n\n',
]
TELLING = [
    chunk("a", KV_TRANSFER_PARAMS={"remote_host": "SECRETENGINE"}),
    chunk("a", kvTransferParams={"remote_host": "SECRETENGINE"}),
    chunk("a", remote_engine_id="SECRETENGINE", remote_block_ids=[[1]]),
    b'id: {"remote_engine_id":"SECRETENGINE"}\n' + chunk("a"),
    b"\xef\xbb\xbf" + chunk("a", kv_transfer_params={"remote_host": "SECRETENGINE"}),
]


def framed(*events: bytes) -> bytes:
    """One HTTP chunk per event."""
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def relay(api: Api, events: list[bytes], *, together: bool) -> tuple[bytes, SseFilter]:
    """As the relay does it: the first read by `feed`, then the lane, and `feed` for what that declines."""
    stream = SseFilter(dialect=DIALECTS[api])
    out = [stream.feed(HONEST[api])]
    lane = stream.passer(lambda data: out.append(data.replace(b"\r\n", b"\n")))
    for read in [events] if together else [[event] for event in events]:
        if not lane(framed(*read)):
            out.append(stream.feed(b"".join(read)))
    out.append(stream.flush())
    return b"".join(out), stream


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("event", ERRORS)
@pytest.mark.parametrize("api", Api)
def test_an_odd_error_tells_nothing_and_ends_the_stream_badly(api: Api, event: bytes, together: bool) -> None:
    honest = HONEST[api]
    out, stream = relay(api, [honest, honest, event, honest], together=together)
    assert b"SECRET" not in out
    assert b"10.0.0.1" not in out
    assert b'"error"' in out
    assert out.count(b"yes") == 4
    assert stream.ending() is Ending.ERROR_EVENT


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("event", TELLING)
def test_a_handle_in_the_open_goes_and_the_text_stays(event: bytes, together: bool) -> None:
    out, _ = relay(Api.CHAT, [TOKEN, event, TOKEN], together=together)
    assert b"SECRET" not in out
    assert out.count(b'"content":"a"') == 1
    assert out.count(b"yes") == 3


@pytest.mark.parametrize("api", Api)
def test_a_long_read_with_an_odd_event_in_its_middle(api: Api) -> None:
    honest = HONEST[api]
    for event in ERRORS:
        stream = SseFilter(dialect=DIALECTS[api])
        out = stream.feed(honest * 100 + event + honest * 100)
        assert b"SECRET" not in out
        assert out.count(b"yes") == 200


def test_words_that_look_alike_pass_as_they_came() -> None:
    words = ["transfer\n", 'a "remote_host" of', '{"detail": "at 10.0.0.1:5600"}', "KV_TRANSFER_PARAMS\n", "\ufeff"]
    events = [chunk(word) for word in words]
    for together in (False, True):
        stream = SseFilter()
        out = b"".join(map(stream.feed, [b"".join(events)] if together else events))
        assert out == b"".join(events)
