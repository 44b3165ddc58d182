"""Faults between the operator and its API: at the port, for tests without a server, or as a proxy before a real one.

`FaultyPort` wraps any `ClusterApi`. `FaultProxy` speaks HTTP and forwards everything, watches included; a rule decides
about each request. Both count, so that a test can go through every call of a reconcile.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from pd_operator.core.observed_kinds import Kind, Ref
from pd_operator.shell.api import ApiError, ClusterApi

Answer = TypeVar("Answer")


class Killed(BaseException):
    """The operator's process ends here. Not an Exception, so that nothing in the product can catch it."""


@dataclass
class FaultyPort:
    """Dies at the n-th call, or answers it with an error.

    Attributes:
        at: number of the call, from 1; 0 for never.
        error: what the call answers; None = the process dies.
        landed: the server has carried out the call before the process dies or the answer is lost.
    """

    inner: ClusterApi
    at: int = 0
    error: ApiError | None = None
    landed: bool = False
    count: int = field(default=0, init=False)

    async def _call(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        self.count += 1
        if self.count != self.at:
            return await call()
        if self.landed:
            await call()
        raise self.error if self.error is not None else Killed

    async def get(self, ref: Ref) -> Mapping[str, Any] | None:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.get(ref))

    async def alive(self, ref: Ref, uid: str) -> bool:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.alive(ref, uid))

    async def list(self, kind: Kind, namespace: str | None, label_selector: str) -> tuple[list[Mapping[str, Any]], int]:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.list(kind, namespace, label_selector))

    async def apply(self, manifest: Mapping[str, Any], uid: str | None) -> Mapping[str, Any]:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.apply(manifest, uid))

    async def rehearse(self, manifest: Mapping[str, Any], uid: str | None) -> None:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.rehearse(manifest, uid))

    async def hand_over(self, manifest: Mapping[str, Any], uid: str) -> None:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.hand_over(manifest, uid))

    async def patch(self, ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.patch(ref, version, operations))

    async def apply_status(self, ref: Ref, uid: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.apply_status(ref, uid, status))

    async def delete(self, ref: Ref, uid: str, *, orphan: bool) -> bool:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.delete(ref, uid, orphan=orphan))

    async def events_about(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.events_about(namespace, uid))

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """See ClusterApi."""
        return await self._call(lambda: self.inner.create_event(namespace, event))


@dataclass(frozen=True)
class Fault:
    """What happens to one request. `status` 0: it is not answered at all, `before` it reaches the server or after."""

    status: int = 0
    retry_after: int | None = None
    landed: bool = False


@dataclass(frozen=True)
class Seen:
    """One request that passed, numbered from 1."""

    number: int
    method: str
    path: str
    watch: bool


Rule = Callable[[Seen], Fault | None]
CLOSING_SECONDS = 0.5


class FaultProxy:
    """An HTTP proxy on loopback in front of an API server. Use as an async context manager."""

    def __init__(self, server: str, tls: ssl.SSLContext | None) -> None:
        self._server = server.rstrip("/")
        self._tls = tls
        self.rule: Rule = lambda _seen: None
        self.seen: list[Seen] = []
        self.flowing = asyncio.Event()
        """Cleared: open watches bring nothing any more and stay open."""
        self.flowing.set()
        self.url = ""

    async def __aenter__(self) -> FaultProxy:
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A killed operator must end its watches here, too.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.5, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()
        # Transports close some turns of the loop later (over TLS after the other side's answer), and whoever runs this
        # loop ends it now.
        await asyncio.sleep(CLOSING_SECONDS)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") in ("true", "1")
        seen = Seen(len(self.seen) + 1, request.method, request.path_qs, watch)
        self.seen.append(seen)
        fault = self.rule(seen)
        if fault is not None:
            if fault.landed:
                async with self._forward(request) as upstream:
                    await upstream.read()
            return _answer(request, fault)
        try:
            async with self._forward(request) as upstream:
                return await self._relay(request, upstream, watch)
        except (aiohttp.ClientError, ConnectionError):
            # Either side is gone: the operator was killed, or the server is being restarted.
            return _answer(request, Fault(0))

    def _forward(self, request: web.Request) -> Any:
        headers = {
            name: request.headers[name] for name in ("Accept", "Content-Type", "Authorization", "User-Agent")
            if name in request.headers
        }  # fmt: skip
        return _Forwarded(self._session, request, f"{self._server}{request.path_qs}", headers)

    async def _relay(self, request: web.Request, upstream: aiohttp.ClientResponse, watch: bool) -> web.StreamResponse:
        headers = {name: upstream.headers[name] for name in ("Content-Type", "Retry-After") if name in upstream.headers}
        if not watch:
            return web.Response(status=upstream.status, body=await upstream.read(), headers=headers)
        response = web.StreamResponse(status=upstream.status, headers=headers)
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
            await self.flowing.wait()
            await response.write(chunk)
        return response


class _Forwarded:
    """The request to the real server, body included."""

    def __init__(self, session: aiohttp.ClientSession, request: web.Request, url: str, headers: dict[str, str]) -> None:
        self._session, self._request, self._url, self._headers = session, request, url, headers

    async def __aenter__(self) -> aiohttp.ClientResponse:
        body = await self._request.read()
        self._response = await self._session.request(
            self._request.method, self._url, data=body or None, headers=self._headers
        )
        return self._response

    async def __aexit__(self, *_: object) -> None:
        self._response.close()


def _answer(request: web.Request, fault: Fault) -> web.StreamResponse:
    if fault.status == 0:
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)
    reasons = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": fault.status,
        "reason": reasons.get(fault.status, "Unknown"),
        "message": "injected",
    }
    headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
    return web.json_response(body, status=fault.status, headers=headers)
