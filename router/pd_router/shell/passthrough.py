"""Requests that carry no KV and need one engine only: sent to the least loaded one, and its answer back.

Which ones, and what they may say, is decided in `core.passed`. They wait for admission, are tried again and counted as
turns are, and leave a line in the log; since they hold no state, a second try is another request to another engine.
"""

from __future__ import annotations

from typing import Final

from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError, bad_method, no_engine, upstream_failed
from pd_router.core.fields import Api
from pd_router.core.passed import PASSED, Body, Passed, clean_body
from pd_router.core.placement import Engine
from pd_router.core.sse import EventTooLarge, SseFilter, strip_json
from pd_router.shell.admission import Withdrawn
from pd_router.shell.context import Context
from pd_router.shell.exchange import Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.legs import (
    CLIENT_LEFT,
    GONE,
    RETRY_AFTER_SECONDS,
    LegFailed,
    network_failure,
    refused,
    relayed_headers,
    request_head,
)
from pd_router.shell.passed_record import PassedRecord
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

QUICK_SECONDS: Final = 30.0
ATTEMPTS: Final = 2
_KEPT: Final = 64 * 1024
"""Bytes of a stream that are remembered; nothing is read from them."""
_UNREACHED: Final = frozenset({Failure.CONNECT.value, Failure.CONNECT_TIMEOUT.value})
_BUSY: Final = frozenset({"status_429", "status_503", "status_5xx"})
"""Another engine may do better, at the cost of its time: asked within the budget of retries."""


async def pass_through(context: Context, path: str, request: Request, responder: Responder) -> None:
    """Send the request to a ready engine and its answer back."""
    passed = PASSED[path]
    if request.method not in passed.methods:
        allow = ", ".join(passed.methods)
        responder.send_error(bad_method(request.method, path, allow), [(b"allow", allow.encode())])
        return
    await _Passage(context, path, passed, request, responder).run()


class _Passage:
    """One request on its way through."""

    def __init__(self, context: Context, path: str, passed: Passed, request: Request, responder: Responder) -> None:
        self._context = context
        self._path = path
        self._passed = passed
        self._request = request
        self._responder = responder
        self._dialect = DIALECTS[Api.MESSAGES if path.startswith("/v1/messages") else Api.CHAT]
        self._request_id = context.request_id(request.headers)
        self._own_headers = [(b"x-request-id", self._request_id.encode("latin-1", "replace"))]
        self._record = PassedRecord(context, self._request_id, path, request.arrived)
        self._exchange: Exchange | None = None
        timeouts = context.settings.timeouts
        self._wait = QUICK_SECONDS if passed.quick else timeouts.answer
        self._idle = timeouts.idle

    async def run(self) -> None:
        """Answer the request."""
        context, request, responder = self._context, self._request, self._responder
        responder.on_gone = self._client_left
        admitted = False
        status = 500
        try:
            body, kind = clean_body(self._passed, request.body, request.headers.get("content-type", ""))
            await context.admission.enter(self, request.tenant)
            admitted = True
            if responder.gone:
                raise Withdrawn
            status = await self._serve(body, kind)
        except Withdrawn:
            status = CLIENT_LEFT
        except LegFailed as failure:
            status = self._refuse(failure)
        except ApiError as error:
            status = self._answer(error)
        finally:
            if admitted:
                context.admission.leave()
            if self._exchange is not None:
                self._exchange.abort()
            responder.on_gone = None
            self._record.finish(CLIENT_LEFT if responder.gone and not responder.finished else status)

    def _client_left(self) -> None:
        self._context.admission.withdraw(self)
        self._record.client_left("stream" if self._responder.started else ROLE_DECODE)
        if self._exchange is not None:
            self._exchange.abort()

    def _refuse(self, failure: LegFailed) -> int:
        if failure.verbatim is None or self._context.guard.is_own_fault(failure.status):
            return self._answer(failure.answer)
        status, headers, body = failure.verbatim
        if not self._responder.gone:
            shown = self._dialect.error_body(body, status)
            self._responder.send(status, [*headers, *self._own_headers], shown)
        return status

    def _answer(self, error: ApiError) -> int:
        if not self._responder.gone and not self._responder.started:
            shown = self._dialect.error_body(error.body(), error.status)
            self._responder.send_error(error, self._own_headers, body=shown)
        return error.status

    async def _serve(self, body: bytes, kind: bytes) -> int:
        """Try until the client has an answer, or there is nothing to try. Returns the status. Raises LegFailed."""
        tried: frozenset[str] = frozenset()
        failed: LegFailed | None = None
        self._context.retries.turn()
        while True:
            engine = self._choose(tried)
            if engine is None:
                raise failed or no_engine(ROLE_DECODE, RETRY_AFTER_SECONDS)
            if failed is not None:
                if engine.key in tried and failed.reason != Failure.CLOSED.value:
                    raise failed  # where it would fail again
                self._record.retried(failed)
            try:
                return await self._leg(engine, body, kind)
            except LegFailed as failure:
                failed, tried = failure, tried | {engine.key}
                if self._record.attempts >= ATTEMPTS or not self._may_try_again(failure):
                    raise

    def _may_try_again(self, failure: LegFailed) -> bool:
        if self._responder.started or self._responder.gone:
            return False
        return failure.reason in GONE or (failure.reason in _BUSY and self._context.retries.take())

    def _choose(self, tried: frozenset[str]) -> Engine | None:
        """An engine for decode; one for prefill only where no other takes work."""
        context = self._context
        now = context.now()
        for role in (ROLE_DECODE, ROLE_PREFILL):
            engines = context.fleet.snapshot(role, now)
            found = context.passed.choose(engines, self._path, tried, context.loads, now)
            if found is not None:
                return found
        return None

    async def _leg(self, engine: Engine, body: bytes, kind: bytes) -> int:
        """Ask one engine. Returns the status for the client. Raises LegFailed, before it has a byte."""
        context, member = self._context, self._context.member(engine.key)
        place = context.loads.open(engine.key)
        context.passed.sent(engine, self._path, context.now())
        self._record.began(member)
        try:
            exchange = await self._ask(member, body, kind)
            status = await self._relay(exchange)
        except LegError as error:
            raise self._failed(engine, member, network_failure(ROLE_DECODE, error, self._wait)) from error
        except ApiError as error:
            raise self._failed(engine, member, LegFailed(ROLE_DECODE, "malformed_answer", error)) from error
        except LegFailed as failure:
            self._failed(engine, member, failure)
            raise
        except BaseException:
            context.passed.abandoned(engine, self._path)
            raise
        finally:
            place.close()
            if self._exchange is not None:
                self._exchange.abort()
                self._exchange = None
        if self._responder.gone and not self._responder.finished:
            context.passed.abandoned(engine, self._path)
        elif status == 200:
            context.passed.succeeded(engine, self._path)
        else:
            context.passed.failed(engine, self._path, context.now())
        self._record.ended(status)
        return status

    def _failed(self, engine: Engine, member: Member, failure: LegFailed) -> LegFailed:
        """Count it, and look at the engine at once when it could not be reached."""
        context = self._context
        if failure.reason == Failure.ABORTED.value:
            context.passed.abandoned(engine, self._path)
        elif failure.engine_fault or failure.reason in _BUSY:
            context.passed.failed(engine, self._path, context.now())
        else:
            context.passed.succeeded(engine, self._path)
        self._record.failed(failure)
        if failure.reason in _UNREACHED:
            context.suspect(member, gone=failure.reason == Failure.CONNECT.value)
        return failure

    async def _ask(self, member: Member, body: bytes, kind: bytes) -> Exchange:
        """Send it, and wait for the head of an answer that is one. Raises LegError and LegFailed."""
        head = request_head(self._path, member, self._request.headers, self._request_id, len(body))
        if self._passed.body is Body.NONE:
            head = head.replace(b"POST ", b"GET ", 1)
        elif kind != b"application/json":
            head = head.replace(b"content-type: application/json", b"content-type: " + kind, 1)
        pool, anew = self._context.pool, self._record.attempts > 1
        exchange = self._exchange = await pool.request(member.address, head, body, self._wait, anew=anew)
        if self._responder.gone:  # while the connection was being made
            exchange.abort()
        status = await exchange.head()
        if status != 200:
            raise refused(ROLE_DECODE, status, exchange, await exchange.body())
        return exchange

    async def _relay(self, exchange: Exchange) -> int:
        """Raises LegError, and ApiError for what can't be relayed."""
        context, responder = self._context, self._responder
        kind = exchange.header(b"content-type").partition(b";")[0].strip().lower()
        if kind == b"text/event-stream":
            return await self._stream(exchange)
        exchange.deadline = context.now() + max(self._idle, self._wait)
        raw = await exchange.body()
        clean = raw if kind == b"application/octet-stream" else strip_json(raw)[0]
        if not responder.gone:
            responder.send(200, [*relayed_headers(exchange), *self._own_headers], clean)
        return 200

    async def _stream(self, exchange: Exchange) -> int:
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

        responder.begin_stream(200, [*relayed_headers(exchange), *self._own_headers])
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
            return CLIENT_LEFT
        if exchange.failure is None:
            responder.end(stream.flush())
            return 200
        lost = upstream_failed(ROLE_DECODE, "it ended the stream before the answer was complete")
        responder.end(self._dialect.error_event(lost.body()), close=True)
        return 502
