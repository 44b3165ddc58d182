"""The conversation player and the observer against a small server: what is measured, and what is no turn."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from pdctl.core.commands import Urls
from pdctl.shell import observer as observing
from pdctl.shell.observer import Observer
from pdctl.shell.player import Conversation, PlayError, open_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(content=None, finish=None, **more) -> str:
    choices = [{"index": 0, "delta": {"content": content} if content is not None else {}, "finish_reason": finish}]
    return f"data: {json.dumps({'choices': choices, **more})}\n\n"


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 7, 'completion_tokens': 2}})}\n\n"
GOOD = [event(""), event(" a"), event(" b", "length"), USAGE, "data: [DONE]\n\n"]


@pytest.fixture
async def serve():
    """Starts servers and stops them all; gives back the base URL."""
    runners: list[web.AppRunner] = []

    async def start(routes: dict[str, Handler]) -> str:
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def streaming(parts: list[str], seen: list[dict] | None = None, pause_before: int | None = None) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-request-id": "r1"})
        await response.prepare(request)
        for number, part in enumerate(parts):
            if number == pause_before:
                await asyncio.sleep(0.2)
            await response.write(part.encode())
        return response

    return answer


async def ask(base: str, question: str = "hi"):
    async with open_session() as session:
        return await Conversation(session, base, "tiny", 2).ask(question)


async def test_ttft_is_the_first_text_not_the_first_chunk(serve):
    base = await serve({"/v1/chat/completions": streaming(GOOD, pause_before=1)})
    reply = await ask(base)
    assert reply.text == " a b"
    assert (reply.prompt_tokens, reply.reply_tokens, reply.ending, reply.request_id) == (7, 2, "length", "r1")
    assert reply.ttft_ms is not None
    assert reply.ttft_ms >= 190


async def test_each_turn_sends_everything_said_and_nothing_that_only_we_know(serve):
    seen: list[dict] = []
    base = await serve({"/v1/chat/completions": streaming(GOOD, seen)})
    async with open_session() as session:
        talk = Conversation(session, base, "tiny", 2)
        await talk.ask("one")
        await talk.ask("two")
    assert [message["content"] for message in seen[1]["messages"]] == ["one", " a b", "two"]
    assert [message["role"] for message in seen[1]["messages"]] == ["user", "assistant", "user"]
    assert set(seen[1]) == {"model", "messages", "stream", "stream_options", "max_tokens", "temperature"}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (GOOD[:-1], r"without \[DONE\]"),
        ([event(" a"), 'data: {"error": {"message": "boom"}}\n\n'], "broke off.*boom"),
        ([event(" a", kv_transfer_params={"x": 1}), *GOOD], "must never reach a client"),
    ],
)
async def test_an_unclean_stream_is_no_turn(serve, parts, words):
    base = await serve({"/v1/chat/completions": streaming(parts)})
    with pytest.raises(PlayError, match=words):
        await ask(base)


async def test_an_error_status_is_no_turn(serve):
    async def fail(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    base = await serve({"/v1/chat/completions": fail})
    with pytest.raises(PlayError, match=r"answered 500: .*boom"):
        await ask(base)
    with pytest.raises(PlayError, match="the request failed"):
        await ask("http://127.0.0.1:9")


async def test_a_busy_router_is_asked_again_and_only_the_last_attempt_is_timed(serve):
    calls = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 1:
            return web.Response(status=503, headers={"retry-after": "1"})
        return await streaming(GOOD)(request)

    base = await serve({"/v1/chat/completions": answer})
    reply = await ask(base)
    assert calls == 2
    assert reply.ttft_ms is not None
    assert reply.ttft_ms < 900


async def test_patience_ends(serve):
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="no engine", headers={"retry-after": "1000"})

    base = await serve({"/v1/chat/completions": refuse})
    with pytest.raises(PlayError, match="answered 503: no engine"):
        await ask(base)


def metrics(pulled: float, seconds: float, transfers: int) -> str:
    return (
        f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {pulled}\n'
        f"vllm:nixl_xfer_time_seconds_sum {seconds}\nvllm:nixl_xfer_time_seconds_count {transfers}\n"
    )


async def test_the_observer_waits_for_counters_that_lag_and_for_the_routers_record(serve):
    pages = [metrics(100, 1.0, 1), metrics(228, 1.0, 1), metrics(228, 1.25, 2)]
    records: list[list[dict]] = [[], [{"request_id": "r", "prefill_ms": 12.5, "pulled_tokens": 128}]]

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=pages.pop(0) if len(pages) > 1 else pages[0])

    async def explain(request: web.Request) -> web.Response:
        assert request.query["request_id"] == "r"
        return web.json_response(records.pop(0) if len(records) > 1 else records[0])

    base = await serve({"/metrics": page, "/debug/explain": explain})
    async with open_session() as session:
        observer = Observer(session, Urls(base, base, (base,), (base,), "tiny"))
        before = await observer.counters()
        seen = await observer.turn("r", before)
    assert (seen.pulled_tokens, seen.reported_tokens, seen.prefill_ms, seen.transfer_ms) == (128, 128, 12.5, 250.0)


async def test_what_is_not_exported_stays_unknown(serve, monkeypatch):
    monkeypatch.setattr(observing, "SETTLE_SECONDS", 0.2)

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="other 1\n")

    async def explain(_request: web.Request) -> web.Response:
        return web.json_response([])

    base = await serve({"/metrics": page, "/debug/explain": explain})
    async with open_session() as session:
        observer = Observer(session, Urls(base, base, (base,), (base,), "tiny"))
        seen = await observer.turn("r", await observer.counters())
    assert (seen.pulled_tokens, seen.prefill_ms, seen.transfer_ms, seen.decision) == (None, None, None, None)
