"""A turn's spans: where they hang, what they tell, what reaches the engines, and that nothing secret goes out."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes, url_attributes

from support.chat import TEXT, Talk
from support.deployment import Deployment, Spec
from support.fake_engine import SECRET, Behaviour, Fault, Kind, with_handle
from support.otlp_collector import Collector, Span

PARENT = "00f067aa0ba902b7"
SERVER, CLIENT, INTERNAL = 2, 3, 1

Traced = Callable[..., Awaitable[Deployment]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A collector, and the trace that the test's client is in."""

    collector: Collector
    trace: str

    @property
    def sampled(self) -> dict[str, str]:
        """A client's header: it traces, and so must we."""
        return {"traceparent": f"00-{self.trace}-{PARENT}-01"}

    async def spans(self, count: int) -> list[Span]:
        return await self.collector.trace(self.trace, count)


_traces = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_collector() -> AsyncIterator[Collector]:
    made = Collector()
    await made.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=canary-key")
        yield made
    await made.stop()


@pytest.fixture
def bench(shared_collector: Collector) -> Bench:
    shared_collector.forget()
    return Bench(shared_collector, f"{next(_traces):032x}")


@pytest.fixture
def traced(deploy: Any, shared_collector: Collector) -> Traced:
    async def start(*flags: tuple[str, str], url: str = "", **how: bool) -> Deployment:
        deployment: Deployment = await deploy(
            Spec(flags=(("--otlp-endpoint", url or shared_collector.url), *flags)), **how
        )
        return deployment

    return start


def one(spans: list[Span], name: str) -> Span:
    [found] = [span for span in spans if span.name == name]
    return found


def trace_of(header: str | None) -> tuple[str, str, bool]:
    """Trace, parent, whether it is sampled."""
    assert header is not None
    _, trace, span, flags = header.split("-")
    return trace, span, bool(int(flags, 16) & 1)


async def test_a_turn_that_reuses(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    talk = Talk(deployment, stream=True, headers={**bench.sampled, "tracestate": "vendor=1"}, conversation_id="c-1")
    await talk.say()
    await bench.spans(4)
    bench.collector.spans.clear()
    turn = await talk.say("Go on.")
    spans = await bench.spans(4)
    root, queue, prefill, decode = (one(spans, name) for name in ("chat tiny", "queue", "prefill", "decode"))
    assert [span.parent for span in (root, queue, prefill, decode)] == [PARENT, root.id, root.id, root.id]
    assert [span.kind for span in (root, queue, prefill, decode)] == [SERVER, INTERNAL, CLIENT, CLIENT]
    assert (
        root.start <= queue.start <= queue.end <= prefill.start < prefill.end <= decode.start < decode.end <= root.end
    )
    assert abs(root.end - time.time()) < 3600, "on the wall clock"
    assert not any(span.error for span in spans)
    # vLLM goes on with the trace below each leg.
    assert trace_of(turn.prefills[0].header("traceparent")) == (bench.trace, prefill.id, True)
    assert trace_of(turn.decodes[0].header("traceparent")) == (bench.trace, decode.id, True)
    assert turn.prefills[0].header("tracestate") == turn.decodes[0].header("tracestate") == "vendor=1"
    # What they tell.
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.request.stream"] is True
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["url.path"] == "/v1/chat/completions"
    assert root.attributes["pd.reuse.attached"] is True
    assert root.attributes["pd.reuse.pulled_tokens"] == prefill.attributes["pd.reuse.pulled_tokens"] == turn.pulled > 0
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < root.end - root.start
    assert prefill.attributes["gen_ai.usage.input_tokens"] == turn.prefills[0].prompt_tokens
    assert f"http://{decode.attributes['server.address']}:{decode.attributes['server.port']}" == deployment.decode.url
    assert prefill.attributes["pd.engine"] == deployment.prefill.url
    assert root.attributes["pd.request_id"] == turn.headers["x-request-id"]
    assert root.resource["service.name"] == "pd-router"


async def test_nothing_secret_is_sent(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    headers = {**bench.sampled, "baggage": "user=canary-baggage", "X-Session-ID": "canary-session"}
    talk = Talk(deployment, headers=headers, conversation_id="canary-conversation", user="canary-user")
    await talk.say()
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500), errors_carry_params=True), when=with_handle)
    turn = await talk.say("Canary-question.")
    await bench.spans(9)
    assert turn.text.encode() not in bench.collector.raw
    assert SECRET.search(bench.collector.raw) is None
    for word in (TEXT[:30], "anary", "sk-", "kv=", "remote_", "pd_proof"):
        assert word.encode() not in bench.collector.raw, word


async def test_a_turn_that_is_tried_again(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    talk = Talk(deployment, headers=bench.sampled)
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
    turn = await talk.say()
    spans = await bench.spans(5)
    failed, worked = [span for span in spans if span.name == "prefill"]
    assert (failed.error, failed.attributes["error.type"], failed.attributes["pd.result"]) == (
        True,
        "status_5xx",
        "failed",
    )
    assert (worked.error, worked.attributes["pd.result"]) == (False, "ok")
    assert not one(spans, "chat tiny").error
    assert [trace_of(record.header("traceparent"))[1] for record in turn.prefills] == [failed.id, worked.id]


async def test_a_turn_that_fails(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    for _ in range(2):
        deployment.decode.next(Behaviour(fault=Fault(Kind.CLOSE)))
    turn = await Talk(deployment, headers=bench.sampled).say(check=False)
    assert turn.status == 502
    root = one(await bench.spans(6), "chat tiny")
    assert (root.error, root.attributes["error.type"]) == (True, "502")


async def test_without_a_traceparent_or_with_none_that_is_one(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    for header in (None, "00-zz-1", f"00-{bench.trace}-{'0' * 16}-01", "x" * 5000):
        bench.collector.spans.clear()
        turn = await Talk(deployment, headers={} if header is None else {"traceparent": header}).say()
        trace, _, sampled = trace_of(turn.prefills[0].header("traceparent"))
        root = one(await bench.collector.trace(trace, 4), "chat tiny")
        assert (root.parent, sampled) == ("", True)


async def test_the_ratio_is_for_turns_whose_client_has_not_decided(traced: Traced, bench: Bench) -> None:
    deployment = await traced(("--trace-sampling-ratio", "0"))
    own = await Talk(deployment).say()
    refused = await Talk(deployment, headers={"traceparent": f"00-{bench.trace}-{PARENT}-00"}).say()
    await Talk(deployment, headers=bench.sampled).say()
    await bench.spans(4)
    assert {span.trace for span in bench.collector.spans} == {bench.trace}
    assert not trace_of(own.prefills[0].header("traceparent"))[2]
    assert trace_of(refused.decodes[0].header("traceparent"))[::2] == (bench.trace, False)


async def test_a_collector_that_is_away_costs_no_turn_and_no_stop(traced: Traced) -> None:
    deployment = await traced(url="http://127.0.0.1:9", fresh=True)
    await Talk(deployment).say()
    begun = time.monotonic()
    deployment.ended = True
    assert await deployment.router.stop() == 0
    assert time.monotonic() - begun < 30, "RouterProcess kills what takes too long"


async def test_the_last_spans_are_sent_before_the_end(
    traced: Traced, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    deployment = await traced(fresh=True)
    await Talk(deployment, headers=bench.sampled).say()
    assert bench.collector.spans == []
    deployment.ended = True
    assert await deployment.router.stop() == 0
    assert len(await bench.spans(4)) == 4


async def test_headers_that_the_collector_asks_for(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    await Talk(deployment, headers=bench.sampled).say()
    await bench.spans(4)
    assert set(bench.collector.headers) == {"canary-key"}
    assert "canary-key" not in deployment.router.log


async def test_the_log_names_the_trace(traced: Traced, bench: Bench) -> None:
    deployment = await traced()
    await Talk(deployment, headers=bench.sampled).say()
    await bench.spans(4)
    assert f'"trace_id":"{bench.trace}"' in deployment.router.log


async def test_names_are_those_of_the_conventions(traced: Traced, bench: Bench) -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes, server_attributes, url_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    deployment = await traced()
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
    await Talk(deployment, headers=bench.sampled, stream=True).say()
    for span in await bench.spans(5):
        assert {name for name in span.attributes if not name.startswith("pd.")} <= known, span
