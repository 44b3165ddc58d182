"""Headers between a client and an engine: in both directions a short list, and values that are what they should be."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from pd_router.core.fields import Api
from pd_router.shell.exchange import Exchange
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed, prefill, relayed_headers, request_head
from pd_router.shell.upstream import EnginePool
from support.canned_leg import CannedLeg

CARELESS = [
    (b"x-debug", b'{"kv_transfer_params":{"remote_host":"10.0.0.1"}}'),
    (b"x-served-by", b"SECRETENGINE@10.0.0.1:5600"),
    (b"server-timing", b"SECRETENGINE;dur=1"),
    (b"endpoint-load-metrics", b"SECRETENGINE"),
    (b"set-cookie", b"SECRETENGINE"),
    (b"x-request-id", b"SECRETREQ"),
    (b"connection", b"x-debug"),
    (b"transfer-encoding", b"chunked"),
]


def relayed(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return relayed_headers(cast(Exchange, CannedLeg(200, b"", headers)))


@pytest.mark.parametrize(
    "kind",
    [b"application/json", b"text/event-stream; charset=utf-8", b"application/octet-stream", b"audio/wav"],
)
def test_a_client_gets_the_content_type_and_nothing_else(kind: bytes) -> None:
    assert relayed(*CARELESS, (b"content-type", kind)) == [(b"content-type", kind)]


@pytest.mark.parametrize("kind", [b"", b"SECRETENGINE", b"application/json; x=SECRETENGINE", b"text/" + 41 * b"a"])
def test_an_odd_content_type_is_not_relayed(kind: bytes) -> None:
    assert relayed((b"content-type", kind)) == [(b"content-type", b"application/json")]
    stream = relayed_headers(cast(Exchange, CannedLeg(200, b"", [(b"content-type", kind)])), b"text/event-stream")
    assert stream == [(b"content-type", b"text/event-stream")]


def test_embeddings_as_bytes_keep_the_header_that_they_are_read_by() -> None:
    item = {"index": 0, "embed_dtype": "float32", "endianness": "native", "start": 0, "end": 64, "shape": [16]}
    said: dict[str, Any] = {
        "id": "embd-1",
        "created": 5,
        "model": "tiny",
        "data": [item],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    handle = {"remote_host": "10.0.0.1"}
    careless = {**said, "kv_transfer_params": handle, "data": [{**item, "remote_host": "SECRET"}]}
    kind = (b"content-type", b"application/octet-stream")
    for value in (said, careless):
        _, (name, shown) = relayed(kind, (b"metadata", json.dumps(value).encode()))
        assert name == b"metadata"
        assert json.loads(shown) == said
    for odd in (b"SECRETENGINE", b"[]", b"{}", b'{"data":"SECRETENGINE"}'):
        assert relayed(kind, (b"metadata", odd)) == [kind]
    assert relayed((b"content-type", b"text/plain"), (b"metadata", json.dumps(said).encode()))[1:] == []


def test_a_refusal_brings_no_value_of_an_engines_choice() -> None:
    engine = CannedLeg(401, b"{}", [(b"www-authenticate", b"SECRETENGINE"), (b"retry-after", b"SECRETENGINE")])
    with pytest.raises(LegFailed) as failed:
        asyncio.run(prefill(cast(EnginePool, engine), cast(Member, engine), b"", b"", 1.0, Api.CHAT, frozenset()))
    assert failed.value.verbatim is not None
    assert failed.value.verbatim[1] == [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]


def test_an_engine_gets_the_trace_and_no_baggage() -> None:
    headers = {"traceparent": "00-a-b-01", "tracestate": "v=1", "baggage": "kv_transfer_params=evil", "x-other": "evil"}
    head = request_head("/v1/completions", cast(Member, CannedLeg(200, b"")), headers, "id", 0)
    assert b"\r\ntraceparent: 00-a-b-01\r\n" in head
    assert b"\r\ntracestate: v=1\r\n" in head
    assert b"evil" not in head
