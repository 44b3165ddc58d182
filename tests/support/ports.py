"""Ports for programs that a test starts: chosen before the program listens, so nobody may take them in between.

Not by asking the kernel for any free one: it gives those out to every connection that is made on this machine, too,
and seconds pass until the program has started.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 15_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_draw: Final = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Different ports on loopback that nobody listens on now, below those that the kernel gives out by itself."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    found: set[int] = set()
    while len(found) < count:
        port = _draw.randrange(_FIRST, max(end, _FIRST + 5_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.add(port)
    return list(found)


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
