"""What a client reads of an engine's error: its own words where they are harmless, and nothing of a handle ever."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_router.core.refusals import harmless, loggable, private_texts, told, told_in_stream

HANDLE = {
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "SECRETENGINE",
    "remote_request_id": "SECRETREQ",
    "remote_host": "10.1.2.3",
    "remote_port": 5999,
}
SECRETS = (b"SECRET", b"10.1.2.3", b"kv_transfer", b"remote_", b"tp_size")
BIG = "1 validation error\n  Value error [type=value_error, input_value="


def openai(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400, **fields}}


QUOTING: list[Any] = [
    openai(f"bad input {{'kv_transfer_params': {HANDLE!r}}}"),
    openai("NIXL handshake with 10.1.2.3:5600 (engine SECRETENGINE) failed for SECRETREQ"),
    openai("engine SECRETENGINE is gone"),
    openai("no blocks of SECRETREQ"),
    openai("cannot reach 10.1.2.3"),
    openai("fine", kv_transfer_params=HANDLE),
    openai("fine", param="kv_transfer_params"),
    openai("fine", type="SECRETENGINE"),
    openai("fine", code="SECRETENGINE"),
    openai("fine", code={"a": HANDLE}),
    {**openai("fine"), "kv_transfer_params": HANDLE},
    openai(BIG + "{'model': 'tiny', 'messag...rt': 5999, 'tp_size': 1}}, input_type=dict]"),
    openai(BIG + "{'model': 'tiny', 'messag...id': 'SECRETR'}}, input_type=dict] and so on"),
    {"detail": f"bad kv_transfer_params {HANDLE!r}"},
    {"detail": [{"loc": ["body"], "msg": "bad", "input": {"kv_transfer_params": HANDLE}}]},
    {"detail": [{"loc": ["body", "kv_transfer_params", "remote_host"], "msg": "bad"}]},
    {"detail": {"kv_transfer_params": HANDLE}},
    {"object": "error", "message": f"kv_transfer_params {HANDLE!r}", "code": 400},
    {"error": f"kv_transfer_params {HANDLE!r}"},
    [{"kv_transfer_params": HANDLE}],
    "kv_transfer_params SECRET",
    b'kv_transfer_params={"remote_host":"SECRET"}',
    b"<html>kv_transfer_params SECRETENGINE</html>",
    b'{"error": {"kv_transfer_params": {"remote_host": "SECRET',
    b'{"error":{"message":"x"},"kv\\u005ftransfer_params":{"remote_host":"SECRET"}}',
    b"",
    b"\xff",
]


def raw_of(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize("body", QUOTING, ids=lambda body: repr(body)[:60])
def test_nothing_of_the_handle_is_told_or_logged(body: Any) -> None:
    private = private_texts(json.dumps({"model": "m", "kv_transfer_params": HANDLE}).encode())
    shown = told(raw_of(body), private)
    assert not [word for word in SECRETS if word in shown], shown
    error = json.loads(shown)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    logged = loggable(raw_of(body)).encode()
    assert not [word for word in SECRETS if word in logged], logged


HARMLESS = [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    "max_tokens must be at least 1, got -1.",
    "The model `x/y-1.5B` does not exist.",
    "1 validation error: temperature: Should be a valid number [type=float_type, input_value='a', input_type=str]",
    "Prompt does not fit: KV cache has 100 blocks, 3:2 or 1.2.3 of them free at 12:30.",
]


@pytest.mark.parametrize("message", HARMLESS)
def test_harmless_words_reach_the_client_byte_by_byte(message: str) -> None:
    raw = json.dumps(openai(message), indent=1).encode()
    assert told(raw, {"SECRETENGINE"}) == raw


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "Not Found"}, "Not Found"),
        (
            {"detail": [{"loc": ["body", "n", 0], "msg": "Input should be positive", "input": HANDLE}, {"msg": "Two"}]},
            "body.n.0: Input should be positive; Two",
        ),
        ({"object": "error", "message": "Old shape", "type": "T", "code": 404}, "Old shape"),
        ({"error": "Unauthorized"}, "Unauthorized"),
    ],
)
def test_other_shapes_are_rewritten_with_their_words(body: Any, message: str) -> None:
    error = json.loads(told(raw_of(body)))["error"]
    assert error["message"] == message
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == body.get("code")


@pytest.mark.parametrize(
    "text",
    [
        "at 10.0.0.1",
        "at 10.0.0.1:80.",
        "at [fd00::1]:80",
        "at fe80:0:0:1::5",
        "at decode-0:5600",
        "tcp://x",
        "decode-0.engines.prod.svc",
        "engine 1b4e28ba-2fa1-11d2-883f-0016d3cca427",
        "request chatcmpl-abc",
        "id 0123456789abcdef01234567",
        "KVTransfer failed",
        "kv-transfer-params",
        "nixl",
        "pd_proof",
    ],
)
def test_texts_that_tell(text: str) -> None:
    assert not harmless(text)


def test_only_a_fault_of_the_request_keeps_its_message_in_a_stream() -> None:
    assert json.loads(told_in_stream(openai("too long")))["error"]["message"] == "too long"
    for event in (openai("boom", code=500), {"error": "boom"}, {"error": {"message": "boom"}}, {"object": "error"}):
        shown = json.loads(told_in_stream(event))["error"]
        assert "boom" not in shown["message"]
        assert shown["message"]
    assert b"10.1.2.3" not in told_in_stream(openai("NIXL with 10.1.2.3"))


QUOTED = [
    "failed on input PatientJohnDoe",
    "cannot tokenize PIN 4711",
    "bad prompt [15339, 1917, 40]",
    "cannot parse \\u043f\\u0430",
    "invalid api key sk-CANARY",
    "my ssn is 078-05-1120",
]


@pytest.mark.parametrize("words", QUOTED)
def test_no_word_of_an_engines_error_is_logged(words: str) -> None:
    for body in (openai(words), {"detail": words}, {"error": words}, openai("x", type=words, code=words), words):
        logged = loggable(raw_of(body))
        assert not [word for word in words.split() if len(word) > 2 and word in logged], logged
        assert logged.endswith(f"{len(raw_of(body))} bytes")


@pytest.mark.parametrize(
    ("body", "logged"),
    [
        (openai("boom", type="InternalServerError", code=500), "type InternalServerError, code 500, "),
        ({"object": "error", "message": "boom", "type": "server_error", "code": 503}, "type server_error, code 503, "),
        (openai("boom", type="SECRETError", code=471100), ""),
        (openai("boom", type="A" + 60 * "a" + "Error", code=True), ""),
        (openai("boom", type="Error one", code="500"), ""),
        ([1], ""),
        (b"<html>", ""),
    ],
)
def test_the_log_has_type_code_and_length(body: Any, logged: str) -> None:
    assert loggable(raw_of(body)) == f"{logged}{len(raw_of(body))} bytes"


LONG = ["x", "x.", "-", "1.", "pd", ":", "input_value={", "input_value={, input_type=", "a", "a:", "::", "cmpl-"]


@pytest.mark.parametrize("piece", LONG)
def test_a_long_text_is_looked_at_once(piece: str) -> None:
    """Looking further from each of its places would take hours: engines quote whole prompts."""
    raw = raw_of(openai(piece * 500_000))
    assert (told(raw) == raw) is (piece in ("x", "x.", "-", "1.", "pd", ":", "::", "input_value={"))
