"""Health, metrics, a short status for the operator and the last decisions, on a port of their own.

A port of its own so that a probe is not queued behind streams and so that a NetworkPolicy can keep clients away from
`/debug/explain`. Not the data plane, hence an ordinary library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pd_router.core.settings import Endpoint


class Admin:
    """The admin server. `why_not_ready` returns None when the router can serve."""

    def __init__(
        self,
        endpoint: Endpoint,
        registry: CollectorRegistry,
        decisions: deque[dict[str, Any]],
        why_not_ready: Callable[[], str | None],
        fleet: Callable[[], list[dict[str, Any]]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._endpoint = endpoint
        self._registry = registry
        self._decisions = decisions
        self._why_not_ready = why_not_ready
        self._fleet = fleet
        self._status = status
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._summary)
        app.router.add_get("/debug/explain", self._explain)
        app.router.add_get("/debug/fleet", self._engines)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Listen. Returns the port."""
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
        reason = self._why_not_ready()
        return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _explain(self, request: web.Request) -> web.Response:
        wanted = request.query.get("request_id")
        found = [item for item in self._decisions if wanted is None or item["request_id"] == wanted]
        return web.Response(body=orjson.dumps(found), content_type="application/json")

    async def _engines(self, _request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(self._fleet()), content_type="application/json")

    async def _summary(self, _request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(self._status()), content_type="application/json")
