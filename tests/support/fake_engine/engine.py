"""A fake engine process: its server, its restarts, its log of requests, its plan of misbehaviour.

Separate from what an answer contains (`serving`) because a test mostly talks to this part: start, kill, restart on the
same port with a new engine id, freeze, and ask afterwards what arrived and how it ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from pd_wire import names
from support.fake_engine.apis import PATHS
from support.fake_engine.behaviour import Behaviour, Rule
from support.fake_engine.connector import Connector, ConnectorConfig
from support.fake_engine.fabric import Fabric
from support.fake_engine.leases import LeaseCall, LeaseFault
from support.fake_engine.tokens import Template

Fate = Literal["running", "ended", "failed", "aborted"]

_numbers = itertools.count(1)


@dataclass(slots=True)
class Record:
    """One request that reached the engine and what became of it. Token counts are None until it was admitted."""

    path: str
    headers: list[tuple[str, str]]
    raw: bytes
    body: dict[str, Any]
    fate: Fate = "running"
    status: int | None = None
    prompt_tokens: int | None = None
    local_tokens: int | None = None
    pulled_tokens: int | None = None
    answer: str | None = None
    request_id: str | None = None
    """The engine's own name for the (first) run; a handle of this request holds it."""
    target: str = ""
    """Path and query as they were sent; `path` has no query."""
    rank: int = 0
    """Data-parallel rank that served it."""

    @property
    def params(self) -> Any:
        """What arrived under ``kv_transfer_params``."""
        return self.body.get(names.KV_PARAMS)

    @property
    def handle_id(self) -> str | None:
        """Request id in the handle that arrived, or None without a handle."""
        params = self.params
        value = params.get("remote_request_id") if isinstance(params, Mapping) else None
        return value if isinstance(value, str) else None

    def header(self, name: str) -> str | None:
        """First header with this name, in any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Passed:
    """A request to an endpoint without KV."""

    method: str
    target: str
    headers: dict[str, str]
    raw: bytes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What stays the same over restarts. ``port`` 0 takes a free one at the first start; times in seconds.

    ``name`` and ``side_channel`` are made up where not given; in a pod they are the pod's. ``ranks``: data-parallel
    ranks behind the one address, each with KV, an engine id and a side-channel port of its own.
    """

    connector: ConnectorConfig
    models: tuple[str, ...] = ("tiny",)
    template: Template = field(default_factory=Template)
    max_model_len: int = 65536
    version: str = "0.32.0"
    details: bool = True
    """`--enable-prompt-tokens-details`."""
    port: int = 0
    host: str = "127.0.0.1"
    keepalive_timeout: float = 75.0
    name: str | None = None
    side_channel: tuple[str, int] | None = None
    ranks: int = 1
    first_rank: int = 0
    """Number of the first rank: behind an external or hybrid balancer an address has a part of all."""


class FakeEngine:
    """One engine behind one HTTP address; `restart` gives it a new process identity at the same address."""

    def __init__(self, config: EngineConfig, fabric: Fabric) -> None:
        self.config, self.fabric = config, fabric
        number = next(_numbers)
        self.name = config.name or f"{config.connector.role}-{number}"
        self._side_channel = config.side_channel or (f"10.91.{number // 250}.{number % 250 + 1}", 5600)
        self.port = config.port
        self.requests: list[Record] = []
        self.passed: list[Passed] = []
        self.lease_calls: list[LeaseCall] = []
        self.lease_fault: LeaseFault | None = None
        self.plan: list[Rule] = []
        self.default = Behaviour()
        self.health_status = 200
        self.tap: Callable[[bytes], object] | None = None
        """Called with the bytes of each stream event, handle included."""

        self._runner: web.AppRunner | None = None
        self._thaw = asyncio.Event()
        self._thaw.set()
        self.ranks = self._new_ranks()
        self._next_rank = 0

    # --- process ------------------------------------------------------------------------------

    @property
    def connector(self) -> Connector:
        """The KV side of the engine, or of its first rank."""
        return self.ranks[0]

    def rank_for(self, asked: str | None) -> Connector:
        """The rank that a request goes to: the one that its header names, else the next in turn. A number that is out
        of range is somebody's mistake, which vLLM answers with an error."""
        if asked is None:
            self._next_rank = (self._next_rank + 1) % len(self.ranks)
            return self.ranks[self._next_rank]
        if not asked.isdigit() or int(asked) >= len(self.ranks):
            self.fabric.violate(self.name, f"no data-parallel rank {asked!r}")
            return self.ranks[0]
        return self.ranks[int(asked)]

    @property
    def url(self) -> str:
        """Base URL, no slash at the end."""
        return f"http://{self.config.host}:{self.port}"

    @property
    def engine_id(self) -> str:
        """Identity of the process that runs now."""
        return self.connector.engine_id

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        from support.fake_engine.routes import make_app

        self._runner = web.AppRunner(
            make_app(self),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.05,
            keepalive_timeout=self.config.keepalive_timeout,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.port, reuse_address=True, backlog=2048)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Die as by SIGKILL: connections are reset, the KV memory is gone, peers can't reach it."""
        runner, self._runner = self._runner, None
        for rank in self.ranks:
            self.fabric.leave(rank)
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        self._thaw.set()
        await runner.cleanup()
        for record in self.requests:
            if record.fate == "running":
                record.fate = "failed"

    async def restart(self) -> None:
        """Kill, then start with an empty memory and a new engine id on the same port."""
        await self.kill()
        self.ranks = self._new_ranks()
        await self.start()

    def freeze(self) -> None:
        """Accept connections and requests, and never answer; side channel included."""
        for rank in self.ranks:
            rank.frozen = True
        self._thaw.clear()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        for rank in self.ranks:
            rank.frozen = False
        self._thaw.set()

    async def wait_thawed(self) -> None:
        """Wait until the engine is not frozen."""
        await self._thaw.wait()

    # --- log and plan -------------------------------------------------------------------------

    def behaviour_for(self, record: Record) -> Behaviour:
        """Take the first rule that fits, or the default."""
        for rule in self.plan:
            if rule.times != 0 and rule.when(record):
                if rule.times is not None:
                    rule.times -= 1
                return rule.behaviour
        return self.default

    def next(self, behaviour: Behaviour, *, times: int | None = 1, when: Any = None) -> None:
        """Plan ``behaviour`` for the next fitting requests."""
        self.plan.append(Rule(behaviour, times, when) if when is not None else Rule(behaviour, times))

    @property
    def generates(self) -> list[Record]:
        """Requests for tokens, in order of arrival."""
        return [record for record in self.requests if record.path in PATHS]

    @property
    def used_blocks(self) -> int:
        """Blocks that are in use or retained now."""
        return sum(rank.pool.count - rank.free_blocks() for rank in self.ranks)

    def leases(self) -> dict[str, float]:
        """Seconds left of each promise that is held now, by its token."""
        return {token: left for rank in self.ranks for token, left in rank.promises.left().items()}

    async def idle(self, seconds: float = 5.0) -> None:
        """Wait until no request runs.

        Raises:
            TimeoutError: naming the requests that still run after ``seconds``.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while running := [record for record in self.requests if record.fate == "running"]:
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"{self.name} still runs {len(running)} request(s)")
            await asyncio.sleep(0.005)

    def forget(self) -> None:
        """Clear log and plan and go back to default behaviour; memory and identity stay."""
        self.requests.clear()
        self.passed.clear()
        self.lease_calls.clear()
        self.lease_fault = None
        self.plan.clear()
        self.default = Behaviour()
        self.health_status = 200
        self.tap = None
        for rank in self.ranks:
            rank.pull_delay = 0.0
            rank.cut_off.clear()
        self.thaw()

    def _new_ranks(self) -> list[Connector]:
        host, port = self._side_channel
        count = self.config.ranks
        return [
            Connector(
                self.config.connector,
                self.fabric,
                host,
                port + rank,
                self.name,
                self.config.first_rank + rank if count > 1 or self.config.first_rank else None,
            )
            for rank in range(count)
        ]
