"""Fake engines as processes, a fake API server that tells of their pods, and the real router in front of them.

Separate from `Deployment`, whose engines live in the test's own process: these can be killed and stopped by the kernel,
and nothing of them survives. What must hold at the end is asked of the judge, of the engines and of the router.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.deployment import Deployment, Spec
from support.engine_process import STYLE
from support.fake_api_server import FakeApiServer
from support.fake_engine import Answer
from support.pods import make_pod
from support.ports import free_ports
from support.router_process import RouterProcess
from support.waiting import until

TESTS = Path(__file__).resolve().parents[1]
NAME = "tiny"
START_SECONDS = 60.0


@dataclass(eq=False)
class EngineProcess:
    """One engine: its address stays, its processes and its pods come and go."""

    role: str
    number: int
    port: int
    side_port: int
    process: asyncio.subprocess.Process | None = None
    start: int = 0
    uid: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As its engine ids begin."""
        return f"{self.role}-{self.number}"

    @property
    def pod(self) -> str:
        """As the router calls it."""
        return f"{NAME}-{self.name}"

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.returncode is None


class ProcessFleet(Deployment):
    """Engines, API server, judge and router. Times in seconds."""

    def __init__(
        self,
        prefills: int,
        decodes: int,
        *,
        flags: Mapping[str, str] | None = None,
        engine_flags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(Spec(prefills=0, decodes=0))
        ports = iter(free_ports(2 * (prefills + decodes) + 1))
        self._judge_port = next(ports)
        roles = [
            *(("prefill", number) for number in range(prefills)),
            *(("decode", number) for number in range(decodes)),
        ]
        self.processes = [EngineProcess(role, number, next(ports), next(ports)) for role, number in roles]
        self.api = FakeApiServer()
        self._flags = dict(flags or {})
        self._engine_flags = dict(engine_flags or {})
        self._judge: asyncio.subprocess.Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pd-fleet-")
        self._log = (Path(self._folder.name) / "engines.log").open("ab")
        self._serial = 0
        self._session: aiohttp.ClientSession | None = None

    def of_role(self, role: str) -> list[EngineProcess]:
        """Its engines."""
        return [engine for engine in self.processes if engine.role == role]

    @property
    def judge_url(self) -> str:
        """Where handles and violations are kept."""
        return f"http://127.0.0.1:{self._judge_port}"

    @property
    def session(self) -> aiohttp.ClientSession:
        """For orders and questions."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        return self._session

    def right(self, body: Mapping[str, Any], style: Any = None, *more: Any, **most: Any) -> Answer:
        """The answer to a client's body when everything is recomputed."""
        return super().right(body, style or STYLE, *more, **most)

    # --- processes ----------------------------------------------------------------------------
    async def start(self, *, ready: bool = True) -> None:
        """Start everything; all engines are ready then."""
        self._judge = await self._spawn("support.cluster_serving_judge", str(self._judge_port))
        await self.api.start()
        await asyncio.gather(*(self.up(engine) for engine in self.processes))
        kubeconfig = Path(self._folder.name) / "kubeconfig"
        kubeconfig.write_text(self.api.kubeconfig())
        source = ["--discover-kubernetes", f"default/{NAME}", "--kubeconfig", str(kubeconfig)]
        flags = {"--discovery-stall": "3", "--discovery-retry-max": "0.5", "--log-level": "info", **self._flags}
        self._router = RouterProcess([], [], flags, source)
        await self._router.start(ready=ready)
        await self.wait_ready(len(self.processes))

    async def up(self, engine: EngineProcess, *, new_pod: bool = True) -> None:
        """Start its process, in a new pod or as the next start of the one that it has. Raises TimeoutError."""
        flags = [word for pair in self._engine_flags.items() for word in pair]
        engine.process = await self._spawn(
            "support.engine_process",
            *("--role", engine.role, "--name", engine.name, "--judge", self.judge_url),
            *("--port", str(engine.port), "--side-port", str(engine.side_port), *flags),
        )

        async def answers() -> bool:
            try:
                async with self.session.get(f"http://127.0.0.1:{engine.port}/health") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, START_SECONDS, 0.05)
        self._serial += 1
        engine.start += 1
        if new_pod:
            engine.uid = f"uid-{self._serial}"
            engine.fields = {"created": f"2026-11-30T10:{self._serial // 60 % 60:02}:{self._serial % 60:02}Z"}
        self.show(engine, ready=True)

    def show(self, engine: EngineProcess, **fields: Any) -> None:
        """Its pod, for whoever watches."""
        engine.fields |= fields
        self.api.put(
            make_pod(
                engine.pod,
                engine.role,
                deployment=NAME,
                uid=engine.uid,
                ip="127.0.0.1",
                port=engine.port,
                start=engine.start,
                **engine.fields,
            )
        )

    async def kill(self, engine: EngineProcess) -> None:
        """End its process as the kernel does; its pod stays."""
        if engine.process is not None and engine.running:
            engine.process.kill()
            await engine.process.wait()

    def signal(self, engine: EngineProcess, number: signal.Signals) -> None:
        """SIGSTOP and SIGCONT: hung, and well again."""
        if engine.process is not None and engine.running:
            engine.process.send_signal(number)

    async def replace(self, engine: EngineProcess) -> None:
        """As a rolling update does: told first, ended when it has nothing left to do, a new pod in its place.

        Raises TimeoutError.
        """
        self.show(engine, deleting=True)

        async def told() -> bool:
            members = {member["engine"]: member for member in await self.fleet()}
            return bool(members[engine.pod]["draining"] and not members[engine.pod]["turns"])

        await until(told, START_SECONDS, 0.1)

        async def at_rest() -> bool:
            state = await self.state(engine)
            # Decode's retained blocks are nobody's now; prefill's wait for a decode engine that is about to read.
            return not state["running"] and (engine.role == "decode" or not state["retained"])

        await until(at_rest, START_SECONDS, 0.1)
        await self.kill(engine)
        self.api.delete(engine.pod)
        await self.up(engine)

    async def order(self, engine: EngineProcess, **what: Any) -> None:
        """Plan a fault; harmless when the engine is away."""
        try:
            async with self.session.post(f"http://127.0.0.1:{engine.side_port}/order", json=what):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return

    async def state(self, engine: EngineProcess) -> dict[str, Any]:
        """What runs there and what is retained. Raises aiohttp.ClientError."""
        async with self.session.get(f"http://127.0.0.1:{engine.side_port}/state") as response:
            found: dict[str, Any] = await response.json()
        return found

    async def verdict(self) -> dict[str, Any]:
        """The judge's report."""
        async with self.session.get(f"{self.judge_url}/report") as response:
            found: dict[str, Any] = await response.json()
        return found

    async def fleet(self) -> list[dict[str, Any]]:
        """`/debug/fleet`."""
        return await self._fleet()

    async def stop(self) -> None:
        """End everything."""
        try:
            await super().stop()
        finally:
            await self.api.stop()
            if self._session is not None:
                await self._session.close()
            for engine in self.processes:
                self.signal(engine, signal.SIGCONT)
                await self.kill(engine)
            if self._judge is not None and self._judge.returncode is None:
                self._judge.kill()
                await self._judge.wait()
            self._log.close()
            self._folder.cleanup()

    @property
    def engine_log(self) -> str:
        """What engines and judge have written."""
        return (Path(self._folder.name) / "engines.log").read_text(errors="replace")

    async def _spawn(self, module: str, *arguments: str) -> asyncio.subprocess.Process:
        paths = os.pathsep.join(str(folder) for folder in (TESTS, TESTS.parent / "connector"))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
