"""Streams, faults, aborts and the small endpoints of a fake engine."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from support.fake_engine import SECRET, AnswerStyle, Behaviour, FakeEngine, Fault, Gate, Kind, Point
from support.legs import FIRST_TURN, events_of, post
from support.waiting import until

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 30}], "stream": True}


async def read(engine: FakeEngine, body: dict[str, Any], seconds: float = 30.0) -> tuple[int | None, bytes, str | None]:
    """Status, the bytes that arrived and the error that ended them, if any."""
    got = b""
    status = None
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession() as session,
            session.post(engine.url + "/v1/chat/completions", json=body) as response,
        ):
            status = response.status
            async for piece in response.content.iter_any():
                got += piece
    except (aiohttp.ClientError, TimeoutError) as error:
        return status, got, type(error).__name__
    return status, got, None


async def leave(reading: asyncio.Task[Any]) -> None:
    """Give up reading, as a client that goes away does."""
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def decode_body(pair: Any, **more: Any) -> dict[str, Any]:
    first = {key: value for key, value in BODY.items() if key != "stream"}
    _, answer = await post(
        pair.prefill.url + "/v1/chat/completions", {**first, "max_tokens": 1, "kv_transfer_params": FIRST_TURN}
    )
    params = {key: value for key, value in answer["kv_transfer_params"].items() if key != "pd_report"}
    return {**BODY, "kv_transfer_params": params, **more}


@pytest.mark.parametrize(
    ("place", "index"), [("first", 0), ("finish", -3), ("usage", -2), ("extra", -2), ("none", None)]
)
async def test_which_event_carries_the_handle(make_pair: Any, place: Any, index: int | None) -> None:
    pair = await make_pair()
    pair.decode.next(Behaviour(handle_on=place))
    usage = {} if place == "extra" else {"stream_options": {"include_usage": True}}
    _, got, _ = await read(pair.decode, await decode_body(pair, **usage))
    events = events_of(got)
    assert events[-1] == "[DONE]"
    carriers = [number for number, event in enumerate(events[:-1]) if "kv_transfer_params" in event]
    assert carriers == ([] if index is None else [index % len(events)])


async def test_a_stream_says_what_the_whole_body_says(make_pair: Any) -> None:
    pair = await make_pair()
    style = AnswerStyle(tail=" 🙂 漢字 " + "x" * 1000, reasoning="field")
    pair.decode.default = Behaviour(style=style, cuts=tuple(range(1, 4000, 7)))
    _, got, _ = await read(pair.decode, BODY)
    _, whole = await post(pair.decode.url + "/v1/chat/completions", {**BODY, "stream": False})
    deltas = [event["choices"][0]["delta"] for event in events_of(got)[:-1]]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]


@pytest.mark.parametrize(
    ("fault", "status", "ending", "error"),
    [
        (Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 503, b'{"error":{}}'), 503, b'{"error":{}}', None),
        (Fault(Kind.STATUS), 500, b"planned", None),
        (Fault(Kind.CLOSE), None, b"", "ServerDisconnectedError"),
        (Fault(Kind.RESET), None, b"", "ClientOSError"),
        (Fault(Kind.HANG), None, b"", "TimeoutError"),
        (Fault(Kind.CLOSE, Point.AFTER_HEADERS), 200, b"", "ClientPayloadError"),
        (Fault(Kind.RESET, Point.AFTER_FIRST_CONTENT), 200, b"kv=", "ClientPayloadError"),
        (Fault(Kind.TRUNCATE, Point.BEFORE_FINISH), 200, b"kv=", None),
        (Fault(Kind.ERROR_EVENT, Point.AFTER_FIRST_CONTENT), 200, b"planned", None),
        (Fault(Kind.FINISH_ERROR, Point.BEFORE_FINISH), 200, b'"finish_reason": "error"', None),
        (Fault(Kind.HANG, Point.BEFORE_DONE), 200, b'"finish_reason": "stop"', "TimeoutError"),
    ],
)
async def test_faults(make_pair: Any, fault: Fault, status: int | None, ending: bytes, error: str | None) -> None:
    pair = await make_pair()
    pair.decode.next(Behaviour(fault=fault))
    patience = 0.5 if fault.kind is Kind.HANG else 20.0
    got_status, got, got_error = await read(pair.decode, await decode_body(pair), seconds=patience)
    assert (got_status, got_error) == (status, error)
    assert ending in got
    await pair.decode.idle()
    assert pair.decode.generates[-1].fate in ("failed", "aborted")
    kept = fault.at is Point.BEFORE_DONE
    assert bool(pair.decode.connector.retained()) is kept


async def test_a_client_that_leaves_ends_the_request(make_pair: Any) -> None:
    pair = await make_pair()
    gate = Gate(2)
    pair.decode.next(Behaviour(gate=gate))
    reading = asyncio.create_task(read(pair.decode, await decode_body(pair)))
    await gate.reached.wait()
    await leave(reading)
    await pair.decode.idle()
    assert pair.decode.generates[-1].fate == "aborted"
    assert pair.decode.used_blocks == 0
    assert pair.decode.connector.retained() == {}


async def test_a_slow_pull_that_is_aborted_strands_the_other_side_until_its_lease_ends(make_pair: Any) -> None:
    pair = await make_pair()
    body = await decode_body(pair)
    pair.decode.connector.pull_delay = 60.0
    reading = asyncio.create_task(read(pair.decode, body))

    async def pulling() -> bool:
        return bool(pair.decode.used_blocks)

    await until(pulling)
    await leave(reading)
    await pair.decode.idle()
    assert pair.decode.used_blocks == 0
    assert pair.prefill.used_blocks > 0
    pair.clock.advance(31)
    assert pair.prefill.used_blocks == 0


async def test_choices_completions_and_limits(make_pair: Any) -> None:
    pair = await make_pair()
    base = pair.decode.url + "/v1"
    _, two = await post(f"{base}/chat/completions", {**BODY, "stream": False, "n": 2})
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][0]["message"] != two["choices"][1]["message"]
    _, text = await post(f"{base}/completions", {"model": "tiny", "prompt": ["a" * 40, "b" * 40], "max_tokens": 9})
    assert [choice["finish_reason"] for choice in text["choices"]] == ["length", "length"]
    assert text["usage"] == {
        "prompt_tokens": 80,
        "completion_tokens": 18,
        "total_tokens": 98,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for body, status in (
        ({**BODY, "model": "other"}, 404),
        ({**BODY, "messages": []}, 400),
        ({**BODY, "stream": False, "stream_options": {"include_usage": True}}, 400),
        ({**BODY, "min_tokens": 9, "max_tokens": 3}, 400),
        ({**BODY, "messages": [{"role": "user", "content": "x" * 70000}]}, 400),
    ):
        got, answer = await post(f"{base}/chat/completions", body)
        assert (got, answer["error"]["code"]) == (status, status)


async def test_every_secret_has_the_shape_that_tests_search_for(make_pair: Any) -> None:
    pair = await make_pair()
    await read(pair.decode, await decode_body(pair))
    await pair.decode.restart()
    secrets = pair.fabric.secrets()
    assert len(secrets) == 7
    assert all(SECRET.search(secret.encode()) for secret in secrets)


async def test_small_endpoints(make_pair: Any) -> None:
    pair = await make_pair()
    await post(pair.decode.url + "/v1/chat/completions", {**BODY, "stream": False})
    async with aiohttp.ClientSession(pair.decode.url) as session:
        assert (await session.get("/health")).status == 200
        models = await (await session.get("/v1/models")).json()
        assert models["data"][0]["id"] == "tiny"
        page = await (await session.get("/metrics")).text()
        tokens = await (await session.post("/tokenize", json={"prompt": "abc"})).json()
    prompt = len(pair.decode.config.template.render(BODY))
    assert (
        f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="local_compute"}} {prompt}.0' in page
    )
    assert "vllm:nixl_xfer_time_seconds_count" in page
    assert "vllm:kv_cache_usage_perc" in page
    assert tokens["tokens"] == [97, 98, 99]


async def test_frozen_then_killed_then_back(make_pair: Any) -> None:
    pair = await make_pair()
    pair.decode.freeze()
    assert (await read(pair.decode, BODY, seconds=0.1))[2] == "TimeoutError"
    await asyncio.sleep(0.02)
    assert pair.decode.generates == []
    pair.decode.thaw()
    before = pair.decode.engine_id
    gate = Gate(1)
    pair.decode.next(Behaviour(gate=gate))
    reading = asyncio.create_task(read(pair.decode, BODY))
    await gate.reached.wait()
    await pair.decode.restart()
    assert (await reading)[2] in ("ClientPayloadError", "ClientOSError", "ServerDisconnectedError")
    assert pair.decode.engine_id != before
    assert (await read(pair.decode, BODY))[0] == 200
