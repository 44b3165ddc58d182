"""Connections to Valkey or Redis, and when not to use them.

Separate from the store because here is what a network can do: time out, break, answer with an error, come back as
another server. A script is sent at most once, since a take whose answer got lost has happened all the same; what fails
is reported by kind and is a miss for the turn. After a failure that other turns would meet, too, nothing is sent until
a probe in the background has succeeded, so that a dead store costs a turn nothing; the probe waits longer each time.

The library's connection does the protocol, TLS and authentication. Its client and pool would not do: they repeat
commands, and each connection has to say which process of the server it goes to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection

from pd_router.core.store_settings import FailureKind as Kind
from pd_router.core.store_settings import Valkey, parse_url
from pd_router.shell.store_metrics import SharedStoreMetrics

log = logging.getLogger("pd_router.store")

PROBE_SECONDS: Final = 1.0
FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 15.0


_OPENS: Final = frozenset({Kind.TIMEOUT, Kind.CONNECTION, Kind.AUTH, Kind.READ_ONLY, Kind.LOADING, Kind.ERROR})
"""Failures that the next turn would meet, too. A server without memory still gives what it has."""


class StoreFailed(Exception):
    """An operation has no result; whether it was carried out is not known."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Script:
    """Lua that the server keeps after it was sent once."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


class Link:
    """One connection, and which process of the server it goes to."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.connection = connection
        self.run = run

    async def ask(self, *words: bytes | str | int) -> Any:
        """One command and its answer. Raises what the library raises."""
        await self.connection.send_packed_command(self.connection.pack_command(*words), check_health=False)
        return await self.connection.read_response()

    async def call(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Any:
        """Run a script; the text is sent only when the server does not have it, and then nothing has run."""
        try:
            return await self.ask("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:
            return await self.ask("EVAL", script.text, len(keys), *keys, *arguments)

    @property
    def usable(self) -> bool:
        """False once the server has closed it, or when bytes lie in it that nobody asked for."""
        reader = self.connection._reader  # the library's own test is a coroutine that looks at the same
        return reader is not None and not reader.at_eof() and not reader._buffer  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Drop the socket now."""
        with contextlib.suppress(Exception):
            await self.connection.disconnect(nowait=True)


class ValkeyClient:
    """Lends connections. Call `start` and `stop` once each."""

    def __init__(self, settings: Valkey, metrics: SharedStoreMetrics) -> None:
        self._settings = settings
        self._target = parse_url(settings.url)
        self._metrics = metrics
        self._idle: deque[Link] = deque()
        self._free = asyncio.Semaphore(settings.connections)
        self._keeper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._last_kind: Kind | None = None
        self._strikes = 0
        """Times in a row that operations failed on a server that answers probes."""
        self.up = False
        """Whether operations are sent."""

    def start(self) -> None:
        """Begin to connect; nothing waits for it."""
        self._keeper = asyncio.create_task(self._keep(), name="handle store")

    async def stop(self) -> None:
        """Close all connections."""
        self.up = False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._drop_idle()

    @contextlib.asynccontextmanager
    async def lend(self, operation: str) -> AsyncIterator[Link]:
        """A connection for one operation, which ends within the timeout.

        Raises:
            StoreFailed: in the `with` block or at its end; the failure is counted.
        """
        link: Link | None = None
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout), self._free:
                link = await self._take()
                yield link
                self._idle.append(link)
                link = None
                self._strikes = 0
        except Exception as error:
            # Whatever it is, a turn goes on without the store.
            if isinstance(error, exceptions.OutOfMemoryError) and link is not None:
                self._idle.append(link)  # an answer like any other
                link = None
            failed = failure_of(error)
            self.failed(operation, failed)
            raise failed from error
        finally:
            self._metrics.seconds[operation].observe(time.monotonic() - began)
            if link is not None:
                # An answer may still come, and would be taken for that of the next command.
                await link.close()

    def failed(self, operation: str, failure: StoreFailed) -> None:
        """Count a failure, and stop sending when the next operation would fail, too."""
        self._metrics.failures[operation, failure.kind.value].inc()
        if failure.kind in _OPENS and self.up:
            self._down(failure)

    def _down(self, failure: StoreFailed) -> None:
        self.up = False
        self._strikes += 1
        self._metrics.up.set(0)
        self._last_kind = failure.kind
        self._wake.set()
        log.warning("handle store is down (%s: %s); turns go on without it", failure.kind, failure)

    async def _take(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if link.usable:
                return link
            await link.close()
        return await self._connect()

    async def _connect(self) -> Link:
        settings, target = self._settings, self._target
        common: dict[str, Any] = {
            "host": target.host,
            "port": target.port,
            "db": target.database,
            "username": settings.username or None,
            "password": _password(settings.password_file),
            "driver_info": None,
            "protocol": 2,
            "socket_keepalive": True,
            # Every use of it is bounded by a timeout of ours; the library's own would swallow cancellations (wait_for).
            "socket_timeout": None,
            "socket_connect_timeout": None,
        }
        connection = (
            SSLConnection(**common, ssl_ca_certs=settings.ca_file or None) if target.tls else Connection(**common)
        )
        link = Link(connection, "")
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            link.run = _run_of(await link.ask("INFO", "server"))
        except BaseException:
            await link.close()
            raise
        return link

    async def _keep(self) -> None:
        """Connect, look from time to time whether the server is there, connect again."""
        failures = 0
        while True:
            self._wake.clear()
            failure = await self._probe()
            if failure is None:
                failures = 0
                await self._while_up()
                continue
            if self.up:
                self._down(failure)
            elif self._last_kind is not failure.kind:
                self._last_kind = failure.kind
                log.warning("handle store %s is not usable: %s: %s", self._where, failure.kind, failure)
            await self._drop_idle()
            await asyncio.sleep(_pause(failures))
            failures += 1

    async def _while_up(self) -> None:
        """Let turns use the store until the next probe is due, or an operation has failed."""
        if not self.up:
            self.up = True
            self._metrics.up.set(1)
            log.info("handle store %s is up", self._where)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await self._wake.wait()
        if not self.up and self._strikes > 1:
            # Not a moment's trouble: it answers probes and is too slow for the rest.
            await asyncio.sleep(_pause(self._strikes - 2))

    async def _probe(self) -> StoreFailed | None:
        """Whether the server can be written to now."""
        link: Link | None = None
        try:
            async with asyncio.timeout(self._settings.timeout):
                link = await self._take()
                answer = await link.ask("ROLE")
                if not isinstance(answer, list) or not answer or answer[0] not in (b"master", b"primary"):
                    return StoreFailed(Kind.READ_ONLY, "it is a replica")
                self._idle.append(link)
                link = None
        except Exception as error:  # noqa: BLE001 - the top of the task: without it the store would stay down for ever
            return failure_of(error)
        finally:
            if link is not None:
                await link.close()
        return None

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    @property
    def _where(self) -> str:
        return f"{self._target.host}:{self._target.port}"


def _pause(failures: int) -> float:
    """Seconds before the next probe, at random so that routers do not come all at once."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


def failure_of(error: Exception) -> StoreFailed:
    """What kind of failure an exception of the library is. Its text may repeat values, so only known texts are kept."""
    match error:
        case TimeoutError() | exceptions.TimeoutError():
            return StoreFailed(Kind.TIMEOUT, "no answer in time")
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            return StoreFailed(Kind.AUTH, "the server refuses the credentials, or a command that the router needs")
        case exceptions.AuthenticationWrongNumberOfArgsError():
            return StoreFailed(Kind.AUTH, "the server wants other credentials")
        case exceptions.BusyLoadingError():
            return StoreFailed(Kind.LOADING, "the server is reading its file")
        case exceptions.ReadOnlyError():
            return StoreFailed(Kind.READ_ONLY, "it is a replica")
        case exceptions.OutOfMemoryError():
            return StoreFailed(Kind.OUT_OF_MEMORY, "the server has no memory left (maxmemory)")
        case exceptions.ConnectionError() | OSError():
            return StoreFailed(Kind.CONNECTION, f"no connection ({_cause(error)})")
        case _:
            return StoreFailed(Kind.ERROR, f"the server answers with an error ({type(error).__name__})")


def _cause(error: BaseException) -> str:
    """The innermost reason, by its type: texts of the library repeat what was sent."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    number = getattr(error, "verify_message", None) or getattr(error, "strerror", None)
    return f"{type(error).__name__}: {number}" if number else type(error).__name__


def _password(path: str) -> str | None:
    """Read for every connection, so that a changed Secret needs no restart. Raises OSError."""
    return Path(path).read_text(encoding="utf-8").strip() or None if path else None


def _run_of(info: bytes) -> str:
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        if name == b"run_id" and value:
            return value.decode("ascii", "replace")
    raise exceptions.ResponseError("INFO has no run_id")
