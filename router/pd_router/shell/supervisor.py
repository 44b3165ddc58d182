"""A router with several workers: starts them, starts again what ended, ends them all, and keeps what they share.

Each worker is a fresh interpreter that listens on the same port; the kernel spreads connections over them. Separate
from the workers because here no client is served: a fault of one costs only its own connections, and the store and the
admin port stay. A worker that cannot even start the first time ends the router, since the next one would fail alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from pd_router.core.addresses import Endpoint
from pd_router.core.observe import Logging
from pd_router.core.settings import Settings
from pd_router.core.workers import WORKER_VARIABLE, Backoff, Joining
from pd_router.shell.admin import Admin
from pd_router.shell.channel import Answer, Channel, ChannelError
from pd_router.shell.descriptors import raise_limit
from pd_router.shell.logs import configure
from pd_router.shell.running import explain, signals
from pd_router.shell.store_server import Desk, StoreServer
from pd_router.shell.supervisor_pages import SupervisorPages

log = logging.getLogger("pd_router.workers")

SWEEP_SECONDS: Final = 1.0
ALIVE_SECONDS: Final = 5.0
"""Between two questions whether a worker still answers."""
STUCK_SECONDS: Final = 60.0
"""A worker that answers nothing for so long will not do so any more."""
KILL_SECONDS: Final = 10.0
"""After the drain timeout, before a worker that has not ended is killed."""
BROKEN: Final = 1
"""Exit code when a worker was ended by a signal as it started."""


@dataclass(eq=False)
class Worker:
    """One process. `number` is of this one, `index` of its place."""

    index: int
    number: int
    process: asyncio.subprocess.Process
    channel: Channel
    desk: Desk
    listening: bool = False

    def tell(self, verb: str) -> None:
        """`drain` or `cut`. One that does not listen yet has nothing to serve to its end."""
        if self.listening:
            self.channel.tell(verb)
        else:
            self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """All of one router's workers."""

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        """``arguments``: the command line, which each worker gets, too."""
        self._settings = settings
        self._arguments = arguments
        self._shared = StoreServer(settings)
        self._numbers = itertools.count()
        self._workers: dict[int, Worker] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._listening = [asyncio.Event() for _ in range(settings.workers)]
        """By index: a worker there has listened once."""
        self._told = asyncio.Event()
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reserved: list[socket.socket] = []
        self._port = 0
        self._pages = SupervisorPages(settings, self._shared, lambda: list(self._workers.values()))
        self._admin = Admin(settings.admin, self._pages.read)
        self._sweeper: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Start, serve until a signal, drain. Returns the exit code."""
        told = asyncio.create_task(self._wait_told(signals()), name="signals")
        try:
            self._port, self._reserved = await reserve(self._settings.listen)
            admin_port = await self._admin.start()
        except OSError as error:
            told.cancel()
            await self._stop()
            return explain(error, "--listen, --admin")
        self._sweeper = asyncio.create_task(self._sweep(), name="store-deadlines")
        if await self._start_all():
            count = self._settings.workers
            log.info("listening on port %d, admin on port %d, %d workers", self._port, admin_port, count)
            await self._first(self._told.wait())
        self._told.set()
        self._pages.draining = True
        await asyncio.gather(*self._keepers)
        told.cancel()
        await self._stop()
        return self._failed.result() if self._failed.done() else 0

    async def _start_all(self) -> bool:
        """One first, so that what is wrong with all is said once; then the others. Returns whether all listen."""
        for group in (range(1), range(1, self._settings.workers)):
            for index in group:
                self._keepers.append(asyncio.create_task(self._keep(index), name=f"worker {index}"))
            for index in group:
                if not await self._first(self._listening[index].wait()):
                    return False
        return True

    async def _first(self, wanted: Any) -> bool:
        """Wait for something. False when the router is to end instead."""
        task = asyncio.ensure_future(wanted)
        told = asyncio.ensure_future(self._told.wait())
        await asyncio.wait((task, told, self._failed), return_when=asyncio.FIRST_COMPLETED)
        found = task.done() and not self._told.is_set() and not self._failed.done()
        for one in (task, told):
            one.cancel()
        return found

    async def _stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._admin.stop()
        for sock in self._reserved:
            sock.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._shared.sweep()

    # -- one worker ----------------------------------------------------------------------------------
    async def _keep(self, index: int) -> None:
        """Have a worker in this place until the router ends."""
        backoff = Backoff()
        while not self._told.is_set():
            begun = time.monotonic()
            status = await self._one(index)
            if self._told.is_set():
                return
            if not self._listening[index].is_set():
                self._failed.set_result(status if status > 0 else BROKEN)
                self._told.set()
                self._tell_all("drain")
                return
            wait = backoff.ended(time.monotonic() - begun)
            self._pages.restarts.inc()
            log.error("worker %d ended with status %d; another one follows in %g s", index, status, wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), wait)

    async def _one(self, index: int) -> int:
        """One worker from its start to its end. Returns its exit status."""
        try:
            worker = await self._start(index)
        except OSError as error:
            log.error("worker %d cannot be started: %s", index, error.strerror or error)
            return BROKEN
        alive = asyncio.create_task(self._watch(worker), name=f"worker {index} alive")
        status = await worker.process.wait()
        alive.cancel()
        del self._workers[index]
        await worker.channel.end()
        worker.desk.close()
        return status

    async def _start(self, index: int) -> Worker:
        desk = self._shared.desk()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self._spawn(index, theirs.fileno())
        except OSError:
            ours.close()
            raise

        def handle(verb: str, words: list[Any], raw: bytes) -> Answer | None:
            if verb == "listening":
                worker.listening = True
                self._listening[index].set()
                if self._told.is_set():
                    worker.tell("drain")
                return None
            return desk.handle(verb, words, raw)

        channel = await Channel.join(ours, handle, lambda: None)
        worker = self._workers[index] = Worker(index, next(self._numbers), process, channel, desk)
        if self._told.is_set():
            worker.tell("drain")
        return worker

    async def _spawn(self, index: int, descriptor: int) -> asyncio.subprocess.Process:
        joining = Joining(index, descriptor, os.getpid(), self._port, self._listening[index].is_set())
        # A session of its own, so that Ctrl-C in a terminal is told to the workers once, and by their supervisor.
        return await asyncio.create_subprocess_exec(
            *command(),
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, WORKER_VARIABLE: joining.written()},
            pass_fds=(descriptor,),
            start_new_session=True,
        )

    async def _watch(self, worker: Worker) -> None:
        """Kill a worker that does nothing any more: its connections hang, and new ones would."""
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await worker.channel.ask("alive")
            except ChannelError:
                return
            except TimeoutError:
                log.error("worker %d has not answered for %g s and is killed", worker.index, STUCK_SECONDS)
                worker.process.kill()
                return

    # -- the end -------------------------------------------------------------------------------------
    async def _wait_told(self, told: asyncio.Queue[None]) -> None:
        """The first signal makes the workers drain, a second one ends that."""
        await told.get()
        self._told.set()
        self._pages.draining = True
        log.info("draining %d workers", len(self._workers))
        self._tell_all("drain")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timeouts.drain + KILL_SECONDS):
                while True:
                    await told.get()
                    self._tell_all("cut")
        log.error("workers have not ended and are killed")
        for worker in self._workers.values():
            worker.send_signal(signal.SIGKILL)

    def _tell_all(self, verb: str) -> None:
        for worker in self._workers.values():
            worker.tell(verb)


def command() -> list[str]:
    """How to start a worker. `-m` looks for modules in the current folder first: here only when our own start did."""
    safe = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    return [sys.executable, *safe, "-m", "pd_router"]


async def reserve(endpoint: Endpoint) -> tuple[int, list[socket.socket]]:
    """Find out that nobody listens there, and see to it that only our workers will.

    Sockets that share a port are let in by the kernel without a word, so a second router would take part of the
    connections. The port is tried without sharing first; the sockets that are returned then hold it, and take no
    connection since they don't listen.

    Raises:
        OSError: the port is taken, or the host is none of this machine.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, endpoint.host, endpoint.port)
    found = [(sock.family, sock.getsockname()) for sock in server.sockets]
    server.close()
    await server.wait_closed()
    held: list[socket.socket] = []
    try:
        for family, address in found:
            sock = socket.socket(family, socket.SOCK_STREAM)
            held.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
    except OSError:
        for sock in held:
            sock.close()
        raise
    return int(found[0][1][1]), held


async def _run(settings: Settings, arguments: Sequence[str]) -> int:
    raise_limit()
    return await Supervisor(settings, arguments).run()


def supervise(settings: Settings, logging_: Logging, arguments: Sequence[str]) -> int:
    """Run a router with several workers. Returns the exit code."""
    configure(logging_)
    code: int = uvloop.run(_run(settings, arguments))
    return code
