"""A real Valkey or Redis server for tests and measurements: found or unpacked, started, and made to fail.

`python -m support.redis_server` (part of `make test`) puts the distribution's packages into the cache when no
server is installed. They are only unpacked: nothing is installed into the system, and no service is started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support.debian import CACHE, unpacked
from support.ports import free_port
from support.waiting import until

PROGRAMS: Final = ("valkey-server", "redis-server")
FOLDER: Final = "redis-server"
PACKAGES: Final = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
_START_SECONDS: Final = 30.0


def find() -> Path:
    """The server program; unpacked first where none is installed. Raises NotThere."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return Path(found)
    return unpacked(PACKAGES, FOLDER) / "usr" / "bin" / "redis-server"


def environment() -> dict[str, str]:
    """Where an unpacked program finds its libraries."""
    folders = {str(library.parent) for library in (CACHE / FOLDER).glob("**/*.so*")}
    given = os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join([*sorted(folders), *([given] if given else [])])
    return {**os.environ, "LD_LIBRARY_PATH": path} if path else dict(os.environ)


class RedisServer:
    """One server on loopback. It writes a file only when it is told to (SAVE), and reads it when it starts again."""

    def __init__(self, *options: str, port: int | None = None, tls: Sequence[str] = ()) -> None:
        """``options`` as on the command line (`--maxmemory 1mb`); ``tls`` instead of plain connections."""
        self._folder = tempfile.TemporaryDirectory(prefix="pd-redis-")
        self._options = list(options)
        self._tls = list(tls)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or free_port()

    @property
    def url(self) -> str:
        """For `--valkey-url`."""
        return f"{'valkeys' if self._tls else 'valkey'}://127.0.0.1:{self.port}"

    @property
    def socket_path(self) -> str:
        """A Unix socket that answers without TLS."""
        return f"{self._folder.name}/socket"

    async def start(self) -> None:
        """Start, and wait until it answers, whatever it answers."""
        ports = ["--port", "0", "--tls-port", str(self.port), *self._tls] if self._tls else ["--port", str(self.port)]
        words = [
            *(str(find()), "--bind", "127.0.0.1", *ports, "--unixsocket", self.socket_path, "--dir", self._folder.name),
            *("--save", "", "--daemonize", "no", "--logfile", "log", *self._options),
        ]
        self._spawn(words)
        await until(self._answers, _START_SECONDS)

    def _spawn(self, words: list[str]) -> None:
        self._process = subprocess.Popen(words, env=environment(), start_new_session=True)

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            with self.client() as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False
        return True

    @property
    def log(self) -> str:
        """What the server logged."""
        path = Path(self._folder.name, "log")
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def client(self, password: str | None = None) -> redis.Redis:
        """A client of the test's own, past everything that the router does."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=self.socket_path, socket_timeout=5, password=password, retry=once)

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it hang: connections stand, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and forget its data."""
        self.kill()
        self._folder.cleanup()


if __name__ == "__main__":
    print(find())
