"""The program in the pod of `helm test`: it succeeds with a healthy operator, and only then."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.charts import only, render

HOST = "127.0.0.78"
HEALTHY = {"/healthz": (200, "ok\n"), "/metrics": (200, "# HELP x\npd_operator_deployments 3.0\nother 1.0\n")}


@contextmanager
def operator(answers: dict[str, tuple[int, str]]) -> Iterator[None]:
    """Health and metrics ports on a loopback address of their own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    servers = [ThreadingHTTPServer((HOST, port), Handler) for port in (8080, 8081)]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(30)
            server.server_close()


def run(attempts: int = 1) -> subprocess.CompletedProcess[str]:
    [container] = only(render(), "Pod")["spec"]["containers"]
    program, flag, script, host, tries = container["command"]
    assert (program, flag) == ("python3", "-c")
    assert host == "pd-operator.pd-system.svc"
    assert int(tries) > 10
    argv = [sys.executable, "-c", script, HOST, str(attempts)]
    # A proxy of the pod's environment is for other programs.
    return subprocess.run(argv, env={"http_proxy": "http://127.0.0.1:9"}, capture_output=True, text=True, check=False)


def test_a_healthy_operator_passes() -> None:
    with operator(HEALTHY):
        done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "healthz: ok; PDDeployments served: 3\n"


@pytest.mark.parametrize(
    "answers",
    [
        {**HEALTHY, "/healthz": (503, "no complete look at the cluster\n")},
        {**HEALTHY, "/metrics": (200, "up 1\n")},
        {**HEALTHY, "/metrics": (200, "pd_operator_deployments NONE\n")},
    ],
    ids=["unhealthy", "something else", "no number"],
)
def test_anything_else_fails(answers: dict[str, tuple[int, str]]) -> None:
    with operator(answers):
        done = run(attempts=2)
    assert done.returncode == 1
    assert done.stdout.count("attempt ") == 2
    assert "does not answer as it should" in done.stderr


def test_nobody_there_fails() -> None:
    assert run().returncode == 1
