"""End a cluster, and see what is left of one.

By names alone (network namespaces, cgroups, state folder), never by what `up` has remembered, so that what a killed or
half-failed `up` has left is ended as well.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from pdctl.core.cluster.layout import Layout
from pdctl.shell.cluster import network
from pdctl.shell.cluster.cgroups import leftover_cgroups, remove_cgroups
from pdctl.shell.cluster.places import ClusterError, state_folder
from pdctl.shell.cluster.start import mark_of
from pdctl.shell.guard import kill_marked


def remove_everything(layout: Layout) -> None:
    """Kill and remove. Nothing happens where there is nothing.

    Raises:
        ClusterError: something can't be removed; the text says what.
    """
    netnses = network.namespaces_of(layout.name)
    for netns in netnses:
        network.kill_processes(netns)
    # What an interrupted start has left on its way into the namespaces.
    kill_marked(mark_of(layout.name))
    for netns in netnses:
        network.delete_netns(netns)
    remove_cgroups(layout.cgroup)
    shutil.rmtree(layout.state, ignore_errors=True)
    for folder in (state_folder(), state_folder().parent):
        # Only when it was the last one.
        with contextlib.suppress(OSError):
            folder.rmdir()
    if left := leftovers(layout):
        raise ClusterError(f"cluster {layout.name} left behind: {', '.join(left)}")


def leftovers(layout: Layout) -> list[str]:
    """Everything of a cluster that exists on the machine: namespaces, cgroups, mounts, files."""
    state = str(layout.state)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return [
        *(f"network namespace {netns}" for netns in network.namespaces_of(layout.name)),
        *(f"cgroup {path}" for path in leftover_cgroups(layout.cgroup)),
        *(f"mount {path}" for path in mounts if path.startswith(f"{state}/")),
        *([f"folder {state}"] if layout.state.exists() else []),
    ]
