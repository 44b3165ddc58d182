"""A collector of traces: takes what an OTLP/HTTP exporter posts, and keeps the spans and the bytes.

Separate from the tests because decoding belongs to the protocol, not to what is looked for.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from support.waiting import until


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Ids in hex, times in seconds; ``parent`` is empty for a root."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: bool
    resource: dict[str, Any]


class Collector:
    """Listens on loopback. ``raw``: all that was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.headers: list[str] = []
        """Of all requests, the values of `x-collector-key`."""

        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    def forget(self) -> None:
        """Forget what came so far."""
        self.spans.clear()
        self.raw = b""

    async def trace(self, trace_id: str, count: int) -> list[Span]:
        """The spans of a trace once there are ``count``, in order of their start. Raises TimeoutError."""

        async def all_there() -> list[Span]:
            found = [span for span in self.spans if span.trace == trace_id]
            return sorted(found, key=lambda span: span.start) if len(found) >= count else []

        return await until(all_there)

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.raw += body
        self.headers.append(request.headers.get("x-collector-key", ""))
        message = trace_service_pb2.ExportTraceServiceRequest()
        message.ParseFromString(body)
        for group in message.resource_spans:
            resource = _attributes(group.resource)
            for scope in group.scope_spans:
                self.spans.extend(_span(one, resource) for one in scope.spans)
        return web.Response(body=trace_service_pb2.ExportTraceServiceResponse().SerializeToString())


def _span(one: Any, resource: dict[str, Any]) -> Span:
    return Span(
        one.name,
        one.kind,
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        one.start_time_unix_nano / 1e9,
        one.end_time_unix_nano / 1e9,
        _attributes(one),
        one.status.code == one.status.STATUS_CODE_ERROR,
        resource,
    )


def _attributes(of: Message) -> dict[str, Any]:
    pairs: Any = getattr(of, "attributes")  # noqa: B009 - generated classes are not typed
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    return getattr(value, str(value.WhichOneof("value")))
