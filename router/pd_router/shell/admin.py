"""Health, metrics, a short status for the operator and the last decisions, on a port of their own.

A port of its own so that a probe is not queued behind streams and so that a NetworkPolicy can keep clients away from
`/debug/explain`. Not the data plane, hence an ordinary library. Where the pages come from is another question: from
this process, or put together from those of several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pd_router.core.addresses import Endpoint

READY: Final = "ready"
"""Why no turn can be served now; empty when one can be."""
METRICS: Final = "metrics"
STATUS: Final = "status"
EXPLAIN: Final = "explain"
FLEET: Final = "fleet"


class Pages:
    """What one process has to tell. `why_not_ready` returns None when it can serve."""

    def __init__(
        self,
        registry: CollectorRegistry,
        decisions: deque[dict[str, Any]],
        why_not_ready: Callable[[], str | None],
        fleet: Callable[[], list[dict[str, Any]]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._pages: dict[str, Callable[[], bytes]] = {
            READY: lambda: (why_not_ready() or "").encode(),
            METRICS: lambda: generate_latest(registry),
            STATUS: lambda: orjson.dumps(status()),
            EXPLAIN: lambda: orjson.dumps(list(decisions)),
            FLEET: lambda: orjson.dumps(fleet()),
        }

    def read(self, name: str) -> bytes:
        """One page as it is now."""
        return self._pages[name]()

    async def read_soon(self, name: str) -> bytes:
        """The same, for `Admin`."""
        return self.read(name)


class Admin:
    """The admin server. `read` gives the pages."""

    def __init__(self, endpoint: Endpoint, read: Callable[[str], Awaitable[bytes]]) -> None:
        self._endpoint = endpoint
        self._read = read
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._summary)
        app.router.add_get("/debug/explain", self._explain)
        app.router.add_get("/debug/fleet", self._engines)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Listen. Returns the port. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._endpoint.host, self._endpoint.port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = (await self._read(READY)).decode()
        return web.Response(status=503, text=f"{reason}\n") if reason else web.Response(text="ok\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._read(METRICS), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _explain(self, request: web.Request) -> web.Response:
        found = await self._read(EXPLAIN)
        wanted = request.query.get("request_id")
        if wanted is not None:
            found = orjson.dumps([item for item in orjson.loads(found) if item["request_id"] == wanted])
        return web.Response(body=found, content_type="application/json")

    async def _engines(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._read(FLEET), content_type="application/json")

    async def _summary(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._read(STATUS), content_type="application/json")
