"""The two requests of a turn to its engines: built, sent, and judged.

Separate from the turn's control flow so that what counts as a failure of an engine, of the request or of the network is
decided in one place. A leg either returns what the turn needs or raises `LegFailed`, which says whether trying again
can help.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from pd_router.core.errors import (
    ApiError,
    engine_not_ready,
    no_engine,
    upstream_failed,
    upstream_silent,
    upstream_timeout,
)
from pd_router.core.fields import Api
from pd_router.core.refusals import loggable, private_texts, told
from pd_router.shell.exchange import Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.upstream import EnginePool
from pd_wire.handle import prefill_handle_fault
from pd_wire.names import KV_PARAMS, RANK_HEADER, REPORT_KEY
from pd_wire.report import Report
from pd_wire.report import parse as parse_report

log = logging.getLogger("pd_router.legs")

RETRY_AFTER_SECONDS = 5
CLIENT_LEFT = 499
"""What is counted for a client that did not wait; nobody sees it."""
GONE = frozenset({Failure.CONNECT.value, Failure.CONNECT_TIMEOUT.value, Failure.CLOSED.value, Failure.LOST.value})
"""The engine is away, or closed a kept connection as the request came, so trying elsewhere loads nothing that is in
trouble."""
FORWARDED = ("authorization", "x-request-id", "traceparent", "tracestate")
"""Request headers that engines may see. Everything else is the router's or the client's own business; above all no
header that steers an engine, and no `baggage`, which says whatever its sender likes and is written on by engines that
trace."""
_ADDED = tuple(name for name in FORWARDED if name != "x-request-id")
_MEDIA_TYPE = re.compile(rb"(?:application|text|audio)/[a-z0-9.+-]{1,40}(?:; ?charset=[a-z0-9-]{1,20})?", re.IGNORECASE)
_SECONDS = re.compile(rb"[0-9]{1,5}")
_METADATA = ("id", "created", "model")
_METADATA_ITEM = ("index", "embed_dtype", "endianness", "start", "end", "shape")
_METADATA_USAGE = ("prompt_tokens", "total_tokens")
_KNOWN = 256
"""Results that are remembered: engines send the same few headers, and clients ask for the same few paths."""


class LegFailed(Exception):
    """A leg failed before anything reached the client.

    `retryable`: another attempt may succeed. `engine_fault`: counts against the engine's breaker. `answer`: what to
    tell the client if there is no other attempt; `verbatim`: an engine's own refusal to pass on instead (status,
    headers, a body that is fit for a client); `status`: what the engine answered with, if it did.
    """

    def __init__(
        self,
        leg: str,
        reason: str,
        answer: ApiError,
        *,
        retryable: bool = True,
        engine_fault: bool = True,
        verbatim: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(f"{leg}: {reason}")
        self.leg = leg
        self.reason = reason
        self.answer = answer
        self.retryable = retryable
        self.engine_fault = engine_fault
        self.verbatim = verbatim
        self.status = status


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer. `params` is what D is to be sent; None means that P offered nothing to read. `cached_tokens`: of the
    prompt, what P had or read."""

    params: Mapping[str, Any] | None
    report: Report | None
    prompt_tokens: int | None
    cached_tokens: int | None


def request_head(
    path: str, member: Member, headers: Mapping[str, str], request_id: str, length: int, rank: int | None = None
) -> bytes:
    """The head of a request to an engine. A query in `path` stays here: engines need none, and it is one more place in
    which a client could say what it may not. `rank`: the data-parallel rank that is to serve it."""
    head = f"{begin_head(path, member.address.authority)}{length}\r\nx-request-id: {request_id}\r\n"
    for name in _ADDED:
        if name in headers:
            head += f"{name}: {headers[name]}\r\n"
    if rank is not None:
        head += f"{RANK_HEADER}: {rank}\r\n"
    return f"{head}\r\n".encode("latin-1", "replace")


@functools.lru_cache(_KNOWN)
def begin_head(path: str, authority: str) -> str:
    """The head of any POST of JSON to an engine, up to the length of its body."""
    return (
        f"POST {urlsplit(path).path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\n"
        "accept-encoding: identity\r\ncontent-length: "
    )


def relayed_headers(exchange: Exchange, otherwise: bytes = b"application/json") -> list[tuple[bytes, bytes]]:
    """What a client gets of an engine's response headers: those that clients of its API need, and of these only values
    that are what they should be. Anything else may name an engine or hold a handle.

    Args:
        otherwise: the content type where the engine's is none.
    """
    kind = exchange.header(b"content-type")
    if not _is_media_type(kind):
        kind = otherwise
    found = [(b"content-type", kind)]
    if kind == b"application/octet-stream":
        found += _metadata(exchange.header(b"metadata"))
    return found


@functools.lru_cache(_KNOWN)
def _is_media_type(kind: bytes) -> bool:
    return _MEDIA_TYPE.fullmatch(kind) is not None


def _metadata(value: bytes) -> list[tuple[bytes, bytes]]:
    """vLLM's header that says where in an answer of bytes each embedding is."""
    try:
        said = _object(orjson.loads(value))
    except orjson.JSONDecodeError:
        said = {}
    items, usage = said.get("data"), _object(said.get("usage"))
    if not isinstance(items, list):
        return []
    shown: dict[str, Any] = {name: said[name] for name in _METADATA if isinstance(said.get(name), str | int)}
    shown["data"] = [{name: item[name] for name in _METADATA_ITEM if name in item} for item in map(_object, items)]
    shown["usage"] = {name: _count(usage, name) for name in _METADATA_USAGE}
    return [(b"metadata", orjson.dumps(shown))]


async def prefill(
    pool: EnginePool,
    member: Member,
    head: bytes,
    body: bytes,
    within: float,
    api: Api,
    hosts: AbstractSet[str],
    sent: Callable[[Exchange], None] | None = None,
) -> Prefilled:
    """Run the prefill leg to its end. `sent` gets the exchange once the request is out. Raises LegFailed.

    Args:
        hosts: that P's answer may send D to.
    """
    leg = "prefill"
    try:
        exchange = await pool.request(member.address, head, body, within)
        if sent is not None:
            sent(exchange)
        status = await exchange.head()
        raw = await exchange.body()
    except LegError as error:
        raise network_failure(leg, error, within) from error
    if status != 200:
        raise refused(leg, status, exchange, raw, body)
    return _read_prefill(raw, api, hosts)


def _read_prefill(raw: bytes, api: Api, hosts: AbstractSet[str]) -> Prefilled:
    """Judge P's answer. Usage of a wrong type counts as unknown. Raises LegFailed."""
    try:
        answer = _object(orjson.loads(raw))
    except orjson.JSONDecodeError:
        answer = {}
    ended = _prefill_end(answer, api)
    if ended is None:
        raise LegFailed("prefill", "malformed_answer", upstream_failed("prefill", "its answer is not a completion"))
    if not ended:
        raise LegFailed("prefill", "error_finish", upstream_failed("prefill", "it ended the prefill with an error"))
    offered = _object(answer.get(KV_PARAMS))
    params = offered if _offers_blocks(offered) else None
    if params is not None:
        _check_handle(params, hosts)
    return Prefilled(params, parse_report(offered.get(REPORT_KEY)), *_prompt_counts(_object(answer.get("usage")), api))


def _offers_blocks(offered: Mapping[str, Any]) -> bool:
    """Whether there is something for decode to read. There is nothing from an engine without the connector, from one
    that echoes the prefill's own params, and where no block was kept: decode must not be given those."""
    groups = offered.get("remote_block_ids")
    kept_none = isinstance(groups, list) and all(group == [] for group in groups)
    return offered.get("do_remote_prefill") is True and not kept_none


def _check_handle(params: Mapping[str, Any], hosts: AbstractSet[str]) -> None:
    """Refuse what would have D read elsewhere, or end it (HL-24, IS-01). Raises LegFailed."""
    fault = prefill_handle_fault(params)
    if fault is not None:
        log.warning("the prefill engine's answer is of no use to decode: %s", fault)
        text = "its answer does not say where its blocks are"
        raise LegFailed("prefill", "malformed_handle", upstream_failed("prefill", text))
    if params["remote_host"] not in hosts:
        log.warning("the prefill engine's answer names a host that is no prefill engine's (--allow-handle-host)")
        text = "its answer names a place that is not known"
        raise LegFailed("prefill", "foreign_host", upstream_failed("prefill", text))


def _prefill_end(answer: Mapping[str, Any], api: Api) -> bool | None:
    """Whether the prefill ended well; None when this is no answer of the API."""
    match api:
        case Api.RESPONSES:
            if answer.get("object") != "response" or not isinstance(answer.get("output"), list):
                return None
            return answer.get("status") in ("completed", "incomplete")
        case Api.MESSAGES:
            if answer.get("type") != "message" or not isinstance(answer.get("content"), list):
                return None
            return answer.get("stop_reason") is not None
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    return choices[0].get("finish_reason") != "error"


def _prompt_counts(usage: Mapping[str, Any], api: Api) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and how many of them P had or read; None where it does not say."""
    match api:
        case Api.RESPONSES:
            return _count(usage, "input_tokens"), _count(_object(usage.get("input_tokens_details")), "cached_tokens")
        case Api.MESSAGES:
            rest, cached = _count(usage, "input_tokens"), _count(usage, "cache_read_input_tokens")
            created = _count(usage, "cache_creation_input_tokens")
            return (None if rest is None else rest + (cached or 0) + (created or 0)), cached
    return _count(usage, "prompt_tokens"), _count(_object(usage.get("prompt_tokens_details")), "cached_tokens")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(of: Mapping[str, Any], name: str) -> int | None:
    value = of.get(name)
    return value if type(value) is int and value >= 0 else None


def network_failure(leg: str, error: LegError, timeout: float) -> LegFailed:
    """A leg that got no whole answer."""
    if error.reason is Failure.TIMEOUT:
        answer = upstream_silent(leg, error.silence) if error.silence else upstream_timeout(leg, timeout)
        return LegFailed(leg, "timeout", answer)
    if error.reason in (Failure.CONNECT, Failure.CONNECT_TIMEOUT, Failure.LOST):
        return LegFailed(leg, error.reason.value, engine_not_ready(leg, RETRY_AFTER_SECONDS))
    if error.reason is Failure.ABORTED:
        return LegFailed(
            leg, "aborted", upstream_failed(leg, "the turn was given up"), retryable=False, engine_fault=False
        )
    if error.reason is Failure.MALFORMED:
        log.warning("the %s engine's answer can't be read: %s", leg, error)
        fault = "its answer is no valid HTTP, or larger than an answer may be"
        return LegFailed(leg, error.reason.value, upstream_failed(leg, fault))
    return LegFailed(
        leg, error.reason.value, upstream_failed(leg, "it closed the connection before its answer was complete")
    )


def refused(leg: str, status: int, exchange: Exchange, raw: bytes, sent: bytes = b"") -> LegFailed:
    """A leg that was answered with something other than 200.

    Args:
        sent: the leg's body; what its handle holds is in no answer for a client.
    """
    private = private_texts(sent)
    if status == 429 or 400 <= status < 500:
        verbatim = (status, [(b"content-type", b"application/json"), *_refusal_headers(exchange)], told(raw, private))
        answer = upstream_failed(leg, f"it answered with status {status}")
        busy = status == 429
        return LegFailed(
            leg,
            "status_429" if busy else "refused",
            answer,
            retryable=busy,
            engine_fault=False,
            verbatim=verbatim,
            status=status,
        )
    log.warning("the %s engine answered with status %d: %s", leg, status, loggable(raw))
    if status == 503:
        return LegFailed(leg, "status_503", no_engine(leg, _seconds(exchange)), engine_fault=False, status=status)
    return LegFailed(leg, "status_5xx", upstream_failed(leg, f"it answered with status {status}"), status=status)


def _refusal_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """All that a client gets of the headers of an engine's refusal."""
    asked = exchange.header(b"retry-after")
    found = [(b"retry-after", asked)] if _SECONDS.fullmatch(asked) else []
    return [*found, (b"www-authenticate", b"Bearer")] if exchange.header(b"www-authenticate") else found


def _seconds(exchange: Exchange) -> int:
    """When an engine asks to be called again."""
    asked = exchange.header(b"retry-after")
    return int(asked) if re.fullmatch(rb"[0-9]{1,4}", asked) else RETRY_AFTER_SECONDS
