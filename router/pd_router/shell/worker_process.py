"""One worker of a router with several: joins the supervisor, serves its share of the connections, ends with it.

Separate from a router alone because it has no admin port, shares its store, and must never outlive the supervisor: an
orphan would go on taking connections that nobody watches, with a store that is gone. The kernel kills it then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Any, Final

import uvloop

from pd_router.core.addresses import SettingsError
from pd_router.core.observe import Logging
from pd_router.core.settings import Settings
from pd_router.core.workers import WORKER_VARIABLE, Joining, share_of
from pd_router.shell.admin import READY
from pd_router.shell.channel import Answer, Channel, ChannelError
from pd_router.shell.descriptors import raise_limit
from pd_router.shell.discovery import DiscoveryError
from pd_router.shell.logs import configure
from pd_router.shell.running import explain, on_signal, serve_until_told
from pd_router.shell.server import Router
from pd_router.shell.worker_store import Line, Shared

log = logging.getLogger("pd_router.workers")

_PR_SET_PDEATHSIG: Final = 1
READY_WAIT_SECONDS: Final = 5.0
"""How long a replacement looks for engines before it takes connections all the same: others may see none either."""
LOOK_SECONDS: Final = 0.02
STARTING: Final = b"starting"


class Worker:
    """Answers the supervisor, whatever the state of the router is.

    A signal only ever begins the drain: some systems send it to each process of a service, and the supervisor's word
    would be a second one. That a drain is to end is the supervisor's to say.
    """

    def __init__(self) -> None:
        self.router: Router | None = None
        self.listening = False
        self.told: asyncio.Queue[None] = asyncio.Queue()
        self._drains = False

    def drain(self) -> None:
        """Serve to the end what was begun; once is enough."""
        if not self._drains:
            self._drains = True
            self.told.put_nowait(None)

    def handle(self, verb: str, words: list[Any], _raw: bytes) -> Answer | None:
        """A message of the supervisor. None: there is no answer yet."""
        match verb:
            case "alive":
                return (), b""
            case "drain":
                self.drain()
                return None
            case "cut":
                self.drain()
                self.told.put_nowait(None)
                return None
        [name] = words
        if name == READY and not self.listening:
            return (), STARTING
        return None if self.router is None else ((), self.router.pages.read(name))


async def _serve(settings: Settings, joining: Joining) -> int:
    raise_limit()
    worker = Worker()
    channel = await Channel.join(socket.socket(fileno=joining.descriptor), worker.handle, _orphaned)
    line = Line(channel)
    try:
        secret = (await channel.ask("secret")).raw
    except ChannelError:
        return 1
    settings = share_of(settings, joining.port)
    try:
        router = worker.router = Router(settings, Shared(line, secret, settings))
    except SettingsError as error:
        await channel.end()
        return explain(error, "")
    watch = asyncio.create_task(line.watch(), name="supervisor-answers")
    try:
        await router.begin()
        if joining.replaces:
            await _until_ready(router)
        on_signal(worker.drain)
        await router.listen()
    except (DiscoveryError, OSError) as error:
        code = explain(error, "--listen")
        watch.cancel()
        await router.stop()
        await channel.end()
        return code
    worker.listening = True
    channel.tell("listening")
    log.info("worker %d is listening on port %d", joining.index, joining.port)
    await serve_until_told(router, worker.told)
    watch.cancel()
    await channel.end()
    return 0


async def _until_ready(router: Router) -> None:
    """The kernel spreads connections over all that listen, so one that knows no engines yet would refuse its part."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_WAIT_SECONDS):
            while router.why_not_ready() is not None:  # noqa: ASYNC110 - worked out anew each time; nobody sets it
                await asyncio.sleep(LOOK_SECONDS)


def _orphaned() -> None:
    """The supervisor's end of the socket pair is closed, though the kernel has sent nothing."""
    os._exit(1)


def _die_with(parent: int) -> bool:
    """Be killed when the supervisor is gone. Returns whether it is there still."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def run_worker(settings: Settings, logging_: Logging) -> int:
    """Join and run. Returns the exit code."""
    joining = Joining.read(os.environ.pop(WORKER_VARIABLE))
    if not _die_with(joining.parent):
        return 1
    configure(logging_, joining.index)
    code: int = uvloop.run(_serve(settings, joining))
    return code
