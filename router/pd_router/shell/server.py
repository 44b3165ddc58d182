"""The composition root: builds the parts, listens, routes paths, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_router.core.addresses import SettingsError
from pd_router.core.auth import OPEN_PATHS
from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError, bad_method, internal, no_websocket, unknown_path
from pd_router.core.fields import Api
from pd_router.core.passed import PASSED, SOCKETS
from pd_router.core.placement import Loads
from pd_router.core.response_store import ResponseStore
from pd_router.core.settings import Native, Settings
from pd_router.native import NotBuilt
from pd_router.shell.admin import Admin, Pages
from pd_router.shell.admission import Admission
from pd_router.shell.client import ClientConnection, ServerState
from pd_router.shell.context import Context
from pd_router.shell.conversations import PREFIX, end_conversation
from pd_router.shell.descriptors import ClientShare, pumped_streams
from pd_router.shell.discovery import Discovery, StaticDiscovery
from pd_router.shell.discovery_metrics import DiscoveryMetrics, FleetCollector
from pd_router.shell.exchange import Failure
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.guard import Guard
from pd_router.shell.lease_keeper import LeaseKeeper
from pd_router.shell.legs import CLIENT_LEFT
from pd_router.shell.metrics import OTHER, Metrics
from pd_router.shell.passthrough import pass_through
from pd_router.shell.pump import Pump
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_router.shell.store_metrics import SharedStoreMetrics, StoreCollector
from pd_router.shell.stores import make_keyring, make_store
from pd_router.shell.tls_listener import TlsListener
from pd_router.shell.transfer_metrics import TransferCollector
from pd_router.shell.turn import Turn
from pd_router.shell.upstream import EnginePool
from pd_router.shell.versions import EngineVersions
from pd_router.shell.worker_store import Shared
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

if TYPE_CHECKING:
    from pd_router.shell.tracing import Tracing

log = logging.getLogger("pd_router")

TURNS = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
}
ANTHROPIC_PREFIX = "/v1/messages"
BACKLOG = 4096
SWEEP_SECONDS = 1.0
IDLE_GRACE_SECONDS = 2.0
"""How long a kept connection must bring nothing before a draining router closes it."""

DRAIN_LOOK_SECONDS = 0.1


class Router:
    """One router, or one worker of it: its parts and its listener."""

    def __init__(self, settings: Settings, shared: Shared | None = None) -> None:
        """`shared`: what it has in common with the other workers, for a worker."""
        self.settings = settings
        self._is_worker = shared is not None
        # One clock for arrival times, deadlines and handle ages. The loop counts from the same zero, in whole ms.
        self._loop = asyncio.get_running_loop()
        now = time.monotonic
        metrics = Metrics()
        guard = self._guard = Guard(settings, metrics)
        if shared is not None:
            guard.meter, guard.retained = shared.meter, shared.retained
        self._pump = _make_pump(settings, self._loop)
        pool = EnginePool(settings.timeouts.connect, guard.engines, self._pump)
        fleet = Fleet(
            metrics, settings.allowed_hosts, self._purge, self._engine_gone, settings.timeouts.pair_quarantine
        )
        store = self._store = make_store(settings, SharedStoreMetrics(metrics), fleet.incarnation_of, shared)
        heartbeat = settings.reuse.lease_heartbeat
        leases = LeaseKeeper(
            pool,
            fleet.member,
            metrics,
            now,
            guard.gate.engine_authorization,
            heartbeat,
            guard.retained.let_go,
            None if shared is None else shared.leases,
        )
        store.report_to(leases.dropped)
        self.discovery = self._make_discovery(fleet, metrics)
        limits = settings.limits
        self.context = Context(
            settings=settings,
            now=now,
            metrics=metrics,
            pool=pool,
            fleet=fleet,
            store=store,
            keyring=make_keyring(settings, shared),
            admission=Admission(
                limits.max_inflight,
                limits.max_queue,
                settings.timeouts.queue,
                metrics,
                settings.tenant_limits.queue_share,
                guard.limited["tenant_queue_limit"].inc,
            ),
            loads=Loads(),
            nudge=self.discovery.nudge,
            tracing=_tracing(settings, now),
            guard=guard,
            leases=leases,
            versions=EngineVersions(pool, now),
            responses=ResponseStore(limits.response_bytes) if shared is None else shared.responses,
        )
        metrics.register(StoreCollector(store, now))
        metrics.register(TransferCollector(fleet, metrics, now))
        metrics.register(FleetCollector(fleet, self.context.loads, metrics, now))
        share = ClientShare(limits.max_inflight, now)
        self.state = ServerState(
            self._handle,
            limits.max_body_bytes,
            share,
            share.refused,
            lambda status: metrics.requests[OTHER, str(status)].inc(),
            guard.gate.admit,
        )
        self.pages = Pages(
            metrics.registry,
            self.context.decisions,
            self.why_not_ready,
            lambda: self.context.versions.add_to(fleet.describe(self.context.loads, now())),
            self._status,
        )
        self.admin = Admin(settings.admin, self.pages.read_soon)
        self._started = time.time()
        self._server: asyncio.Server | TlsListener | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> tuple[int, int]:
        """Listen. Returns the ports of the data plane and of the admin server.

        Raises OSError when one is taken, DiscoveryError when engines can never be found.
        """
        port = await self.listen()
        await self.begin()
        return port, await self.admin.start()

    async def listen(self) -> int:
        """Take connections from here on. Returns the port. Raises OSError."""
        host, port = self.settings.listen.host, self.settings.listen.port

        def make() -> ClientConnection:
            return ClientConnection(self.state, time.monotonic)

        if (context := self._guard.listener_context) is not None:
            self._server = TlsListener(self.state, make, context)
            await self._server.start(host, port, BACKLOG, self._is_worker)
        else:
            self._server = await self._loop.create_server(
                make, host, port, backlog=BACKLOG, reuse_port=self._is_worker or None
            )
        return int(self._server.sockets[0].getsockname()[1])

    async def begin(self) -> None:
        """Look for the engines, and watch deadlines. Raises DiscoveryError."""
        self.context.pool.start()
        self._store.start()
        await self.discovery.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="client-deadlines")

    async def drain(self) -> bool:
        """Stop accepting, let running turns finish. Returns whether all did within the drain timeout.

        A client may be sending on a kept connection while it is being closed, and would see an error. So each
        connection may bring one more request, whose answer tells the client to close it; only those that bring
        nothing for a while are closed from here.
        """
        self.state.draining = True
        if self._server is not None:
            self._server.close()
        limit = self.settings.timeouts.drain
        grace = min(IDLE_GRACE_SECONDS, limit / 2)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                while self.state.connections:
                    quiet_since = time.monotonic() - grace
                    for connection in list(self.state.connections) if quiet_since >= begun else ():
                        connection.close_idle(quiet_since)
                    self.state.emptied.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.state.emptied.wait(), DRAIN_LOOK_SECONDS)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End everything now."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.context.versions.stop()
        self.context.leases.stop()
        await self.discovery.stop()
        for connection in list(self.state.connections):
            connection.cut()
        await self.context.pool.stop()
        if self._pump is not None:
            self._pump.close()
        await self._store.stop()
        await self.admin.stop()
        if self.context.tracing is not None:
            await self.context.tracing.stop()

    def why_not_ready(self) -> str | None:
        """Why no turn can be served now, or None."""
        if self.state.draining:
            return "draining"
        unknown = self.discovery.why_not_ready()
        if unknown is not None:
            return unknown
        now = self._loop.time()
        generations: list[set[str]] = []
        for role in (ROLE_PREFILL, ROLE_DECODE):
            ready = {engine.generation for engine in self.context.fleet.snapshot(role, now) if engine.takes_work}
            if not ready:
                return f"no {role} engine is ready"
            generations.append(ready)
        if generations[0].isdisjoint(generations[1]):
            return "no prefill engine is ready that is of one generation with a ready decode engine"
        return None

    def _make_discovery(self, fleet: Fleet, metrics: Metrics) -> Discovery:
        settings = self.settings
        if settings.pods is None:
            return StaticDiscovery(settings, fleet, self._guard.engines)
        # Imported here so that a router with engine URLs does not load what only pods need.
        from pd_router.shell.kubernetes_discovery import KubernetesDiscovery

        return KubernetesDiscovery(
            settings.pods, settings.timeouts, fleet, DiscoveryMetrics(metrics), time.monotonic, self._guard.engines
        )

    def _status(self) -> dict[str, Any]:
        """What the operator asks for, often: small, and read from counters that exist anyway."""
        status: dict[str, Any] = {
            "reuse": "on" if self.settings.reuse.enabled else "off",
            "started": self._started,
            "engines": self.context.fleet.summary(),
            "funnel": self.context.metrics.funnel_counts(),
            "leases": self.context.leases.describe(),
        }
        discovery = self.discovery.describe()
        return status if discovery is None else {**status, "discovery": discovery}

    def _purge(self, key: str) -> int:
        self._guard.retained.forget_holder(key)
        self.context.leases.forget(key)
        return self.context.store.purge_holder(key, self.context.now())

    def _engine_gone(self, member: Member) -> None:
        if self.context.fleet.member(member.key) is not member:
            self.context.loads.forget(member.key)
        self.context.pool.fail_waiting(member.address, Failure.LOST)

    def _handle(self, request: Request, responder: Responder) -> asyncio.Task[None]:
        return self._loop.create_task(self._answer(request, responder))

    async def _answer(self, request: Request, responder: Responder) -> None:
        """The top of a request's task: whatever happens, the request is answered, or the next one never would be."""
        path, counted = request.path.partition("?")[0], False
        try:
            counted = await self._let_in(path, request, responder)
        except Exception:
            # Without the query, in which some clients have their key.
            log.exception("%s %s failed", request.method, path[:200])
        if not responder.finished and not responder.gone:
            if responder.started:
                responder.abort()
            else:
                responder.send_error(internal())
        if not counted and path not in OPEN_PATHS:
            api = TURNS.get(path)
            self.context.metrics.requests[api.value if api else path, str(responder.status or CLIENT_LEFT)].inc()

    async def _let_in(self, path: str, request: Request, responder: Responder) -> bool:
        """Serve a request whose principal is proven, within its tenant's limits. Returns whether it counts itself, as
        what reaches engines does."""
        if path in OPEN_PATHS:
            return await self._route(path, request, responder)
        meter = self._guard.meter
        try:
            if request.denied is not None:
                raise request.denied
            place = meter.enter(request.tenant, self.context.now())
            if place is not None and not isinstance(place, str):
                place = await place
        except ApiError as error:
            if request.denied is None:
                self._guard.limited[error.code or ""].inc()
            messages = path.startswith(ANTHROPIC_PREFIX)
            body = DIALECTS[Api.MESSAGES if messages else Api.CHAT].error_body(error.body(), error.status)
            own = [(b"x-request-id", self.context.request_id(request.headers).encode())]
            responder.send_error(error, own, body=body)
            return False
        try:
            return await self._route(path, request, responder)
        finally:
            meter.leave(place)

    async def _route(self, path: str, request: Request, responder: Responder) -> bool:
        if (api := TURNS.get(path)) is not None:
            if request.method != "POST":
                responder.send_error(bad_method(request.method, path, "POST"), [(b"allow", b"POST")])
                return False
            await Turn(self.context, api, request, responder).run()
            return True
        if path in PASSED:
            await pass_through(self.context, path, request, responder)
            return request.method in PASSED[path].methods
        if path.startswith(PREFIX):
            await end_conversation(self.context, path, request, responder)
        elif path in SOCKETS:
            responder.send_error(no_websocket(path))
        elif path == "/health":
            reason = self.why_not_ready()
            body = json.dumps(
                {"status": "ok"} if reason is None else {"status": "not ready", "reason": reason}
            ).encode()
            responder.send(200 if reason is None else 503, [(b"content-type", b"application/json")], body)
        else:
            responder.send_error(unknown_path(path))
        return False

    async def _sweep(self) -> None:
        """Look at deadlines that nobody waits for: those of clients, and of handles."""
        fleet = self.context.fleet
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._loop.time()
            self.state.sweep(now, self.settings.timeouts)
            self.context.store.expire(now)
            self._guard.refresh(now)
            self.context.versions.refresh([*fleet.of_role(ROLE_PREFILL), *fleet.of_role(ROLE_DECODE)])


def _make_pump(settings: Settings, loop: asyncio.AbstractEventLoop) -> Pump | None:
    """Raises SettingsError when it is asked for and is not there."""
    if settings.native is Native.OFF:
        return None
    try:
        return Pump(loop, pumped_streams(settings.limits.max_inflight))
    except NotBuilt as error:
        if settings.native is Native.ON:
            raise SettingsError([f"--native: {error}"]) from error
        log.info("tokens are relayed in Python: %s", error)
        return None


def _tracing(settings: Settings, now: Callable[[], float]) -> Tracing | None:
    """Raises SettingsError when it is asked for and its packages are not there."""
    if not settings.tracing.endpoint:
        return None
    try:
        # Imported here so that a router without traces does not need the packages, nor load them.
        from pd_router.shell.tracing import Tracing
    except ModuleNotFoundError as error:
        raise SettingsError(
            [f"--otlp-endpoint: needs the extra `tracing` (no module {error.name}): pip install 'pd-operator[tracing]'"]
        ) from error
    return Tracing(settings.tracing, now)
