"""OpenTelemetry spans of turns: one per turn, below it one per wait and leg, sent over OTLP/HTTP.

Separate, and imported only with `--otlp-endpoint`, so that a router without it neither needs the packages nor pays for
them. Names follow the semantic conventions for generative AI and HTTP where there are any; the rest begins with `pd.`.
What goes in is chosen here one by one: no prompt, no answer, no id of a conversation, no handle, no header.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pd_router.core.fields import Api
from pd_router.core.observe import Tracing as Settings
from pd_router.shell.exchange import Address
from pd_router.shell.metrics import version_here

EXPORT_SECONDS: Final = 5.0
"""For sending one batch, further attempts included."""
STOP_SECONDS: Final = 3.0
"""For the last spans: a collector that is away must not hold up the end of the process."""
OPERATIONS: Final = {Api.COMPLETIONS.value: "text_completion"}
"""`gen_ai.operation.name` by API; the others are `chat`."""
PROVIDER: Final = "vllm"
LONGEST_VALUE: Final = 128

TURN_ATTRIBUTES: Final[Mapping[str, str]] = {
    "model": "gen_ai.request.model",
    "stream": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "status": "http.response.status_code",
    "request_id": "pd.request_id",
    "attempts": "pd.attempts",
    "ending": "pd.ending",
    "client_left": "pd.client_left",
    "attached": "pd.reuse.attached",
    "linked_by": "pd.reuse.linked_by",
    "reason": "pd.reuse.reason",
    "proven_tokens": "pd.reuse.proven_tokens",
    "pulled_tokens": "pd.reuse.pulled_tokens",
    "local_tokens": "pd.reuse.local_tokens",
}
"""What of a turn's record becomes an attribute of its span."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CARRIED: Final = ("traceparent", "tracestate")


class Tracing:
    """Makes the traces of one router. `stop` sends what is left."""

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self.now = now
        resource = Resource.create(
            {
                "service.name": "pd-router",
                "service.version": version_here(),
                "service.instance.id": f"{platform.node()}-{os.getpid()}",
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sampling_ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=settings.url, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("pd_router", version_here())

    def turn(self, api: str, path: str, headers: Mapping[str, str], arrived: float) -> TurnTrace:
        """Begin the trace of a turn that arrived at `arrived` on the router's clock."""
        return TurnTrace(self, api, path, headers, arrived)

    async def stop(self) -> None:
        """Send what is left, within `STOP_SECONDS`."""
        # Not a thread of the loop's, which would be waited for at the end however long it takes.
        sender = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sender.start()
        await asyncio.to_thread(sender.join, STOP_SECONDS)


class TurnTrace:
    """The spans of one turn. Times are on the router's clock."""

    __slots__ = ("_context", "_leg", "_operation", "_recorded", "_root", "_shift", "_tracing", "trace_id")

    def __init__(self, tracing: Tracing, api: str, path: str, headers: Mapping[str, str], arrived: float) -> None:
        self._tracing = tracing
        self._shift = time.time() - tracing.now()
        self._operation = OPERATIONS.get(api, "chat")
        carrier = {name: headers[name] for name in _CARRIED if name in headers}
        self._root: Span = tracing.tracer.start_span(
            self._operation,
            context=_PROPAGATOR.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            start_time=self._at(arrived),
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": PROVIDER,
                "http.request.method": "POST",
                "url.path": path.partition("?")[0],
            },
        )
        self._context = set_span_in_context(self._root, Context())
        self._leg: Span | None = None
        self._recorded = self._root.is_recording()
        self.trace_id = format_trace_id(self._root.get_span_context().trace_id) if self._recorded else ""

    def queued(self, arrived: float) -> None:
        """The turn may begin now."""
        if not self._recorded:
            return
        span = self._tracing.tracer.start_span("queue", context=self._context, start_time=self._at(arrived))
        span.end(self._at(self._tracing.now()))

    def began(self, leg: str, engine: str, address: Address, headers: Mapping[str, str]) -> Mapping[str, str]:
        """A leg is sent. Returns the headers for it: the client's, with the leg's place in the trace."""
        if not self._recorded:
            return _carrying(headers, self._context)
        self._leg = self._tracing.tracer.start_span(
            leg,
            context=self._context,
            kind=SpanKind.CLIENT,
            start_time=self._at(self._tracing.now()),
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": PROVIDER,
                "http.request.method": "POST",
                "server.address": address.host,
                "server.port": address.port,
                "pd.leg": leg,
                "pd.engine": engine,
            },
        )
        return _carrying(headers, set_span_in_context(self._leg, Context()))

    def ended(self, result: str, reason: str, facts: Mapping[str, Any]) -> None:
        """The running leg is over. `result`: as it is counted; `reason`: of a failure, else empty."""
        if self._leg is not None:
            span, self._leg = self._leg, None
            span.set_attribute("pd.result", result)
            span.set_attributes(facts)
            if reason:
                span.set_attribute("error.type", reason)
                span.set_status(StatusCode.ERROR)
            span.end(self._at(self._tracing.now()))

    def first_content(self, ttft: float) -> None:
        """The first content is about to be sent, so many seconds after the request's arrival."""
        self._root.set_attribute("gen_ai.response.time_to_first_chunk", ttft)

    def finish(self, fields: Mapping[str, Any], names: frozenset[str]) -> None:
        """The turn is over. `names`: models whose name may be in the span's."""
        root = self._root
        if self._recorded:
            for field, attribute in TURN_ATTRIBUTES.items():
                value = fields.get(field)
                if value is not None:
                    root.set_attribute(attribute, value[:LONGEST_VALUE] if isinstance(value, str) else value)
            model = fields.get("model")
            if model in names:
                root.update_name(f"{self._operation} {model}")
            if fields["status"] >= 500:
                root.set_attribute("error.type", str(fields["status"]))
                root.set_status(StatusCode.ERROR)
        root.end(self._at(self._tracing.now()))

    def _at(self, when: float) -> int:
        return int((when + self._shift) * 1e9)


def _carrying(headers: Mapping[str, str], context: Context) -> Mapping[str, str]:
    """The client's headers with another place in the trace."""
    carried = {name: value for name, value in headers.items() if name not in _CARRIED}
    _PROPAGATOR.inject(carried, context)
    return carried
