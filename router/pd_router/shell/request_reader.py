"""Bytes of one client connection into requests, each read whole or refused.

Separate from the connection so that what is a request, and how large one may be, is decided apart from when it is
answered. The framing is llhttp's; what it lets pass and must not (two codings, no Host, an odd target) is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httptools

from pd_router.core import wishes
from pd_router.core.errors import INVALID_REQUEST, ApiError, too_large
from pd_wire.names import GATEWAY_SECRET_HEADER, TENANT_HEADER

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
CHUNK_LINE_BYTES = 32
"""What the framing of one chunk may cost on average, with its size, its extensions and three line ends."""
FRAMING_SLACK_BYTES = 16 * 1024
MAX_DENIED_BODY_BYTES = 64 * 1024
"""Of a request that will not be served: enough to keep the connection of an honest client with a wrong key."""

_HEADERS_TOO_LARGE = ApiError(
    431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes", INVALID_REQUEST, "headers_too_large"
)
_TOO_MANY_HEADERS = ApiError(
    431, f"The request has more than {MAX_HEADERS} header lines", INVALID_REQUEST, "headers_too_large"
)
_ENCODED = ApiError(
    415,
    "The body must not be compressed: Content-Encoding must be absent",
    INVALID_REQUEST,
    "unsupported_encoding",
)
_UNEXPECTED = ApiError(417, "Expect must be 100-continue or absent", INVALID_REQUEST, "unknown_expectation")
_TUNNEL = ApiError(405, "CONNECT is not allowed: this is no proxy", INVALID_REQUEST, "bad_method")
_TARGET = re.compile(
    r"(?:https?://[\w.~!$&'()*+,;=:%-]*(?:\[[0-9a-f:.]*\](?::\d*)?)?)?"
    r"(/[\w.~!$&'()*+,;=:@%/-]*)?"
    r"(\?[!-\"$-~]*)?",
    re.ASCII | re.IGNORECASE,
)
"""A path, or a whole URL of which only path and query count (RFC 9112, 3.2); each as RFC 3986 allows it."""
_HOST = re.compile(r"[\w.~!$&'()*+;=:%\[\]-]*", re.ASCII)
_JOINED = frozenset({"connection", "content-encoding", "host", "transfer-encoding"})
"""Headers of which no line may be lost; of any other the last line wins."""
_MISSPELT = frozenset({"content_length", "transfer_encoding"})
"""Read as the real ones by some servers and gateways, and not by others."""
_VERSIONS = frozenset({"1.0", "1.1"})
_ONCE = wishes.HEADERS | {
    "authorization",
    "content-length",
    "content-type",
    "x-api-key",
    TENANT_HEADER,
    GATEWAY_SECRET_HEADER,
}
"""Headers that may come once only: who reads the first of two and who reads the last would not see the same request."""


@dataclass(slots=True)
class Request:
    """A request that has been read whole. Header names are lower case; the last of several equal names wins.

    `path` is path and query. `error` is set instead of all that when the request was refused.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    http_1_0: bool
    arrived: float
    error: ApiError | None = None
    tenant: str | None = None
    """Whose request it is, as `Admit` said."""
    denied: ApiError | None = None
    """Why it may not be served, though it is a good request."""


Admit = Callable[[str, dict[str, str]], str | None]
"""Takes path and headers of a request whose body is still to come; gives its tenant, or raises ApiError."""


class Sink(Protocol):
    """Who takes what was read."""

    def requested(self, request: Request) -> None:
        """A request was read whole."""

    def refuse(self, error: ApiError) -> None:
        """What came cannot be served, and what follows it cannot be trusted to be a request."""

    def body_expected(self) -> None:
        """The client waits for `100 Continue` before it sends the body."""


class RequestReader:
    """`feed` it what the socket gives, until it has refused."""

    def __init__(
        self,
        sink: Sink,
        max_body_bytes: int,
        now: Callable[[], float],
        admit: Admit = lambda _path, _headers: None,
    ) -> None:
        self._sink = sink
        self._admit = admit
        self._tenant: str | None = None
        self._denied: ApiError | None = None
        self._max_body_bytes = max_body_bytes
        self._now = now
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = self._lines = 0
        self._head_read = False
        self._offered = False
        self._chunked = False
        self._framing = self._chunks = 0
        """Bytes read since the head ended, and the chunks that were in them."""
        self._refused = False
        self._path = ""
        self._parts: list[bytes] = []
        self._size = 0
        self.since: float | None = None
        """When the request began that is being read; None between two requests."""

    def feed(self, data: memoryview) -> None:
        """Read on. Calls the sink, in the order of the bytes."""
        try:
            while len(data) and not self._refused:
                data = self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_bad_http(str(error)))

    def _feed(self, data: memoryview) -> memoryview:
        """Give the parser what it takes; the rest comes back."""
        self._framing += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_offer()
            return data[upgrade.args[0] :]
        if self._chunked and self._framing > FRAMING_SLACK_BYTES + CHUNK_LINE_BYTES * self._chunks + self._size:
            # llhttp reads extensions of any length, and leading zeros of a size, and tells nobody.
            self._refuse(_bad_http("the lines between its chunks are too long"))
        return data[len(data) :]

    # -- httptools ------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._url = b""
        self._headers = {}
        self._header_bytes = self._lines = 0
        self._head_read = False
        self._parts = []
        self._size = 0
        self._tenant = self._denied = None
        self.since = self._now()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._lines += 1
        if self._lines > MAX_HEADERS:
            self._refuse(_TOO_MANY_HEADERS)
        if self._head_read:
            return  # a trailer: it may not change what the head said
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in self._headers:
            if key in _JOINED:
                text = f"{self._headers[key]}, {text}"
            elif key in _ONCE:
                self._refuse(_bad_http(f"it has two {key} headers"))
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        self._head_read = True
        self._framing = self._chunks = 0
        self._chunked = "transfer-encoding" in self._headers
        self._offered = self._parser.should_upgrade()
        if self._parser.get_method() == b"CONNECT":
            self._refuse(_TUNNEL)
        if self._offered or self._refused:
            return
        headers = self._headers
        length = headers.get("content-length", "")
        fault = self._fault()
        if fault is not None:
            self._refuse(fault)
            return
        try:
            self._tenant = self._admit(self._path, headers)
        except ApiError as error:
            self._denied = error
        if self._denied is not None and (
            "expect" in headers or (length.isdigit() and int(length) > MAX_DENIED_BODY_BYTES)
        ):
            self._refuse(self._denied)
        elif length.isdigit() and int(length) > self._max_body_bytes:
            self._refuse(too_large(self._max_body_bytes))
        elif "expect" in headers:
            self._sink.body_expected()

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, data: bytes) -> None:
        if self._refused:
            return
        self._size += len(data)
        if self._denied is not None and self._size > MAX_DENIED_BODY_BYTES:
            self._refuse(self._denied)
            return
        if self._size > self._max_body_bytes:
            self._refuse(too_large(self._max_body_bytes))
            return
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._refused or self._offered:
            return
        self.since = None
        self._chunked = False
        parts, self._parts = self._parts, []
        self._sink.requested(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                path=self._path,
                headers=self._headers,
                body=parts[0] if len(parts) == 1 else b"".join(parts),
                keep_alive=self._parser.should_keep_alive(),
                http_1_0=self._parser.get_http_version() == "1.0",
                arrived=self._now(),
                tenant=self._tenant,
                denied=self._denied,
            )
        )

    # -- judging ---------------------------------------------------------------------------------
    def _fault(self) -> ApiError | None:
        """What is wrong with a head that was read whole. Sets the path."""
        headers = self._headers
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            return _bad_http("its version must be HTTP/1.1 or HTTP/1.0")
        coding = headers.get("transfer-encoding")
        if coding is not None and (coding.lower() != "chunked" or version == "1.0"):
            return _bad_http("Transfer-Encoding must be absent or chunked, and absent in HTTP/1.0")
        if not _MISSPELT.isdisjoint(headers):
            return _bad_http("a header is called like one that frames the body, with an underscore")
        if headers.get("content-encoding", "identity").lower() != "identity":
            return _ENCODED
        host = headers.get("host")
        if host is None:
            if version != "1.0":
                return _bad_http("it must have one Host header")
        elif not _HOST.fullmatch(host):
            return _bad_http("it must have one Host header, with a host and a port")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            return _UNEXPECTED
        target = self._url.decode("latin-1")
        if target == "*":
            self._path = target
            return None
        found = _TARGET.fullmatch(target)
        if found is None or not target:
            return _bad_http("its target is not a path")
        self._path = (found[1] or "/") + (found[2] or "")
        return None

    def _ignore_offer(self) -> None:
        """Read the request as if it had offered no other protocol, as a server may (RFC 9110, 7.8).

        llhttp takes the offer for accepted, and what follows the head for that protocol. A new parser gets the same
        head without the offer, so that it decides about the framing of the body as it would have done at once.
        """
        if self._refused:
            return
        lines = [f"{name}: {value}\r\n" for name, value in self._headers.items() if name != "upgrade"]
        head = self._parser.get_method() + b" " + self._url
        head += f" HTTP/{self._parser.get_http_version()}\r\n{''.join(lines)}\r\n".encode("latin-1")
        if head.count(b"\n") != len(lines) + 2:
            self._refuse(_bad_http("a header is folded"))
            return
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(head)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_HEADERS_TOO_LARGE)

    def _refuse(self, error: ApiError) -> None:
        if not self._refused:
            self._refused = True
            self.since = None
            self._parts = []
            self._sink.refuse(error)


def _bad_http(detail: str) -> ApiError:
    return ApiError(400, f"The request is not valid HTTP/1.1: {detail}", INVALID_REQUEST, "malformed_request")
