"""A whole deployment as local processes: start, watch, restart or kill one by role, stop all, leave nothing behind.

Used by `pdctl up`, by `pdctl demo` and by tests that need real engines. Decisions (ports, cores, arguments, wording)
are made in `core`; this module carries them out in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from pd_operator.core.model import PDDeployment
from pdctl.core.commands import LOOPBACK, Command, Part, Urls, plan_commands
from pdctl.core.placement import plan_seats
from pdctl.core.ports import PortWishes, plan_ports
from pdctl.core.preflight import engine_python_problems
from pdctl.shell.engine_python import EnginePythonError, add_connector_path, find_programs, observe_engine_python
from pdctl.shell.lifecycle import Listener, Silent, Started, StartError, Starting, Stopped
from pdctl.shell.machine import PortClaims, observe_machine
from pdctl.shell.processes import ManagedProcess, ProcessError

POLL_SECONDS: Final = 0.5
PROBE_SECONDS: Final = 5.0
ROUTER_START_SECONDS: Final = 60.0
ENGINE_SCRATCH: Final = ("VLLM_RPC_BASE_PATH", "TMPDIR")
"""Where vLLM 0.32 puts the sockets between its processes, seven per engine, which it never removes; and where it meets
its workers (`vllm_dist_…`), which stays when it is killed."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to run a deployment here; the defaults suit a person at a terminal.

    ``stop_grace`` is how many seconds a process has between SIGTERM and SIGKILL; ``start_timeout`` overrides
    `spec.engine.startupTimeoutSeconds`; ``log_dir`` None makes a new folder below the system's temporary one.
    """

    host: str = LOOPBACK
    ports: PortWishes = field(default_factory=PortWishes)
    log_dir: Path | None = None
    engine_python: str = sys.executable
    router_python: str = sys.executable
    stop_grace: float = 10.0
    start_timeout: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Added to every process's environment, after the deployment's own variables."""


class LocalDeployment:
    """One deployment on this machine. As a context manager it starts on entry and stops on exit.

    Roles are `"prefill"`, `"decode"` and `"router"` (or a `Part`); an index counts within a role from 0.
    """

    def __init__(
        self, deployment: PDDeployment, options: LocalOptions | None = None, listener: Listener | None = None
    ) -> None:
        """Plan everything; nothing is started and no process is needed yet.

        Raises:
            pdctl.core.ports.PortError: a port that was asked for can't be had.
            pdctl.core.placement.PlacementError: this machine can't run the deployment.
        """
        self._options = options if options is not None else LocalOptions()
        self._listener: Listener = listener if listener is not None else Silent()
        self._deployment = deployment
        seats = plan_seats(deployment, observe_machine())
        self._claims = PortClaims(self._options.host)
        try:
            spec = deployment.spec
            ports = plan_ports(self._options.ports, spec.prefill.replicas, spec.decode.replicas, self._claims.claim)
        except ValueError:
            self._claims.release()
            raise
        programs = find_programs(self._options.engine_python, self._options.router_python)
        commands, self.urls = plan_commands(deployment, seats, ports, self._options.host, programs)
        self._commands: dict[tuple[Part, int], Command] = {(c.part, c.index): c for c in commands}
        self._processes: dict[tuple[Part, int], ManagedProcess] = {}
        self._expected: set[ManagedProcess] = set()
        self._failure: asyncio.Queue[Stopped] = asyncio.Queue()
        self._watchers: set[asyncio.Task[None]] = set()
        self._engine_timeout = self._options.start_timeout or float(deployment.spec.engine.startup_timeout_seconds)
        self._log_dir = self._options.log_dir

    urls: Urls
    """Where everything listens; known before anything is started."""

    @property
    def log_dir(self) -> Path:
        """Where the logs go. A new folder is made when it is first asked for, so that a refused start leaves none."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="pdctl-"))
        return self._log_dir

    async def check(self) -> None:
        """See that the engines' interpreter has what this deployment needs; takes a moment, starts no engine.

        Raises:
            EnginePythonError: with every problem and what to change.
        """
        found = await observe_engine_python(self._options.engine_python, self._engine_env({}))
        problems = engine_python_problems(self._deployment, found)
        if problems:
            raise EnginePythonError("\n".join(problems))

    async def start(self) -> tuple[Started, ...]:
        """Start the engines at once, then the router, and wait until all are ready.

        Raises:
            StartError: something died or was late. Everything has been stopped by then.
        """
        engines = [key for key in self._commands if key[0] is not Part.ROUTER]
        try:
            ready = await self._start_and_wait(engines)
            ready += await self._start_and_wait([(Part.ROUTER, 0)])
        except BaseException:
            await self.stop()
            raise
        return tuple(ready)

    async def restart(self, role: str, index: int = 0) -> Started:
        """Stop one process if it runs, and start it again with the same arguments and ports.

        Raises:
            StartError: it died or was late; the other processes are left alone.
        """
        key = self._key(role, index)
        await self._stop_one(key)
        (started,) = await self._start_and_wait([key])
        return started

    async def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> Stopped:
        """Send a signal to one process and its children, wait until they are gone. Doesn't count as a failure.

        Raises:
            TimeoutError: a signal other than SIGKILL had no effect within the grace period.
        """
        process = self._process(role, index)
        self._expected.add(process)
        if number is signal.SIGKILL:
            await process.kill()
        else:
            process.signal_group(number)
            await asyncio.wait_for(process.wait(), self._options.stop_grace)
        return await self._stopped(process)

    def send_signal(self, role: str, index: int = 0, number: signal.Signals = signal.SIGSTOP) -> None:
        """Send a signal to one process and its children and return at once: SIGSTOP hangs it, SIGCONT lets it go on."""
        self._process(role, index).signal_group(number)

    def pid(self, role: str, index: int = 0) -> int | None:
        """Process id of one process (leader of its session and group), None while it isn't running."""
        process = self._processes.get(self._key(role, index))
        return process.pid if process is not None and process.running else None

    def log(self, role: str, index: int = 0) -> Path:
        """Log file of one process, kept over restarts."""
        return self.log_dir / f"{self._commands[self._key(role, index)].name}.log"

    async def wait_failure(self) -> Stopped:
        """Until a process ends that nobody asked to end."""
        return await self._failure.get()

    async def stop(self, grace: float | None = None) -> tuple[Stopped, ...]:
        """Stop the router, then all engines at once. Nothing is left running; may be called again.

        Args:
            grace: seconds between SIGTERM and SIGKILL instead of the option's; 0 kills at once.
        """
        stopped: list[Stopped] = []
        try:
            for wanted in (True, False):
                keys = [key for key in self._processes if (key[0] is Part.ROUTER) is wanted]
                stopped += [one for one in await asyncio.gather(*(self._stop_one(key, grace) for key in keys)) if one]
        except asyncio.CancelledError:
            # Whoever cancels an orderly stop wants a quick one, not none.
            await asyncio.shield(asyncio.gather(*(process.kill() for process in self._processes.values())))
            raise
        finally:
            self._processes.clear()
            self._claims.release()
        if self._watchers:
            await asyncio.gather(*self._watchers)
        return tuple(stopped)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start_and_wait(self, keys: Sequence[tuple[Part, int]]) -> list[Started]:
        begun = time.monotonic()
        for key in keys:
            await self._spawn(key)
        waiting = set(keys)
        ready: list[Started] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as session:
            while waiting:
                for key in sorted(waiting):
                    command, process = self._commands[key], self._processes[key]
                    seconds = time.monotonic() - begun
                    limit = ROUTER_START_SECONDS if key[0] is Part.ROUTER else self._engine_timeout
                    if not process.running:
                        self._expected.add(process)
                        stopped = await self._stopped(process)
                        raise StartError(stopped, f"{stopped.exit} before it was ready, after {seconds:.0f} s")
                    if await _healthy(session, command.health):
                        waiting.discard(key)
                        pid = process.pid if process.pid is not None else 0
                        ready.append(Started(command.name, pid, command.url, seconds, process.log))
                        self._listener.started(ready[-1])
                    elif seconds > limit:
                        self._expected.add(process)
                        await process.kill()
                        raise StartError(await self._stopped(process), f"wasn't ready after {limit:.0f} s")
                if waiting:
                    self._listener.starting([self._progress(key, begun) for key in sorted(waiting)])
                    await asyncio.sleep(POLL_SECONDS)
        return ready

    async def _spawn(self, key: tuple[Part, int]) -> None:
        command = self._commands[key]
        engine = key[0] is not Part.ROUTER
        own = {**command.env, **self._options.env}
        env = self._engine_env(command.env) if engine else self._router_env(command.env)
        listener = self._listener
        process = ManagedProcess(
            command.name,
            command.argv,
            env,
            self.log(*key),
            lambda text: listener.line(command.name, text),
            [name for name in ENGINE_SCRATCH if name not in own] if engine else (),
        )
        if key not in self._processes:
            # The folder may hold the log of an earlier run; restarts within a run go below each other.
            process.log.unlink(missing_ok=True)
        self._processes[key] = process
        try:
            await process.start()
        except ProcessError:
            # There is nothing to stop.
            del self._processes[key]
            raise
        watcher = asyncio.create_task(self._watch(process), name=f"watch {command.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _router_env(self, own: dict[str, str]) -> dict[str, str]:
        return {**os.environ, **own, **self._options.env}

    def _engine_env(self, own: dict[str, str]) -> dict[str, str]:
        # Compiled kernels are kept over runs, although TMPDIR, where torch puts them else, is new in each.
        kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        # Compiled headers are always put into TMPDIR: each engine would make them for kernels that are there already.
        compiling = {"TORCHINDUCTOR_CACHE_DIR": kernels, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
        env = {**compiling, **os.environ, **own, **self._options.env}
        if self._options.engine_python != sys.executable:
            add_connector_path(env)
        return env

    async def _watch(self, process: ManagedProcess) -> None:
        await process.wait()
        if process not in self._expected:
            self._failure.put_nowait(await self._stopped(process))

    async def _stop_one(self, key: tuple[Part, int], grace: float | None = None) -> Stopped | None:
        process = self._processes.get(key)
        if process is None:
            return None
        self._expected.add(process)
        await process.stop(self._options.stop_grace if grace is None else grace)
        return await self._stopped(process)

    async def _stopped(self, process: ManagedProcess) -> Stopped:
        return Stopped(process.name, await process.wait(), tuple(process.tail), process.log)

    def _progress(self, key: tuple[Part, int], begun: float) -> Starting:
        process = self._processes[key]
        last = next((line for line in reversed(process.tail) if line.strip()), "")
        return Starting(process.name, time.monotonic() - begun, last)

    def _key(self, role: str, index: int) -> tuple[Part, int]:
        key = (Part(role), index)
        if key not in self._commands:
            raise ValueError(f"this deployment has no {role} {index}")
        return key

    def _process(self, role: str, index: int) -> ManagedProcess:
        process = self._processes.get(self._key(role, index))
        if process is None:
            raise ValueError(f"{role} {index} was not started")
        return process


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
