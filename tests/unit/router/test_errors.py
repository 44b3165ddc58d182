"""Every refusal has its status, an OpenAI-style body, and Retry-After where coming back helps."""

from __future__ import annotations

import json

import pytest

from pd_router.core import errors
from pd_router.core.errors import ApiError, error_event
from pd_router.core.transcript import parse_events

TABLE: list[tuple[ApiError, int, str, int | None]] = [
    (errors.malformed("line 1"), 400, "malformed_json", None),
    (errors.bad_field("n", "an integer"), 400, "invalid_value", None),
    (errors.unknown_model("x", ["m"]), 404, "model_not_found", None),
    (errors.unknown_path("/x"), 404, "unknown_path", None),
    (errors.bad_method("PUT", "/v1/models", "GET"), 405, "bad_method", None),
    (errors.too_large(5), 413, "body_too_large", None),
    (errors.queue_full(10, 2), 429, "queue_full", 2),
    (errors.no_engine("decode", 5), 503, "no_engine", 5),
    (errors.engine_not_ready("prefill", 5), 503, "engine_not_ready", 5),
    (errors.upstream_failed("decode", "closed"), 502, "upstream_failed", None),
    (errors.upstream_timeout("decode", 1.5), 504, "upstream_timeout", None),
    (errors.internal(), 500, "internal_error", None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), TABLE)
def test_table(error: ApiError, status: int, code: str, retry_after: int | None) -> None:
    assert (error.status, error.code, error.retry_after) == (status, code, retry_after)
    body = json.loads(error.body())
    assert body == {"error": {"message": error.message, "type": error.type, "param": error.param, "code": code}}
    assert str(error) == error.message


def test_an_error_event_is_one_valid_event() -> None:
    error = errors.upstream_failed("decode", 'lost "it"\n\ndata: fake')
    event = error_event(error)
    assert event.startswith(b"data: ")
    assert event.count(b"\n\n") == 1
    assert parse_events(event) == [json.loads(error.body())]


def test_hostile_names_do_not_break_the_answer() -> None:
    error = errors.unknown_model("\ud83d" * 500, [f"m{n}" for n in range(100)])
    assert len(json.loads(error.body())["error"]["message"]) < 500
