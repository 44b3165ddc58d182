"""Start programs on one core, read what they have used, end them.

Separate because it is all that depends on Linux' ``/proc``. A program may have threads and children: its CPU time is
that of the whole tree below the process that was started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perf.errors import PerfError

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Program:
    """A running program and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def assert_running(self) -> None:
        """Raise ``PerfError`` with the end of the log when the program has ended."""
        status = self.process.poll()
        if status is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise PerfError(f"{self.name} ended with status {status}; the end of {self.log}:\n{tail}")

    def stop(self) -> None:
        """End the program and everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def start(name: str, command: list[str], core: int, log: Path, environment: dict[str, str] | None = None) -> Program:
    """Start ``command`` on ``core`` in a session of its own, with its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | (environment or {}),
        )
    return Program(name, process, log)


def two_cores() -> tuple[int, int]:
    """The core for the router under test and the one for everything else.

    Raises:
        PerfError: when this process may use one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise PerfError("the comparison needs two cores: one for the router and one for the load and the engines")
    return cores[0], cores[1]


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports on the loopback address that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of CPU time."""

    user: float
    kernel: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.user + self.kernel

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.user - other.user, self.kernel - other.kernel)


def tree_cpu(pid: int) -> CpuTime:
    """What ``pid``, its threads and all its descendants have used so far."""
    used: dict[int, tuple[int, int]] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The command's name is in parentheses and may hold spaces; fields are counted from behind it.
            fields = text.rpartition(")")[2].split()
            children[int(fields[1])].append(int(entry.name))
            # Of the process itself and of its children that have ended.
            user, kernel, ended_user, ended_kernel = (int(field) for field in fields[11:15])
            used[int(entry.name)] = (user + ended_user, kernel + ended_kernel)
    user_ticks, kernel_ticks, waiting = 0, 0, [pid]
    while waiting:
        current = waiting.pop()
        user, kernel = used.get(current, (0, 0))
        user_ticks, kernel_ticks = user_ticks + user, kernel_ticks + kernel
        waiting += children[current]
    return CpuTime(user_ticks / _TICKS_PER_S, kernel_ticks / _TICKS_PER_S)


def core_busy_s(core: int) -> float:
    """Seconds that ``core`` has been busy since boot, for whomever; time stolen by the hypervisor included."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (int(value) for value in values)
            return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
    raise PerfError(f"/proc/stat has no line for core {core}")
