"""Odd places of a handle in an answer: escaped keys, lines that are no data, events that are no JSON, errors."""

from __future__ import annotations

import json

import pytest

from pd_router.core.cutting import cut_event, strip_json, suspicious
from pd_router.core.errors import ApiError

HANDLE = b'{"remote_host":"MARKER"}'
KEYS = [
    b'"kv\\u005ftransfer_params"',
    b'"kv\\u005Ftransfer\\u005fparams"',
    b'"\\u006Bv_transfer_params"',
    b'"' + b"".join(b"\\u%04x" % code for code in b"kv_transfer_params") + b'"',
]


@pytest.mark.parametrize("key", KEYS)
def test_escapes_do_not_hide_the_key(key: bytes) -> None:
    body = b'{"id":"x","a":"\\u00e9",' + key + b" : " + HANDLE + b',"z":1}'
    assert suspicious(body)
    assert strip_json(body) == (b'{"id":"x","a":"\\u00e9","z":1}', {"remote_host": "MARKER"})
    cut = cut_event(b"data: " + body + b"\n\n")
    assert cut is not None
    assert cut.rest == b'data: {"id":"x","a":"\\u00e9","z":1}\n\n'
    assert cut.handle == {"remote_host": "MARKER"}


@pytest.mark.parametrize("key", [*KEYS, b'"kv_transfer_params"'])
def test_both_spellings_in_one_object_go(key: bytes) -> None:
    body = b'{"kv\\u005ftransfer_params":' + HANDLE + b"," + key + b":" + HANDLE + b"}"
    assert strip_json(body)[0] == b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"text":"\\"kv\\u005ftransfer_params\\":1 \\\\u005f"}',
        b'{"text":"\\u006b\\u0076"}',
        b'{"kv\\u005ftransfer":1}',
    ],
)
def test_content_with_escapes_stays(body: bytes) -> None:
    assert strip_json(body) == (body, None)


@pytest.mark.parametrize(
    "plain", [b'data: {"choices":[{"delta":{"content":"\\u00e9 \\u001b \\"error\\""}}]}\n\n', b": ping\n\n"]
)
def test_plain_events_are_not_suspicious(plain: bytes) -> None:
    assert not suspicious(plain)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_without_data_that_name_the_handle_go(end: bytes) -> None:
    lines = [
        b": kv_transfer_params MARKER",
        b"event: kv_transfer_params",
        b": ok",
        b"id: kv_transfer_params",
        b"data: {}",
    ]
    cut = cut_event(end.join(lines) + end + end)
    assert cut is not None
    assert cut.rest == b": ok" + end + b"data: {}" + end + end


def test_a_comment_alone_goes_altogether() -> None:
    cut = cut_event(b": kv_transfer_params " + HANDLE + b"\n\n")
    assert cut is not None
    assert cut.rest == b""


@pytest.mark.parametrize(
    "data",
    [b'kv_transfer_params={"remote_host":"MARKER"}', b'{"kv_transfer_params":' + HANDLE + b"} kv_transfer_params"],
)
def test_an_event_that_names_the_handle_and_is_no_json_is_withheld(data: bytes) -> None:
    assert cut_event(b"data: " + data + b"\n\n") is None


def test_an_error_event_tells_nothing_of_a_handle() -> None:
    for message in ("NIXL handshake with 10.1.2.3:5600 failed", "kv_transfer_params MARKER"):
        for code in (400, 500):
            event = b"data: " + json.dumps({"error": {"message": message, "code": code}}).encode() + b"\n\n"
            assert suspicious(event)
            cut = cut_event(event)
            assert cut is not None
            assert message.encode() not in cut.rest
            shown = json.loads(cut.rest.removeprefix(b"data: "))["error"]
            assert shown["code"] == code


def test_a_finish_reason_error_is_no_error_event() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}\n\n'
    cut = cut_event(event)
    assert cut is not None
    assert cut.rest == event


@pytest.mark.parametrize("text", [
    b'{"a":1,"kv_trans"kv_transfer_params":null,fer_params":{"remote_host":"secret"}}',
    b'{"kv_transfer_para"kv_transfer_params": {} ,ms":{"remote_host":"secret"},"b":1}',
])  # fmt: skip
def test_what_names_the_handle_only_after_the_cut_is_withheld(text: bytes) -> None:
    assert cut_event(b"data: " + text + b"\n\n") is None
    with pytest.raises(ApiError):
        strip_json(text)


ODD_ERRORS = [
    b'data: {"detail":"SECRETENGINE lost"}\n\n',
    b'data: {"detail":[{"loc":["a"],"msg":"SECRETENGINE"}]}\n\n',
    b'event: error\ndata: {"message":"peer 10.0.0.1:5600 SECRETENGINE"}\n\n',
    b'event:error\r\ndata: "SECRETENGINE"\r\n\r\n',
    b'event: error\ndata: {"choices":[],"text":"SECRETENGINE"}\n\n',
    b'data: {"message":"SECRETENGINE","type":"InternalServerError","code":500}\n\n',
    b'data: {"status":"lost","peer":"SECRETENGINE at 10.0.0.1:5600"}\n\n',
]


@pytest.mark.parametrize("event", ODD_ERRORS)
def test_an_error_in_another_shape_tells_nothing_either(event: bytes) -> None:
    cut = cut_event(event)
    assert cut is not None
    assert b"SECRET" not in cut.rest
    assert b"10.0.0.1" not in cut.rest
    assert json.loads(cut.rest.removeprefix(b"data: "))["error"]["message"]


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"{\\"detail\\":\\"at 10.0.0.1:5600\\"}"}}]}\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"10.0.0.1:5600"}\n\n',
        b": ping - 2025-01-01 00:00:00.123456+00:00\n\n",
        b'id: 17\nretry: 500\ndata: {"choices":[]}\n\n',
        b"data: [DONE]\n\n",
    ],
)
def test_an_event_of_an_api_stays_as_it_is(event: bytes) -> None:
    cut = cut_event(event)
    assert cut is not None
    assert cut.rest == event


SPELT = ["KV_TRANSFER_PARAMS", "Kv_Transfer_Params", "kvTransferParams", "kv-transfer-params", "ec_transfer_params"]


@pytest.mark.parametrize("name", SPELT)
def test_the_params_in_another_spelling_go(name: str) -> None:
    body = json.dumps({"choices": [{"a": 1, name: {"remote_host": "MARKER"}}], name: {"b": "MARKER"}, "n": 2**70})
    clean = {"choices": [{"a": 1}], "n": 2**70}
    assert suspicious(body.encode())
    assert json.loads(strip_json(body.encode())[0]) == clean
    cut = cut_event(b": x\ndata: " + body.encode() + b"\n\n")
    assert cut is not None
    assert cut.rest.startswith(b": x\ndata: {")
    assert json.loads(cut.rest[10:]) == clean


def test_a_handles_fields_in_the_open_go_and_a_tools_parameters_stay() -> None:
    fields = {"remote_engine_id": "MARKER", "remote_block_ids": [[1]], "do_remote_decode": True}
    tools = [{"parameters": {"properties": {"remote_host": {"type": "string"}}}}]
    said = {"content": '{"remote_host": "a client may say so"}'}
    choices = [{"index": 0, **fields}, {"delta": {**said, **fields}}, {"message": {**said, **fields}}]
    answer = {"choices": choices, **fields, "tools": tools}
    raw = json.dumps(answer).encode()
    assert suspicious(raw)
    clean = {"choices": [{"index": 0}, {"delta": said}, {"message": said}], "tools": tools}
    assert json.loads(strip_json(raw)[0]) == clean
    cut = cut_event(b"data: " + raw + b"\n\n")
    assert cut is not None
    assert json.loads(cut.rest[6:]) == clean
    kept = json.dumps({"object": "response", "tools": tools, "ec_transfer_params": None}).encode()
    assert strip_json(kept) == (kept, None)


@pytest.mark.parametrize("line", [b'id: {"remote_engine_id":"MARKER"}', b"id: MARKER@10.0.0.1:5600", b": at 10.0.0.1"])
def test_lines_that_are_no_data_and_tell_of_places_go(line: bytes) -> None:
    cut = cut_event(line + b'\ndata: {"choices":[]}\n\n')
    assert cut is not None
    assert cut.rest == b'data: {"choices":[]}\n\n'


def test_what_is_no_json_and_tells_of_places_is_withheld() -> None:
    assert cut_event(b"data: SECRETENGINE at 10.0.0.1:5600\n\n") is None
    with pytest.raises(ApiError):
        strip_json(b'{"remote_engine_id": SECRET')


def test_a_byte_order_mark_costs_no_content() -> None:
    event = b'\xef\xbb\xbfdata: {"choices":[{"delta":{"content":"yes"}}],"kv_transfer_params":' + HANDLE + b"}\n\n"
    cut = cut_event(event)
    assert cut is not None
    assert cut.handle == {"remote_host": "MARKER"}
    assert cut.rest == b'\xef\xbb\xbfdata: {"choices":[{"delta":{"content":"yes"}}]}\n\n'
