"""Process 1 of a node: carries out a plan, starts daemons, starts them again when they end, and takes orders.

Run as a script by path, with the standard library only: `python init.py PLAN`. It stands in the node's own mount, pid,
network, uts and ipc namespaces. When it dies the kernel kills everything in the pid namespace and drops the mounts, so
that ending a cluster is one SIGKILL. What the plan holds is decided in `core.cluster.init_plan`.

Orders come over a unix socket, one JSON line each: `{"do": "stop" | "start" | "signal", "name": DAEMON, "signal": N}`;
the answer is `{"ok": true, "pid": N | null}` or `{"ok": false, "error": TEXT}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05
RESTART_SECONDS = 1.0


class Daemon:
    """One program of the plan. ``due`` is when to start it next (monotonic), None while it runs or shall not run."""

    def __init__(self, plan: dict[str, Any], log: Path) -> None:
        self.plan = plan
        self.name: str = plan["name"]
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = 0.0

    def may_start(self) -> bool:
        """Is what it waits for there?"""
        path, port = self.plan["after_socket"], self.plan["after_port"]
        if path is not None and not os.path.exists(path):
            return False
        if port is not None:
            with socket.socket() as probe:
                probe.settimeout(1)
                return probe.connect_ex(("127.0.0.1", port)) == 0
        return True

    def start(self) -> None:
        """Run it; its output is appended to its log."""
        self.due = None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.plan["argv"],
                env={**os.environ, **self.plan["env"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self.plan["inherits"],
                start_new_session=True,
            )


class Supervisor:
    """The loop of process 1."""

    def __init__(self, plan: dict[str, Any]) -> None:
        logs = Path(plan["logs"])
        self.daemons = {
            raw["name"]: Daemon(raw, logs / f"{plan['log_prefix']}{raw['name']}.log") for raw in plan["daemons"]
        }
        self._ended = Path(plan["ended"])
        self._selector = selectors.DefaultSelector()
        control = listen(Path(plan["control"]))
        self._selector.register(control, selectors.EVENT_READ)
        # A child's end interrupts the wait: its signal becomes a byte in a socket.
        self._wake, wake_end = socket.socketpair()
        wake_end.setblocking(False)
        self._wake_end = wake_end
        signal.set_wakeup_fd(wake_end.fileno())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """For ever."""
        while True:
            self._start_due()
            waiting = any(daemon.due is not None for daemon in self.daemons.values())
            for key, _ in self._selector.select(POLL_SECONDS if waiting else None):
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)
            self._reap()

    def _start_due(self) -> None:
        for daemon in self.daemons.values():
            if daemon.due is not None and time.monotonic() >= daemon.due and daemon.may_start():
                try:
                    daemon.start()
                except OSError as error:
                    self._note(f"{daemon.name} cannot be started: {error}")
                    daemon.due = time.monotonic() + RESTART_SECONDS

    def _reap(self) -> None:
        """Take the end of every child, also of those that were left to process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for daemon in self.daemons.values():
                if daemon.process is not None and daemon.process.pid == pid:
                    daemon.process.returncode = os.waitstatus_to_exitcode(status)
                    daemon.process = None
                    daemon.due = time.monotonic() + RESTART_SECONDS
                    self._note(f"{daemon.name} ended with {os.waitstatus_to_exitcode(status)}")

    def _note(self, text: str) -> None:
        with self._ended.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _serve(self, control: socket.socket) -> None:
        connection, _ = control.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            line = connection.makefile("rb").readline()
            try:
                answer: dict[str, Any] = {"ok": True, "pid": self._obey(json.loads(line))}
            except (KeyError, ValueError, OSError, subprocess.TimeoutExpired) as error:
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _obey(self, order: dict[str, Any]) -> int | None:
        daemon = self.daemons[order["name"]]
        if order["do"] == "stop":
            process, daemon.process, daemon.due = daemon.process, None, None
            if process is not None:
                process.send_signal(order.get("signal", signal.SIGKILL))
                process.wait(60)
        elif order["do"] == "start":
            if daemon.process is None:
                daemon.start()
        elif order["do"] == "signal":
            if daemon.process is None:
                raise ValueError(f"{daemon.name} does not run")
            daemon.process.send_signal(order["signal"])
        else:
            raise ValueError(f"unknown order {order['do']!r}")
        return daemon.process.pid if daemon.process else None


def listen(path: Path) -> socket.socket:
    """A unix socket in a folder whose path may be longer than a socket address: reached through its descriptor."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_DIRECTORY | os.O_PATH)
    try:
        control.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    control.listen(16)
    return control


def carry_out(step: dict[str, Any]) -> None:
    """One step before the daemons."""
    if "run" in step:
        done = subprocess.run(step["run"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(step['run'])}: {done.stderr.strip()}")
    else:
        for folder in step["folders"]:
            os.makedirs(folder, exist_ok=True)


def main(path: str) -> None:
    """Carry out the plan in a file."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    # A cluster is ended with SIGKILL from outside. A handler, because children would inherit "ignore".
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    socket.sethostname(plan["hostname"])
    for step in plan["steps"]:
        carry_out(step)
    Supervisor(plan).run()


if __name__ == "__main__":
    main(sys.argv[1])
