"""Several routers over the same engines and one handle store, as the replicas of a PDDeployment are.

Separate from `Deployment`, which has one router: each router here is a view of its own on the same engines, so that
conversations can move from one to the other, and everything that must hold after a test is asked of all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from support.chat import Talk, Turn
from support.deployment import Deployment, Spec
from support.redis_server import RedisServer
from support.router_process import RouterProcess
from support.valkey_bench import written
from support.waiting import until


class SharedDeployment(Deployment):
    """Starts engines and a first router; `join` adds another. The first view owns the engines."""

    def __init__(self, spec: Spec, server: RedisServer, folder: Path) -> None:
        super().__init__(spec)
        self.server = server
        self._folder = folder
        self._others: list[SharedDeployment] = []

    def flags(self, **more: str) -> dict[str, str]:
        """A router's flags; ``more`` as `valkey_timeout="1"`, "" to leave one out."""
        own = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
        flags = {
            "--handle-store": "valkey",
            "--valkey-url": self.server.url,
            "--valkey-timeout": "2",
            "--handle-key-file": written(self._folder, "handle-key", "canary-key-of-32-bytes-0123456789\n"),
            **dict(self.spec.flags),
            **own,
        }
        return {flag: value for flag, value in flags.items() if value}

    async def start(self, *, ready: bool = True, **flags: str) -> None:
        """Start engines and the first router, with its store."""
        for engine in self.engines:
            await engine.start()
        self._router = await self._start_router(self.flags(**flags))

    async def join(self, **flags: str) -> SharedDeployment:
        """One more router, as a view on the same engines."""
        view = copy.copy(self)
        view._log_read = 0
        view.ended = False
        view._others = []
        view._router = await self._start_router(self.flags(**flags))
        self._others.append(view)
        return view

    async def _start_router(self, flags: Mapping[str, str]) -> RouterProcess:
        hosts = [word for engine in self.engines for word in ("--allow-handle-host", engine.connector.host)]
        router = RouterProcess(
            [engine.url for engine in self.prefills], [engine.url for engine in self.decodes], flags, hosts
        )
        await router.start()
        return router

    async def wait_store(self, up: bool = True) -> None:
        """Wait until this router can use the store, or cannot. Raises TimeoutError."""

        async def reached() -> bool:
            return (await self.metrics())["pd_router_handle_store_up"] == up

        await until(reached, 30.0)

    async def is_ready(self) -> bool:
        """Whether this router says that it can serve."""
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/readyz") as response:
            return response.status == 200

    async def check(self) -> None:
        """Raise AssertionError unless engines and all routers are clean."""
        for view in (*self._others, self):
            await Deployment.check(view)

    async def stop(self) -> None:
        """End everything."""
        for view in self._others:
            await view.router.stop()
            view.check_log()
            view.router.discard()
        await super().stop()


async def say_on(deployment: Deployment, talk: Talk, text: str = "Go on.") -> Turn:
    """The conversation's next turn, on another router."""
    talk.deployment = deployment
    return await talk.say(text)
