"""What P may answer: a completion, however odd its usage; anything else fails the leg so that it can be tried again."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from pd_router.core.fields import Api
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed, Prefilled, prefill, request_head
from pd_router.shell.upstream import EnginePool
from support.canned_leg import CannedLeg

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 20,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
}
CHOICE = {"finish_reason": "length"}


def run(answer: Any, status: int = 200, api: Api = Api.CHAT) -> Prefilled:
    raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    engine = CannedLeg(status, raw)
    return asyncio.run(prefill(cast(EnginePool, engine), cast(Member, engine), b"", b"", 1.0, api, {"10.0.0.1"}))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"\xff",
        None,
        [1],
        "x",
        {},
        {"choices": None},
        {"choices": []},
        {"choices": {}},
        {"choices": {"0": 1}},
        {"choices": "x"},
        {"choices": [None]},
        {"choices": ["x"]},
        {"choices": [[CHOICE]]},
        {"choices": 5, "kv_transfer_params": PARAMS},
    ],
    ids=repr,
)
def test_what_is_no_completion_fails_the_leg_and_may_be_tried_again(answer: Any) -> None:
    with pytest.raises(LegFailed) as failed:
        run(answer)
    assert (failed.value.reason, failed.value.retryable, failed.value.engine_fault) == ("malformed_answer", True, True)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}, (5, 3)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, (5, None)),
        (None, (None, None)),
        ("x", (None, None)),
        ([1], (None, None)),
        (7, (None, None)),
        ({"prompt_tokens": "x"}, (None, None)),
        ({"prompt_tokens": True}, (None, None)),
        ({"prompt_tokens": 1.5}, (None, None)),
        ({"prompt_tokens": -1}, (None, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": [1]}, (5, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": "x"}, (5, None)),
        ({"prompt_tokens": [5], "prompt_tokens_details": {"cached_tokens": "zz"}}, (None, None)),
    ],
)
def test_usage_of_a_wrong_type_is_unknown_usage(usage: Any, counts: Any) -> None:
    result = run({"choices": [CHOICE], "usage": usage, "kv_transfer_params": PARAMS})
    assert (result.prompt_tokens, result.cached_tokens) == counts
    assert result.params == PARAMS


@pytest.mark.parametrize(
    "params", [None, [1], "x", 5, {}, {"do_remote_prefill": False}, {"do_remote_prefill": 1}, {"do_remote_prefill": []}]
)
def test_params_that_offer_nothing_are_none(params: Any) -> None:
    assert run({"choices": [CHOICE], "kv_transfer_params": params}).params is None


BAD_PARAMS: dict[str, dict[str, Any]] = {
    "host null": {"remote_host": None},
    "blocks null": {"remote_block_ids": None},
    "blocks as text": {"remote_block_ids": "1,2"},
    "blocks below 0": {"remote_block_ids": [[-1]]},
    "blocks as floats": {"remote_block_ids": [[1.5]]},
    "ragged blocks": {"remote_block_ids": [[1, [2]], 3]},
    "a block twice": {"remote_block_ids": [[1, 1]]},
    "port as text": {"remote_port": "5600"},
    "no engine": {"remote_engine_id": None},
    "both flags": {"do_remote_decode": True},
    "too many tokens": {"remote_num_tokens": 10**9},
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_params_that_would_end_decode_fail_the_leg(name: str) -> None:
    with pytest.raises(LegFailed) as failed:
        run({"choices": [CHOICE], "kv_transfer_params": PARAMS | BAD_PARAMS[name]})
    assert (failed.value.reason, failed.value.retryable, failed.value.engine_fault) == ("malformed_handle", True, True)
    assert failed.value.answer.status == 502
    assert "remote" not in failed.value.answer.message


def test_params_that_send_decode_elsewhere_fail_the_leg() -> None:
    for host in ("169.254.169.254", "localhost", "10.0.0.1.", "2130706433"):
        with pytest.raises(LegFailed) as failed:
            run({"choices": [CHOICE], "kv_transfer_params": {**PARAMS, "remote_host": host}})
        assert (failed.value.reason, failed.value.retryable) == ("foreign_host", True)
        assert host not in failed.value.answer.message


@pytest.mark.parametrize("groups", [[], [[]], [[], []]])
def test_where_no_block_was_kept_there_is_nothing_to_read(groups: Any) -> None:
    params = {**PARAMS, "remote_block_ids": groups, "remote_num_tokens": 0}
    assert run({"choices": [CHOICE], "kv_transfer_params": params}).params is None


@pytest.mark.parametrize("report", [None, [1], "x", {}, {"verdict": []}, {"verdict": "proven", "reason": None}])
def test_an_unreadable_report_is_no_report(report: Any) -> None:
    assert run({"choices": [CHOICE], "kv_transfer_params": {**PARAMS, "pd_report": report}}).report is None


@pytest.mark.parametrize("reason", ["error", ["error"], {}, 5, None])
def test_only_the_finish_reason_error_is_an_error(reason: Any) -> None:
    answer = {"choices": [{"finish_reason": reason}], "kv_transfer_params": PARAMS}
    if reason == "error":
        with pytest.raises(LegFailed, match="error_finish"):
            run(answer)
    else:
        assert run(answer).params == PARAMS


RESPONSE = {"object": "response", "status": "incomplete", "output": [], "kv_transfer_params": PARAMS}
MESSAGE = {"type": "message", "content": [], "stop_reason": "max_tokens", "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    ("api", "answer", "usage", "counts"),
    [
        (Api.RESPONSES, RESPONSE, {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        (Api.RESPONSES, {**RESPONSE, "status": "completed"}, {"input_tokens": 9}, (9, None)),
        (Api.RESPONSES, RESPONSE, {"input_tokens": "9", "input_tokens_details": 5}, (None, None)),
        (Api.RESPONSES, RESPONSE, None, (None, None)),
        (Api.MESSAGES, MESSAGE, {"input_tokens": 5, "cache_read_input_tokens": 4}, (9, 4)),
        (Api.MESSAGES, MESSAGE, {"input_tokens": 5, "cache_creation_input_tokens": 4}, (9, None)),
        (Api.MESSAGES, MESSAGE, {"input_tokens": [5]}, (None, None)),
        (Api.MESSAGES, MESSAGE, None, (None, None)),
    ],
)
def test_answers_of_the_other_apis(api: Api, answer: dict[str, Any], usage: Any, counts: Any) -> None:
    result = run({**answer, "usage": usage}, api=api)
    assert (result.prompt_tokens, result.cached_tokens) == counts
    assert result.params == PARAMS


@pytest.mark.parametrize(
    ("api", "answer", "reason"),
    [
        (Api.RESPONSES, {**RESPONSE, "status": "failed"}, "error_finish"),
        (Api.RESPONSES, {**RESPONSE, "status": "cancelled"}, "error_finish"),
        (Api.RESPONSES, {**RESPONSE, "status": ["completed"]}, "error_finish"),
        (Api.RESPONSES, {**RESPONSE, "output": None}, "malformed_answer"),
        (Api.RESPONSES, {"choices": [CHOICE]}, "malformed_answer"),
        (Api.MESSAGES, {**MESSAGE, "stop_reason": None}, "error_finish"),
        (Api.MESSAGES, {**MESSAGE, "content": "x"}, "malformed_answer"),
        (Api.MESSAGES, RESPONSE, "malformed_answer"),
        (Api.MESSAGES, [], "malformed_answer"),
    ],
)
def test_failed_answers_of_the_other_apis(api: Api, answer: Any, reason: str) -> None:
    with pytest.raises(LegFailed) as failed:
        run(answer, api=api)
    assert failed.value.reason == reason
    assert failed.value.retryable


@pytest.mark.parametrize(
    "target",
    [
        "/v1/completions",
        "/v1/completions?kv_transfer_params=evil",
        "/v1/completions#evil",
        "/v1/completions?",
        "http://evil/v1/completions?a=evil",
    ],
)
def test_an_engine_is_sent_the_path_alone(target: str) -> None:
    head = request_head(target, cast(Member, CannedLeg(200, b"")), {}, "id", 0)
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"evil" not in head
