"""The endpoints with one engine: what goes to it, and what of its errors comes back."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.placement import Loads
from pd_router.core.settings import Timeouts
from pd_router.shell.context import Context
from pd_router.shell.passthrough import pass_through
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from support.canned_leg import CannedLeg


class _Engine(CannedLeg):
    """A context whose only engine gives one answer, and a responder that remembers what was sent."""

    def __init__(self, status: int, raw: bytes) -> None:
        headers = [(b"content-type", b"text/html"), (b"retry-after", b"7"), (b"x-engine-id", b"SECRET")]
        super().__init__(status, raw, headers)
        self.fleet = self.pool = self
        self.key, self.takes_work = "e", True
        self.answer: tuple[int, dict[bytes, bytes], bytes] = (0, {}, b"")

        self.settings = SimpleNamespace(timeouts=Timeouts())
        self.loads = Loads()
        self.guard = SimpleNamespace(is_own_fault=lambda _status: False)
        self.gone = self.started = False

    def abort(self) -> None:
        raise AssertionError("nobody left")

    def now(self) -> float:
        return 0.0

    def snapshot(self, _role: str, _now: float) -> list[_Engine]:
        return [self]

    def member(self, _key: str) -> _Engine:
        return self

    def request_id(self, _headers: object) -> str:
        return "id"

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.answer = (status, dict(headers), body)

    def send_error(self, error: ApiError, _headers: object = None, *, body: bytes | None = None) -> None:
        self.answer = (error.status, {}, error.body() if body is None else body)


def ask(engine: _Engine, body: bytes = b"{}", path: str = "/tokenize") -> tuple[int, dict[bytes, bytes], Any]:
    request = SimpleNamespace(method="POST", path=f"{path}?kv_transfer_params=evil", headers={}, body=body)
    asyncio.run(pass_through(cast(Context, engine), path, cast(Request, request), cast(Responder, engine)))
    status, headers, raw = engine.answer
    return status, headers, json.loads(raw)


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (422, 422), (429, 429), (500, 502), (503, 503)])
@pytest.mark.parametrize(
    "raw", [b"<html>SECRET</html>", b'{"detail":"kv_transfer_params SECRET"}', b'{"x":{"kv_transfer_params":"SECRET"}}']
)
def test_an_engines_error_comes_back_in_openais_shape_and_tells_nothing(status: int, seen: int, raw: bytes) -> None:
    got, headers, answer = ask(_Engine(status, raw))
    assert got == seen
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert "SECRET" not in str(answer) + str(headers)
    if 400 <= status < 500:
        assert headers == {b"content-type": b"application/json", b"retry-after": b"7"}


def test_a_clients_params_and_query_do_not_go_out_and_integers_keep_their_size() -> None:
    engine = _Engine(200, b'{"tokens":[1]}')
    big = 2**70
    body = {"prompt": "x", "messages": [{"n": big, "kv_transfer_params": {"remote_host": "evil"}}]}
    assert ask(engine, json.dumps(body).encode())[2] == {"tokens": [1]}
    head, sent = engine.asked
    assert head.startswith(b"POST /tokenize HTTP/1.1\r\n")
    assert b"evil" not in head + sent
    assert json.loads(sent) == {"prompt": "x", "messages": [{"n": big}]}


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 2000 + b"]" * 2000, b'{"a":"\\ud800"}'])
def test_what_is_no_json_is_refused_here(body: bytes) -> None:
    engine = _Engine(200, b"{}")
    assert ask(engine, body)[0] == 400
    assert engine.asked == (b"", b"")


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error")])
def test_errors_of_the_messages_api_have_its_shape(status: int, kind: str) -> None:
    engine = _Engine(status, b'{"type":"error","error":{"type":"BadRequestError","message":"no"}}')
    got, _, answer = ask(engine, path="/v1/messages/count_tokens")
    assert got == status
    assert answer == {"type": "error", "error": {"type": kind, "message": "no"}}
