"""A process that serves clients, from its start to its end: listen, wait for a signal, drain.

Separate from the composition root because a router alone and a worker of several end in the same way and begin
differently.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable

import uvloop

from pd_router.core.addresses import SettingsError
from pd_router.core.observe import Logging
from pd_router.core.settings import Settings
from pd_router.shell.descriptors import raise_limit
from pd_router.shell.discovery import DiscoveryError
from pd_router.shell.logs import configure
from pd_router.shell.server import Router

log = logging.getLogger("pd_router")

GC_THRESHOLD = 10_000
"""Objects between two collections. A turn makes hundreds that die by their count; Python's 700 would be every turn."""
USELESS = 2
"""Exit code: flags, files or credentials of no use."""
TAKEN = 1
"""Exit code: a port is taken."""


def on_signal(call: Callable[[], object]) -> None:
    """Call it at each SIGTERM, SIGINT and SIGQUIT from here on."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, call)


def signals() -> asyncio.Queue[None]:
    """Gets an item for each SIGTERM, SIGINT and SIGQUIT from here on."""
    found: asyncio.Queue[None] = asyncio.Queue()
    on_signal(lambda: found.put_nowait(None))
    return found


def explain(error: SettingsError | DiscoveryError | OSError, flags: str) -> int:
    """Say why the start failed, and return the exit code. `flags`: what a taken port was asked for by."""
    match error:
        case SettingsError():
            for problem in error.problems:
                print(f"pd-router: {problem}", file=sys.stderr)
            return USELESS
        case DiscoveryError():
            print(f"pd-router: {error}", file=sys.stderr)
            return USELESS
        case _:
            print(f"pd-router: cannot listen: {error.strerror or error} ({flags})", file=sys.stderr)
            return TAKEN


async def serve_until_told(router: Router, told: asyncio.Queue[None]) -> None:
    """Serve until a signal, and drain; a second one ends the drain."""
    gc.freeze()  # what start-up made lives as long as the process; collections need not look at it again
    gc.set_threshold(GC_THRESHOLD)
    await told.get()
    log.info("draining %d connections", len(router.state.connections))
    drain = asyncio.create_task(router.drain(), name="drain")
    again = asyncio.create_task(told.get(), name="second-signal")
    await asyncio.wait((drain, again), return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        log.warning("told to stop a second time: %d connections are cut", len(router.state.connections))
    elif not drain.result():
        log.warning("drain timeout: %d connections are cut", len(router.state.connections))
    for task in (drain, again):
        task.cancel()
    await router.stop()


async def serve(settings: Settings) -> int:
    """One process that is the whole router. Returns the exit code."""
    raise_limit()
    try:
        router = Router(settings)
    except SettingsError as error:
        return explain(error, "")
    try:
        port, admin_port = await router.start()
    except (DiscoveryError, OSError) as error:
        code = explain(error, "--listen, --admin")
        await router.stop()
        return code
    log.info("listening on port %d, admin on port %d", port, admin_port)
    await serve_until_told(router, signals())
    return 0


def run(settings: Settings, logging_: Logging) -> int:
    """Set up logging and run the loop."""
    configure(logging_)
    code: int = uvloop.run(serve(settings))
    return code
