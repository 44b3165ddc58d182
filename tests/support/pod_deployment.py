"""A deployment whose engines are pods: fake engines, a fake API server that tells of them, and the real router.

Separate from `Deployment`, which gives the router addresses: here a test moves pods (join, drain, restart, leave) and
the router has to find out. Pods are on loopback, one port each; their second address is the one that handles name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from support.deployment import Deployment, Spec
from support.fake_api_server import FakeApiServer
from support.fake_engine import FakeEngine
from support.pods import make_pod
from support.router_process import RouterProcess
from support.waiting import until

NAME = "tiny"
QUICK: Mapping[str, str] = {
    "--discovery-stall": "1.0",
    "--discovery-relist": "60",
    "--discovery-retry-max": "0.4",
}
"""A router that notices a silent watch after a second; bookmarks come five times as often."""

FRESH = {"start": 1, "ready": True, "deleting": False, "phase": "Running", "generation": "g1", "deployment": NAME}


class PodDeployment(Deployment):
    """All engines of the spec run; those that have a pod are the router's."""

    namespace = "default"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.api = FakeApiServer()
        self._fields: dict[FakeEngine, dict[str, Any]] = {}
        self._serial = 0
        self._folder = tempfile.TemporaryDirectory(prefix="pd-pods-")

    async def start(self, *, ready: bool = True, api: bool = True) -> None:
        """Start engines and API server, give the first prefill and decode engine a pod, then start the router."""
        await self.api.start()
        for engine in self.engines:
            await engine.start()
        for engine in (self.prefill, self.decode):
            self.join(engine)
        if not api:
            await self.api.stop()
        path = self.kubeconfig_path
        path.write_text(self.api.kubeconfig())
        await self.start_router(path, ready=ready and api)

    async def start_router(self, kubeconfig: Path, *, ready: bool = True, more: Sequence[str] = ()) -> None:
        """Start the router with these credentials and further arguments."""
        flags = {**QUICK, **dict(self.spec.flags)}
        source = ["--discover-kubernetes", f"{self.namespace}/{NAME}", "--kubeconfig", str(kubeconfig)]
        self._router = RouterProcess([], [], flags, [*source, *more])
        await self._router.start(ready=ready)

    async def stop(self) -> None:
        """End everything."""
        try:
            await super().stop()
        finally:
            await self.api.stop()
            self._folder.cleanup()

    async def restore(self) -> None:
        """New processes, one fresh pod per role, a well API server: what a test may count on when it begins."""
        await self.api.start()
        self.api.calm()
        for engine in list(self._fields):
            self.leave(engine)
        for engine in self.engines:
            await engine.restart()
        for engine in (self.prefill, self.decode):
            self.join(engine)
        self.reset()
        await self.wait_states({self.prefill: "ready", self.decode: "ready"})

    @property
    def kubeconfig_path(self) -> Path:
        """The file that the router was started with."""
        return Path(self._folder.name) / "kubeconfig"

    # --- pods ---------------------------------------------------------------------------------

    def name(self, engine: FakeEngine) -> str:
        """The engine's pod."""
        role = engine.config.connector.role
        return f"{NAME}-{role}-{(self.prefills if role == 'prefill' else self.decodes).index(engine)}"

    def join(self, engine: FakeEngine, **fields: Any) -> None:
        """A new pod for the engine, ready unless the fields say otherwise."""
        self._serial += 1
        created = f"2026-11-30T10:{self._serial // 60:02}:{self._serial % 60:02}Z"
        self._fields[engine] = {**FRESH, "uid": f"uid-{self._serial}", "created": created}
        self.move(engine, **fields)

    def move(self, engine: FakeEngine, **fields: Any) -> None:
        """Change its pod."""
        self._fields[engine] |= fields
        self.api.put(self.pod(engine))

    def pod(self, engine: FakeEngine, **fields: Any) -> dict[str, Any]:
        """Its pod as it is, with some fields otherwise."""
        side_channel = engine.connector.host
        base = {"ip": engine.config.host, "ips": [side_channel], "port": engine.port, **self._fields[engine]}
        return make_pod(self.name(engine), engine.config.connector.role, **{**base, **fields})

    def leave(self, engine: FakeEngine) -> None:
        """Its pod is deleted."""
        self.api.delete(self.name(engine))
        del self._fields[engine]

    async def restart_container(self, engine: FakeEngine) -> None:
        """The engine's process is replaced; its pod stays."""
        self.move(engine, ready=False)
        await engine.restart()
        self.move(engine, start=self._fields[engine]["start"] + 1, ready=True)

    # --- what the router says -----------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """`/status`."""
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/status") as response:
            assert response.status == 200
            status: dict[str, Any] = await response.json()
        return status

    async def states(self) -> dict[str, str]:
        """Engine to `ready`, `not ready` or `draining`."""
        engines = (await self.status())["engines"]
        return {
            engine["engine"]: "draining" if engine["draining"] else "ready" if engine["ready"] else "not ready"
            for engine in engines
        }

    async def wait_told(self) -> None:
        """Wait until the router knows everything that the API server has told so far. Raises TimeoutError.

        Events come in order: when the router names this pod, which can't be an engine, it knows what came before it.
        """
        self._serial += 1
        name = f"mark-{self._serial}"
        self.api.put(make_pod(name, port_name="none"))

        async def named() -> bool:
            return any(pod["pod"] == name for pod in (await self.status())["discovery"]["unusable"])

        await until(named, 30.0)
        self.api.delete(name)

    async def wait_states(self, wanted: Mapping[FakeEngine, str], *, told: bool = True) -> None:
        """Wait until the router knows exactly these engines in these states. Raises TimeoutError.

        ``told`` false: the API server can't tell it anything now.
        """
        names = {self.name(engine): state for engine, state in wanted.items()}
        if told:
            await self.wait_told()

        async def reached() -> bool:
            return await self.states() == names

        try:
            await until(reached)
        except TimeoutError as error:
            raise TimeoutError(f"wanted {names}, got {await self.states()}") from error

    async def not_ready_reason(self) -> str:
        """What `/readyz` says; "ok" when ready."""
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/readyz") as response:
            return (await response.text()).strip()
