"""Requests that carry no KV and need one engine only: the model list and the tokenizer."""

from __future__ import annotations

import orjson

from pd_router.core.errors import ApiError, bad_method, malformed, no_engine
from pd_router.core.jsontext import decode_exactly, encode
from pd_router.core.sanitize import strip_deep
from pd_router.core.sse import strip_json
from pd_router.shell.context import Context
from pd_router.shell.exchange import LegError
from pd_router.shell.legs import LegFailed, network_failure, refused, relayed_headers, request_head
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

PASSED = {"/v1/models": "GET", "/tokenize": "POST", "/detokenize": "POST"}
RETRY_AFTER_SECONDS = 5
TIMEOUT_SECONDS = 30.0


async def pass_through(context: Context, path: str, request: Request, responder: Responder) -> None:
    """Send the request to any ready engine and its answer back."""
    allowed = PASSED[path]
    if request.method not in (allowed, "HEAD" if allowed == "GET" else allowed):
        responder.send_error(bad_method(request.method, path, allowed), [(b"allow", allowed.encode())])
        return
    now = context.now()
    engines = [
        engine
        for role in (ROLE_DECODE, ROLE_PREFILL)
        for engine in context.fleet.snapshot(role, now)
        if engine.takes_work
    ]
    try:
        if not engines:
            raise no_engine("decode", RETRY_AFTER_SECONDS)
        member = context.member(engines[0].key)
        body = _sanitized(request.body) if allowed == "POST" else b""
        head = request_head(path, member, request.headers, context.request_id(request.headers), len(body))
        if allowed == "GET":
            head = head.replace(b"POST ", b"GET ", 1)
        exchange = await context.pool.request(member.address, head, body, TIMEOUT_SECONDS)
        status = await exchange.head()
        raw = await exchange.body()
        if status != 200:
            raise refused("decode", status, exchange, raw)
        clean, _ = strip_json(raw)
    except LegError as error:
        responder.send_error(network_failure("decode", error, TIMEOUT_SECONDS).answer)
        return
    except LegFailed as failure:
        if failure.verbatim is None or context.guard.is_own_fault(failure.status):
            responder.send_error(failure.answer)
        else:
            responder.send(*failure.verbatim)
        return
    except ApiError as error:
        responder.send_error(error)
        return
    responder.send(status, relayed_headers(exchange), clean)


def _sanitized(raw: bytes) -> bytes:
    try:
        body = orjson.loads(raw)
        if strip_deep(body):
            strip_deep(body := decode_exactly(raw))
        return encode(body)
    except ValueError as error:  # orjson's own error is one, too
        raise malformed(str(error)) from error
