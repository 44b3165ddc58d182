"""Observe this machine: cores, GPUs, EFA devices, and ports that can be had."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final

from pdctl.core.placement import Machine

_GPU: Final = re.compile(r"nvidia(\d+)")


def observe_machine() -> Machine:
    """What this process may use. `CUDA_VISIBLE_DEVICES` limits the GPUs, the scheduler's affinity limits the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    else:
        found = (_GPU.fullmatch(path.name) for path in Path("/dev").glob("nvidia*"))
        gpus = tuple(str(number) for number in sorted(int(match.group(1)) for match in found if match))
    rdma = Path("/sys/class/infiniband")
    efa = len(list(rdma.iterdir())) if rdma.is_dir() else 0
    return Machine(tuple(sorted(os.sched_getaffinity(0))), gpus, efa)


class PortClaims:
    """Takes ports for as long as this object lives, against other programs and against other runs of pdctl.

    An engine binds its port many seconds after it was chosen. Until then nothing but a second pdctl is likely to take
    it, so a claim is a name in Linux's abstract socket namespace: it needs no file and ends with this process.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._claims: dict[int, socket.socket] = {}

    def claim(self, port: int) -> bool:
        """Take one port. False when somebody listens there or another run has claimed it."""
        if port in self._claims:
            return False
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mark.bind(f"\0pdctl-port-{port}")
            self._try_to_listen(port)
        except OSError:
            mark.close()
            return False
        self._claims[port] = mark
        return True

    def release(self) -> None:
        """Give all ports back."""
        for mark in self._claims.values():
            mark.close()
        self._claims.clear()

    def _try_to_listen(self, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the servers do it: connections of an earlier run that are still winding down don't matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
