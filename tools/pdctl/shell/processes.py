"""One supervised process: started below a guard, its output to a log file and a listener, its end as a value.

Separate from `local`, which knows what the processes are for. See `guard` for why there is a process in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from pdctl.core.exits import Exit
from pdctl.shell import guard

TAIL_LINES: Final = 400
CHUNK_BYTES: Final = 65536
LONGEST_LINE: Final = 65536
"""A line without an end is passed on in pieces of this size instead of being kept in memory."""
MARK_NAME: Final = "PDCTL_PROCESS"
KILL_SECONDS: Final = 30.0
"""How long the kernel and the guard may take over SIGKILL; an engine with gigabytes of memory needs a moment."""

SCRATCH_BYTES: Final = 70
"""Longest path of a scratch folder: a socket's path has 107 bytes, and vLLM's names in it are UUIDs."""
_SCRATCH_PREFIX: Final = "pdctl-run-"


class ProcessError(RuntimeError):
    """The guard could not be started or did not do what it was told."""


class ManagedProcess:
    """A process and everything that it starts. Use `start` once; the rest any number of times."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None],
        scratch_variables: Sequence[str] = (),
    ) -> None:
        """Nothing is started yet.

        ``scratch_variables`` name a folder of the process's own in its environment. It is made on start and removed
        when the process has ended, however it ended.
        """
        self.name = name
        self.log = log
        self.pid: int | None = None
        """Process id of the command, its session and its group; None before `start`."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._argv = tuple(argv)
        self._mark = f"{MARK_NAME}={uuid.uuid4()}"
        self._env = {**env, MARK_NAME: self._mark.partition("=")[2]}
        self._on_line = on_line
        self._scratch_variables = tuple(scratch_variables)
        self._scratch = ""
        self._guard: asyncio.subprocess.Process | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ended: asyncio.Task[Exit] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the command. Raises ProcessError when even the guard can't run.

        A caller who is cancelled meanwhile leaves a process that starts all the same, so that `stop` and `kill` have
        something to end.
        """
        self._starting = asyncio.create_task(self._start(), name=f"start of {self.name}")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._make_scratch()
            try:
                self._guard = await asyncio.create_subprocess_exec(
                    # Isolated and without site packages: it starts in milliseconds and nothing can be imported into it.
                    *(sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), self._scratch, *self._argv),
                    env={**self._env, **dict.fromkeys(self._scratch_variables, self._scratch)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                mine.close()
                self._remove_scratch()
                raise ProcessError(f"{self.name}: cannot be started: {error}") from error
        reports, self._orders = await asyncio.open_connection(sock=mine)
        self._reading = asyncio.create_task(self._read_output(), name=f"output of {self.name}")
        first = await reports.readline()
        if first.startswith(b"started "):
            self.pid = int(first.split()[1])
            first = b""
        self._ended = asyncio.create_task(self._await_end(reports, first), name=f"end of {self.name}")

    @property
    def running(self) -> bool:
        """Has it been started and not ended yet?"""
        return self._ended is not None and not self._ended.done()

    async def wait(self) -> Exit:
        """Until the process and everything below it are gone and the log is complete."""
        if self._starting is None:
            raise ProcessError(f"{self.name}: was never started")
        await asyncio.shield(self._starting)
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the command alone: what a polite stop needs. Nothing happens when it has ended."""
        self._order("leader", number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the command and its children at once."""
        self._order("group", number)

    async def stop(self, grace: float) -> Exit:
        """SIGTERM, then SIGKILL to all after ``grace`` seconds. Returns how it ended."""
        if self._starting is not None:
            await asyncio.shield(self._starting)
        self.signal_leader(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> Exit:
        """SIGKILL to the command and everything below it, now."""
        if self._starting is not None:
            await asyncio.shield(self._starting)
        self.let_go()
        return await asyncio.wait_for(self.wait(), KILL_SECONDS)

    def let_go(self) -> None:
        """Close the line to the guard, which makes it kill everything. Works without a running event loop step."""
        if self._orders is not None and self._orders.can_write_eof():
            with contextlib.suppress(OSError):
                self._orders.write_eof()

    def _order(self, whom: str, number: signal.Signals) -> None:
        if self.running and self._orders is not None and not self._orders.is_closing():
            self._orders.write(f"{whom} {int(number)}\n".encode("ascii"))

    async def _await_end(self, reports: asyncio.StreamReader, first: bytes) -> Exit:
        line = first or await reports.readline()
        if not line:
            # The guard was killed, or told to let go. Its command dies with it; what the command started may not.
            await asyncio.to_thread(guard.kill_marked, self._mark)
        if self._reading is not None:
            await self._reading
        if self._guard is not None:
            await self._guard.wait()
        # The guard has done it, unless somebody killed it.
        self._remove_scratch()
        if self._orders is not None:
            self._orders.close()
            with contextlib.suppress(OSError):
                await self._orders.wait_closed()
        if line.startswith(b"exited "):
            return Exit.from_returncode(int(line.split()[1]))
        return Exit(signal=int(signal.SIGKILL))

    async def _read_output(self) -> None:
        assert self._guard is not None
        assert self._guard.stdout is not None
        pending = b""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as file:
            while chunk := await self._guard.stdout.read(CHUNK_BYTES):
                _write(file, chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                while len(pending) > LONGEST_LINE:
                    self._take(pending[:LONGEST_LINE])
                    pending = pending[LONGEST_LINE:]
            if pending:
                self._take(pending)

    def _make_scratch(self) -> None:
        if self._scratch_variables:
            self._scratch = tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=_short_folder())

    def _remove_scratch(self) -> None:
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _take(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip("\r")
        # A progress bar overwrites its own line; the last state is the one worth reading.
        line = line.rpartition("\r")[2]
        self.tail.append(line)
        self._on_line(line)


def _write(file: IO[bytes], chunk: bytes) -> None:
    # A full disk must not stop the reading: the engine would block on its next line.
    with contextlib.suppress(OSError):
        file.write(chunk)


def _short_folder() -> str:
    """The system's temporary folder, or /tmp where a socket in a folder of that one had too long a path."""
    usual = tempfile.gettempdir()
    random_letters = 8
    return usual if len(os.fsencode(usual)) + 1 + len(_SCRATCH_PREFIX) + random_letters <= SCRATCH_BYTES else "/tmp"
