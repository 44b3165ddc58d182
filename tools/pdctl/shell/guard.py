"""A small process between pdctl and one engine or router: when pdctl is gone, so is everything below.

Run as a script by path, with the standard library only: `python guard.py FD SCRATCH COMMAND...`. FD is one end of a
socket pair; SCRATCH is a folder to remove at the end, or an empty word. The guard reports on the socket (`started PID`,
then `exited RETURNCODE`) and takes orders from it (`leader SIGNUM`, `group SIGNUM`). End of file means that pdctl died
or let go: kill everything and leave.

A parent-death signal alone is not enough: it reaches the direct child only, and vLLM's worker processes would survive,
holding memory and ports. The guard is a child subreaper, so every orphaned descendant becomes its own child, whatever
session or group it moved to, and it leaves only when none is left. The command also gets a parent-death signal, in case
the guard itself is killed, and a mark in the environment, by which pdctl then finds what the command had started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLEAN_UP_SECONDS = 20.0
KILL_INTERVAL = 0.01
EXEC_SECONDS = 2.0
TRACKER_SECONDS = 3.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run one command until it ends or the other side of the socket goes away."""
    control, scratch, command = socket.socket(fileno=int(arguments[0])), arguments[1], arguments[2:]
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"{command[0]}: error: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        _tell(control, "exited 127\n")
        return 1
    try:
        _tell(control, f"started {child.pid}\n")
        _serve(control, child)
    finally:
        statuses = kill_descendants()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    returncode = child.returncode
    if returncode is None and child.pid in statuses:
        returncode = os.waitstatus_to_exitcode(statuses[child.pid])
    if returncode is not None:
        _tell(control, f"exited {returncode}\n")
    return 0


def _serve(control: socket.socket, child: subprocess.Popen[bytes]) -> None:
    """Carry out orders until the command has ended or nobody gives orders any more."""
    ended = os.pidfd_open(child.pid)
    watched: list[int] = [control.fileno(), ended]
    pending = b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        if ended in ready:
            child.wait()
            return
        try:
            received = control.recv(4096)
        except ConnectionResetError:
            received = b""
        if not received:
            return
        *orders, pending = (pending + received).split(b"\n")
        for order in orders:
            whom, number = order.decode("ascii").split()
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whom == "group" else os.kill)(child.pid, int(number))


def kill_descendants() -> dict[int, int]:
    """SIGKILL everything below this process, again and again until nothing is left.

    Python's resource trackers get a moment: they end by themselves when the processes that they serve are gone, and
    take along what those left in shared memory, which stays allocated otherwise.

    Returns the wait status of each direct child.
    """
    begun = time.monotonic()
    statuses: dict[int, int] = {}
    while time.monotonic() - begun < CLEAN_UP_SECONDS:
        _kill_all(_descendants(), begun)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        except ChildProcessError:
            break
        time.sleep(KILL_INTERVAL)
    return statuses


def _kill_all(pids: list[int], begun: float) -> None:
    for pid in pids:
        spared = time.monotonic() - begun < TRACKER_SECONDS and _is_tracker(pid)
        with contextlib.suppress(ProcessLookupError):
            # A tracker that was stopped together with its group couldn't do its work.
            os.kill(pid, signal.SIGCONT if spared else signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in _read(f"/proc/{pid}/cmdline")
    except OSError:
        return False


def kill_marked(mark: str, proc: str = "/proc") -> None:
    """SIGKILL every process of this user that was started with ``mark`` (NAME=VALUE) in its environment.

    Blocks until there is none, or for ``CLEAN_UP_SECONDS`` at most. Resource trackers get their moment here, too, and
    so does a program that is just being loaded: its environment can't be read yet.
    """
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < CLEAN_UP_SECONDS:
        pids, loading = _marked(mark.encode(), proc)
        if not pids and (not loading or passed >= EXEC_SECONDS):
            return
        _kill_all(pids, begun)
        time.sleep(KILL_INTERVAL)


def _marked(mark: bytes, proc: str) -> tuple[list[int], bool]:
    """Processes with the mark, and whether there are some of which that can't be said yet."""
    found, loading = [], False
    for entry in os.listdir(proc):
        # Other users' processes can't be read, and any process may be gone by now.
        with contextlib.suppress(OSError):
            if entry.isdigit():
                environ = _read(f"{proc}/{entry}/environ")
                if mark in environ.split(b"\0"):
                    found.append(int(entry))
                elif not environ and not _read(f"{proc}/{entry}/cmdline"):
                    os.readlink(f"{proc}/{entry}/exe")  # the kernel's own and zombies have none
                    loading = True
    return found, loading


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                # The command name stands in brackets and may hold anything, so fields are counted from its end.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _die_with_guard() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def _tell(control: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        control.sendall(text.encode("ascii"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
