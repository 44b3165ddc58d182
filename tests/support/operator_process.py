"""The real operator as a subprocess against any kubeconfig: start, wait until it serves, end it, log and metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Final

from support.clusters import eventually
from support.ports import free_ports

ROOT: Final = Path(__file__).parents[2]
START_LIMIT: Final = 60.0
"""Seconds. Importing kopf and the client takes one or two; a busy machine needs many more."""


class OperatorProcess:
    """`pd-operator run` with the given arguments. Use as a context manager; leaving it kills the process."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        self._kubeconfig = kubeconfig
        self._log = log
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._health, self._metrics = free_ports(2)

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, *, wait: bool = True) -> None:
        """Start it; `wait` until it has seen the cluster and serves."""
        before = len(self.log())
        argv = [
            *(sys.executable, "-m", "pd_operator", "run"),
            *("--router-image", "localhost/pd-router:dev", "--connector-image", "localhost/pd-connector:dev"),
            *("--health", f"127.0.0.1:{self._health}", "--metrics", f"127.0.0.1:{self._metrics}"),
            *("--log-format", "plain", *self._arguments),
        ]
        # A proxy of the environment is for other programs: nothing may go through it.
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
        paths = os.pathsep.join(str(ROOT / folder) for folder in ("operator", "connector"))
        environment = {**os.environ, **proxies, "KUBECONFIG": str(self._kubeconfig), "PYTHONPATH": paths}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        if wait:
            eventually("operator serves", lambda: " serving " in self.log()[before:] or not self.running, START_LIMIT)
            assert self.running, self.log()[before:]

    @property
    def running(self) -> bool:
        """Is the process there?"""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process number."""
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """All that it has said, over all of its lives."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """SIGKILL; harmless when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> int:
        """SIGTERM, as a kubelet does. Returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(START_LIMIT)

    def health(self) -> tuple[int, str]:
        """Status and text of `/healthz`."""
        return _get(self._health, "/healthz")

    def metric(self, name: str) -> float:
        """The sum over all series of a metric; 0 when there is none."""
        total = 0.0
        for line in _get(self._metrics, "/metrics")[1].splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                total += float(line.rpartition(" ")[2])
        return total


def _get(port: int, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
