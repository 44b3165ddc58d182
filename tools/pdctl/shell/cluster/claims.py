"""Whose cluster it is: the process that started it, as long as that lives. So demos and tests are told apart from what
`pdctl cluster up` left running on purpose.

A claim is an abstract socket, so that it needs no file and ends with its process, however that ends. The short locks of
`up` and `down` are of the same kind.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pdctl.shell.cluster.places import ClusterError

PREFIX: Final = "pdctl-claim"
LOCK: Final = "pdctl-cluster"
SHOWN: Final = 70
_TOLD: Final = re.compile(rf"@{PREFIX}=(?P<name>[^=\s]+)=(?P<pid>[0-9]+)")


class Claim:
    """One process's claim to a cluster's name."""

    def __init__(self, name: str) -> None:
        """Raises ClusterError: another living process has it; the text says which."""
        self._held = _bind(f"{PREFIX}={name}")
        if self._held is None:
            owner = owners().get(name)
            told = "another process" if owner is None else describe_process(owner)
            raise ClusterError(f"cluster {name} is in use by {told}; wait until that ends, or end it first")
        # The number can't be asked of the first one: whoever connected would have to be answered.
        self._told = _bind(f"{PREFIX}={name}={os.getpid()}")

    def release(self) -> None:
        """Give it up."""
        for held in (self._told, self._held):
            if held is not None:
                held.close()


def owners() -> dict[str, int]:
    """Clusters that belong to living processes: name → process."""
    text = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    return {match["name"]: int(match["pid"]) for match in _TOLD.finditer(text)}


def describe_process(pid: int) -> str:
    """Its number and the beginning of its command line."""
    words = b""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    text = words.replace(b"\0", b" ").decode(errors="replace").strip()
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
    return f"process {pid}" + (f" ({shown})" if shown else "")


@contextlib.contextmanager
def one_at_a_time(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """One `up` or `down` of a name at a time: waits for the one that is running."""
    told = False
    while (lock := _bind(f"{LOCK}-{name}")) is None:
        if not told:
            say(f"another command is busy with cluster {name}; waiting for it")
            told = True
        time.sleep(0.1)
    with lock:
        yield


def is_busy(name: str) -> bool:
    """Does an `up` or `down` of this name run?"""
    if (lock := _bind(f"{LOCK}-{name}")) is None:
        return True
    lock.close()
    return False


def _bind(name: str) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0{name}")
    except OSError:
        held.close()
        return None
    return held
