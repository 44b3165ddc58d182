"""The real router as a subprocess, as an operator would run it: flags in, a log and an exit status out.

Separate from the tests because starting (free ports, waiting for readiness) and stopping (signal, deadline, exit
status) are the same for all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import aiohttp

from support.ports import free_ports

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 90.0

FLAGS: Mapping[str, str] = {
    "--model": "tiny",
    "--connect-timeout": "2",
    "--prefill-timeout": "10",
    "--pull-timeout": "10",
    "--first-byte-timeout": "10",
    "--answer-timeout": "20",
    "--idle-timeout": "10",
    "--drain-timeout": "10",
    "--probe-interval": "0.1",
    "--log-level": "debug",
}
"""Defaults of the tests: generous, because a shared machine is slow; a test about a timeout sets its own."""


class RouterFailed(RuntimeError):
    """The router ended or did not become ready; the message holds its log."""


class RouterProcess:
    """One router. `start` and `stop` once each; a second router is a second object."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        flags: Mapping[str, str] | None = None,
        repeated: Sequence[str] = (),
    ) -> None:
        """``flags`` override `FLAGS`; ``repeated`` is appended as it is: without engines, where to find them."""
        self._engines = ["--prefill", *prefill, "--decode", *decode] if prefill or decode else []
        self._flags = {**FLAGS, **(flags or {})}
        self._repeated = list(repeated)
        self._log: IO[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.port = self.admin_port = 0

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Health, metrics and explanations."""
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while the process runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything written to stdout and stderr so far."""
        if self._log is None:
            return ""
        return Path(self._log.name).read_text(errors="replace")

    async def start(self, *, ready: bool = True) -> None:
        """Start, and wait until ``/readyz`` says 200 (or, with ``ready`` false, until the admin port answers).

        Raises:
            RouterFailed: it ended, or was not ready in time.
        """
        self.port, self.admin_port = free_ports(2)
        arguments = ["--listen", f"127.0.0.1:{self.port}", "--admin", f"127.0.0.1:{self.admin_port}", *self._engines]
        for flag, value in self._flags.items():
            arguments += [flag, value]
        self._log = tempfile.NamedTemporaryFile(prefix="pd-router-", suffix=".log")  # noqa: SIM115 - closed in stop
        path = os.pathsep.join(str(_ROOT / folder) for folder in ("router", "connector"))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pd_router",
            *arguments,
            *self._repeated,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "default"},
        )
        await self._wait_until_up(ready)

    async def _wait_until_up(self, ready: bool) -> None:
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        async with aiohttp.ClientSession() as session:
            while True:
                if self.returncode is not None:
                    raise RouterFailed(f"the router ended with status {self.returncode}:\n{self.log}")
                try:
                    async with session.get(self.admin_url + "/readyz") as response:
                        if response.status == 200 or not ready:
                            return
                except aiohttp.ClientError:
                    pass
                if asyncio.get_running_loop().time() > deadline:
                    await self.stop()
                    raise RouterFailed(f"the router is not ready after {_START_SECONDS} s:\n{self.log}")
                await asyncio.sleep(0.02)

    async def wait_ready(self, ready: bool = True, seconds: float = 10.0) -> None:
        """Wait until ``/readyz`` says so, or no longer says so. Raises TimeoutError."""
        async with asyncio.timeout(seconds), aiohttp.ClientSession() as session:
            while True:
                async with session.get(self.admin_url + "/readyz") as response:
                    if (response.status == 200) is ready:
                        return
                await asyncio.sleep(0.02)

    def terminate(self) -> None:
        """Send SIGTERM, which starts the drain, and return at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self, seconds: float = 15.0) -> int:
        """Exit status once it has ended. Raises TimeoutError."""
        assert self._process is not None
        async with asyncio.timeout(seconds):
            return await self._process.wait()

    async def stop(self) -> int:
        """End it, by force if it does not drain in time; the exit status. Harmless after its end."""
        if self._process is None:
            return 0
        self.terminate()
        try:
            return await self.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    def discard(self) -> None:
        """Remove the log file; call after the last look at it."""
        if self._log is not None:
            self._log.close()
            self._log = None
