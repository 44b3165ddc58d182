"""Wait until a started cluster is usable, one named condition after the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pdctl.core.cluster.layout import RUNTIME_SOCKET, Layout, node_name
from pdctl.shell.cluster import network
from pdctl.shell.cluster.api import MERGE, Api, ApiError
from pdctl.shell.cluster.places import ClusterError

START_SECONDS: Final = 300.0
"""Long, because on busy cores everything is slow, and nothing is won by giving up early."""
POLL_SECONDS: Final = 0.1
LOG_LINES: Final = 15
ENDS_FORGIVEN: Final = 2
"""How often one daemon may end during a start; it is started again. A kubelet ends where containerd's socket is there
and does not answer yet."""

DEFAULT_ACCOUNT: Final = "/api/v1/namespaces/default/serviceaccounts/default"

Progress = Callable[[str], None]


class Waiter:
    """Waits on conditions of one cluster and fails when one of its daemons has and keeps doing so."""

    def __init__(self, layout: Layout, nodes: int, progress: Progress) -> None:
        self._layout = layout
        self._nodes = nodes
        self._progress = progress
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begun

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Poll until ``holds``. A refused or missing answer of the API server means "not yet".

        Raises:
            ClusterError: a daemon ended again and again, a node's process 1 is gone, or it took too long.
        """
        while True:
            try:
                if holds():
                    break
            except ApiError:
                pass
            self._check_alive()
            if self.seconds > START_SECONDS:
                raise ClusterError(f"gave up after {self.seconds:.0f} s waiting for: {what}")
            self._progress(f"waiting for: {what} ({self.seconds:.0f} s)")
            time.sleep(POLL_SECONDS)

    def _check_alive(self) -> None:
        for node in range(self._nodes):
            ended = self._layout.node_folder(node) / "ended"
            lines = ended.read_text(encoding="utf-8").splitlines() if ended.exists() else []
            for name, ends in Counter(line.split()[0] for line in lines).items():
                if ends > ENDS_FORGIVEN:
                    raise ClusterError("\n".join([*lines, log_tail(self._layout, name, node)]))
            # Process 1 takes a moment to appear; its log says why where it never does.
            if self.seconds > 5 and network.init_of(self._layout.netns(node)) is None:
                raise ClusterError(f"{node_name(node)} died at its start\n{log_tail(self._layout, 'init', node)}")


def log_tail(layout: Layout, daemon: str, node: int) -> str:
    """The last lines of a daemon's log."""
    candidates = [f"{daemon}.{node_name(node)}.log", f"{node_name(node)}.{daemon}.log", f"{daemon}.log"]
    for name in candidates:
        path: Path = layout.logs / name
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            return "\n".join(f"  {name}: {line}" for line in lines)
    return ""


def wait_for_control_plane(waiter: Waiter, api: Api) -> None:
    """The API server with all its hooks, and the controllers that serve everyone."""
    waiter.until("API server", lambda: bool(api.get("/readyz")))
    waiter.until("controllers (default service account)", lambda: bool(api.get(DEFAULT_ACCOUNT)))


def wait_for_runtime(waiter: Waiter, node: int, netns: str) -> int:
    """containerd's socket of a node. Returns the machine's number of the node's process 1."""

    def answers() -> bool:
        init = network.init_of(netns)
        return init is not None and Path(f"/proc/{init}/root{RUNTIME_SOCKET}").exists()

    waiter.until(f"containerd on {node_name(node)}", answers)
    init = network.init_of(netns)
    assert init is not None
    return init


def wait_for_node(waiter: Waiter, api: Api, name: str, labels: Mapping[str, str], devices: Mapping[str, int]) -> None:
    """The node Ready, with its labels and all that it shall offer."""
    path = f"/api/v1/nodes/{name}"
    waiter.until(f"{name} registered", lambda: bool(api.get(path)))
    if labels:
        # By the administrator: a kubelet may give itself only some of kubernetes.io's labels.
        body = {"metadata": {"labels": dict(labels)}}
        waiter.until(f"labels of {name}", lambda: bool(api.request("PATCH", path, body, MERGE)))
    waiter.until(f"{name} Ready", lambda: node_is_ready(api.get(path)))
    waiter.until(f"devices of {name}", lambda: offers(api.get(path), devices))


def node_is_ready(node: dict[str, Any]) -> bool:
    """Does the kubelet report Ready?"""
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def offers(node: dict[str, Any], devices: Mapping[str, int]) -> bool:
    """Can pods get all these devices?"""
    allocatable = node.get("status", {}).get("allocatable", {})
    return all(allocatable.get(resource) == str(count) for resource, count in devices.items())
