"""Requests that carry no KV and need one engine only: sent to the least loaded one, and its answer back.

Which ones, and what they may say, is decided in `core.passed`.
"""

from __future__ import annotations

from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError, bad_method, no_engine, upstream_failed
from pd_router.core.fields import Api
from pd_router.core.passed import PASSED, Body, Passed, clean_body
from pd_router.core.sse import EventTooLarge, SseFilter, strip_json
from pd_router.shell.context import Context
from pd_router.shell.exchange import Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed, network_failure, refused, relayed_headers, request_head
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

RETRY_AFTER_SECONDS = 5
QUICK_SECONDS = 30.0
_KEPT = 64 * 1024
"""Bytes of a stream that are remembered; nothing is read from them."""
_UNREACHED = frozenset({Failure.CONNECT, Failure.CONNECT_TIMEOUT})


async def pass_through(context: Context, path: str, request: Request, responder: Responder) -> None:
    """Send the request to a ready engine and its answer back."""
    passed = PASSED[path]
    dialect = DIALECTS[Api.MESSAGES if path.startswith("/v1/messages") else Api.CHAT]
    if request.method not in passed.methods:
        allow = ", ".join(passed.methods)
        responder.send_error(bad_method(request.method, path, allow), [(b"allow", allow.encode())])
        return
    try:
        await _Passage(context, path, passed, request, responder).run()
    except LegFailed as failure:
        if responder.gone or responder.started:
            return
        if failure.verbatim is None or context.guard.is_own_fault(failure.status):
            error = failure.answer
            responder.send_error(error, body=dialect.error_body(error.body(), error.status))
        else:
            status, headers, body = failure.verbatim
            responder.send(status, headers, dialect.error_body(body, status))
    except ApiError as error:
        responder.send_error(error, body=dialect.error_body(error.body(), error.status))


class _Passage:
    """One request on its way through."""

    def __init__(self, context: Context, path: str, passed: Passed, request: Request, responder: Responder) -> None:
        self._context = context
        self._path = path
        self._passed = passed
        self._request = request
        self._responder = responder
        timeouts = context.settings.timeouts
        self._wait = QUICK_SECONDS if passed.quick else timeouts.answer
        self._idle = timeouts.idle

    async def run(self) -> None:
        """Raises ApiError and LegFailed, before anything is sent to the client."""
        body, kind = clean_body(self._passed, self._request.body, self._request.headers.get("content-type", ""))
        members = self._members()
        if not members:
            raise no_engine(ROLE_DECODE, RETRY_AFTER_SECONDS)
        for last, member in zip((False, True), members[:2] * 2, strict=False):
            place = self._context.loads.open(member.key)
            try:
                await self._ask(member, body, kind)
                return
            except LegError as error:
                if error.reason not in _UNREACHED or last or self._responder.started:
                    raise network_failure(ROLE_DECODE, error, self._wait) from error
                # Nothing was sent, so any other engine may have it.
                self._context.suspect(member, gone=error.reason is Failure.CONNECT)
            finally:
                place.close()

    def _members(self) -> list[Member]:
        """Engines that take work, the least loaded first; those for prefill only where no other is there."""
        context = self._context
        now = context.now()
        for role in (ROLE_DECODE, ROLE_PREFILL):
            ready = [engine.key for engine in context.fleet.snapshot(role, now) if engine.takes_work]
            if ready:
                return [context.member(key) for key in sorted(ready, key=context.loads.turns)]
        return []

    async def _ask(self, member: Member, body: bytes, kind: bytes) -> None:
        context, responder, request = self._context, self._responder, self._request
        head = request_head(self._path, member, request.headers, context.request_id(request.headers), len(body))
        if self._passed.body is Body.NONE:
            head = head.replace(b"POST ", b"GET ", 1)
        elif kind != b"application/json":
            head = head.replace(b"content-type: application/json", b"content-type: " + kind, 1)
        exchange = await context.pool.request(member.address, head, body, self._wait)
        responder.on_gone = exchange.abort
        status = await exchange.head()
        if status != 200:
            raise refused(ROLE_DECODE, status, exchange, await exchange.body())
        answer_kind = exchange.header(b"content-type").partition(b";")[0].strip().lower()
        if answer_kind == b"text/event-stream":
            await self._stream(exchange)
            return
        exchange.deadline = context.now() + max(self._idle, self._wait)
        raw = await exchange.body()
        clean = raw if answer_kind == b"application/octet-stream" else strip_json(raw)[0]
        if not responder.gone:
            responder.send(status, relayed_headers(exchange), clean)

    async def _stream(self, exchange: Exchange) -> None:
        """Relay events, each looked at for what no client may see."""
        responder, stream = self._responder, SseFilter(_KEPT)
        exchange.idle = self._idle
        responder.on_pause = exchange.pause
        responder.on_resume = lambda: exchange.resume(self._context.now() + self._idle)

        def relay(data: bytes) -> None:
            try:
                responder.write(stream.feed(data))
            except EventTooLarge as error:
                exchange.abort(Failure.MALFORMED, str(error))

        responder.begin_stream(200, relayed_headers(exchange))
        early = b"".join(exchange.parts)
        exchange.parts.clear()
        exchange.on_data = relay
        if early:
            relay(early)
        if responder.paused:
            exchange.pause()
        await exchange.ended()
        responder.on_pause = responder.on_resume = None
        if responder.gone:
            return
        if exchange.failure is None:
            responder.end(stream.flush())
            return
        lost = upstream_failed(ROLE_DECODE, "it ended the stream before the answer was complete")
        responder.end(DIALECTS[Api.CHAT].error_event(lost.body()), close=True)
