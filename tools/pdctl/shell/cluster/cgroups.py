"""The cluster's control groups: one folder per hierarchy (v1) or in the one hierarchy (v2), with one below per node.

The kubelet needs a root that exists and has its controllers; it makes everything below by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

from pdctl.core.cluster.preflight import V2_CONTROLLERS
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import uninterrupted

CGROUPS: Final = Path("/sys/fs/cgroup")
PROBE: Final = "pdprobe-"
REMOVE_SECONDS: Final = 30.0


def cgroup_version() -> int | None:
    """2 for the unified hierarchy, 1 for one folder per controller, None for neither."""
    if (CGROUPS / "cgroup.controllers").exists():
        return 2
    return 1 if (CGROUPS / "memory").is_dir() else None


def available_controllers(version: int | None) -> frozenset[str]:
    """What can be limited here."""
    if version == 2:
        return frozenset((CGROUPS / "cgroup.controllers").read_text(encoding="ascii").split())
    if version == 1:
        # Controllers that share a hierarchy (cpu,cpuacct) have a link each.
        return frozenset(path.name for path in CGROUPS.iterdir() if path.is_dir())
    return frozenset()


def try_cgroup() -> str:
    """Why no cgroup can be made, or ""."""
    # With a number, since several starts may probe at once; not with the prefix of clusters.
    name = f"{PROBE}{os.getpid()}"
    with uninterrupted():
        for number in clusters_with_cgroups(PROBE):
            if not os.path.exists(f"/proc/{number}"):
                remove_cgroups(f"{PROBE}{number}")
        try:
            make_cgroups(name, [])
        except (OSError, ClusterError) as error:
            return str(error)
        finally:
            remove_cgroups(name)
    return ""


def make_cgroups(name: str, nodes: list[str]) -> None:
    """The cluster's cgroup and one below it per node, in every hierarchy."""
    version = cgroup_version()
    if version == 2:
        _enable(CGROUPS)
    for hierarchy in _hierarchies(version):
        for path in (hierarchy / name, *(hierarchy / name / node for node in nodes)):
            path.mkdir(exist_ok=True)
            if version == 2:
                _enable(path)
            elif (path / "cpuset.cpus").exists():
                # A cpuset is born empty and then can't take a process.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (path / file).write_text((path.parent / file).read_text(encoding="ascii"), encoding="ascii")


def remove_cgroups(name: str) -> None:
    """Take away the cluster's cgroups, and kill what is still in them."""
    deadline = time.monotonic() + REMOVE_SECONDS
    for hierarchy in _hierarchies(cgroup_version()):
        root = hierarchy / name
        while root.exists():
            # A folder can be removed once its processes are reaped, which takes a moment after they were killed.
            _remove_once(root)
            if not root.exists():
                break
            if time.monotonic() > deadline:
                raise ClusterError(f"{root} can't be removed: processes {sorted(_processes(root))} are in it")
            for pid in _processes(root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def leftover_cgroups(name: str) -> list[str]:
    """Paths of the cluster's cgroups that exist."""
    return [str(path / name) for path in _hierarchies(cgroup_version()) if (path / name).exists()]


def clusters_with_cgroups(prefix: str) -> set[str]:
    """Names of cgroups with the prefix, without it."""
    found = set()
    for hierarchy in _hierarchies(cgroup_version()):
        found |= {path.name.removeprefix(prefix) for path in hierarchy.glob(f"{prefix}*") if path.is_dir()}
    return found


def _hierarchies(version: int | None) -> list[Path]:
    if version == 2:
        return [CGROUPS]
    if version is None:
        return []
    return sorted(path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def _enable(path: Path) -> None:
    """Hand the controllers on to the folders below (v2 only)."""
    available = (path / "cgroup.controllers").read_text(encoding="ascii").split()
    enabled = (path / "cgroup.subtree_control").read_text(encoding="ascii").split()
    wanted = [f"+{name}" for name in (*V2_CONTROLLERS, "hugetlb") if name in available and name not in enabled]
    if wanted:
        try:
            (path / "cgroup.subtree_control").write_text(" ".join(wanted), encoding="ascii")
        except OSError as error:
            raise ClusterError(f"{path}: controllers {' '.join(wanted)} can't be enabled: {error.strerror}") from error


def _processes(root: Path) -> set[int]:
    found: set[int] = set()
    for path in (root, *root.rglob("*")):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (path / "cgroup.procs").read_text(encoding="ascii").split()}
    return found - {0}


def _remove_once(root: Path) -> None:
    for path, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)
