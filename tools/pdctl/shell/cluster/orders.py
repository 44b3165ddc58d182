"""Give orders to a node's process 1: stop, start, signal one daemon. The other side is `init.Supervisor`."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

from pdctl.shell.cluster.places import ClusterError


def order(control: Path, do: str, name: str, number: int = signal.SIGKILL) -> int | None:
    """Carry out one order. Returns the daemon's process number inside its node, None when it doesn't run.

    Raises:
        ClusterError: the node is gone, or it refused.
    """
    folder = -1
    try:
        folder = os.open(control.parent, os.O_DIRECTORY | os.O_PATH)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(90)
            # Through the folder's descriptor: a socket's address is shorter than a path may be.
            connection.connect(f"/proc/self/fd/{folder}/{control.name}")
            connection.sendall(json.dumps({"do": do, "name": name, "signal": number}).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline() or b'{"ok": false, "error": "no answer"}')
    except OSError as error:
        raise ClusterError(f"the node's process 1 doesn't answer ({control}): {error}") from error
    finally:
        if folder >= 0:
            os.close(folder)
    if not answer["ok"]:
        raise ClusterError(f"{do} {name}: {answer['error']}")
    pid: int | None = answer["pid"]
    return pid
