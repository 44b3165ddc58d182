"""What a machine must have for an embedded cluster, and what to say where it hasn't.

Pure: the shell observes, this module judges, so that every reason can be tested on a machine that has everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LIGHT_PROGRAMS: Final = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "openssl": "openssl",
}
FULL_PROGRAMS: Final = {
    **LIGHT_PROGRAMS,
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/lib/cni/host-local": "containernetworking-plugins",
    "/usr/lib/cni/loopback": "containernetworking-plugins",
    "nft": "nftables",
    "conntrack": "conntrack",
    "iptables": "iptables",
    "socat": "socat",
}
"""Program (a name on PATH, or a path) → Debian package."""

V1_CONTROLLERS: Final = ("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids")
V2_CONTROLLERS: Final = ("cpu", "cpuset", "io", "memory", "pids")
STATE_BYTES: Final = 200_000_000
"""Free space that a start asks for: a cluster of two nodes writes about 20 MB, and its audit log grows."""
HIDDEN_FOLDERS: Final = ("/run", "/var/run", "/var/lib", "/var/log")
"""A node mounts its own over these, so nothing that it needs may lie below them."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the shell saw. ``namespaces_error`` is what making all namespaces at once said, empty when it worked."""

    platform: str
    is_root: bool
    missing_programs: tuple[str, ...]
    namespaces_error: str
    cgroup_version: int | None
    cgroup_controllers: frozenset[str]
    cgroup_error: str
    has_overlay: bool
    paths: Mapping[str, str]
    state_error: str = ""


def problems(observed: Observed, *, light: bool) -> list[str]:
    """One sentence per reason why no cluster can be started; empty when one can."""
    if observed.platform != "linux":
        return [f"an embedded cluster needs Linux; this is {observed.platform}"]
    if not observed.is_root:
        return ["an embedded cluster needs root, for namespaces" + ("" if light else ", mounts and cgroups")]
    found = []
    if observed.missing_programs:
        table = LIGHT_PROGRAMS if light else FULL_PROGRAMS
        packages = sorted({table[program] for program in observed.missing_programs})
        found.append(f"missing: {', '.join(observed.missing_programs)}; Debian packages: {' '.join(packages)}")
    if observed.namespaces_error:
        found.append(f"namespaces can't be made here: {observed.namespaces_error}")
    if observed.state_error:
        found.append(f"the state folder {observed.state_error}; XDG_STATE_HOME names another place for it")
    for what, path in observed.paths.items():
        if any(path == folder or path.startswith(f"{folder}/") for folder in HIDDEN_FOLDERS):
            found.append(f"{what} is {path}, and a node hides {', '.join(HIDDEN_FOLDERS)} of the machine")
    if not light:
        found += _node_problems(observed)
    return found


def _node_problems(observed: Observed) -> list[str]:
    found = []
    if observed.cgroup_version is None:
        found.append("no cgroups are mounted at /sys/fs/cgroup")
    else:
        needed = V1_CONTROLLERS if observed.cgroup_version == 1 else V2_CONTROLLERS
        lacking = [name for name in needed if name not in observed.cgroup_controllers]
        if lacking:
            found.append(f"cgroup v{observed.cgroup_version} lacks the controllers {', '.join(lacking)}")
    if observed.cgroup_error:
        found.append(f"no cgroup can be made: {observed.cgroup_error}")
    if not observed.has_overlay:
        found.append("the kernel has no overlay file system, which containerd needs")
    return found
