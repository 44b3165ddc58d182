"""Observe whether this machine can hold a cluster, and install what Debian packages can give."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdctl.core.cluster.preflight import FULL_PROGRAMS, LIGHT_PROGRAMS, STATE_BYTES, Observed, problems
from pdctl.shell.cluster.cgroups import available_controllers, cgroup_version, try_cgroup
from pdctl.shell.cluster.places import ClusterError, cache_folder, state_folder
from pdctl.shell.cluster.signals import uninterrupted

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES: Final = ("--mount", "--uts", "--ipc", "--pid", "--net", "--fork")
MODULES: Final = ("overlay", "bridge", "br_netfilter", "veth", "nf_tables")


def require(*, light: bool, say: Callable[[str], None]) -> None:
    """Make sure that a cluster can be started here.

    Raises:
        ClusterError: all reasons at once.
    """
    if os.geteuid() == 0 and (missing := _missing_programs(light=light)):
        _install(missing, say, light=light)
    if found := problems(observe(light=light), light=light):
        raise ClusterError("no embedded cluster can be started here:\n" + "\n".join(f"  - {text}" for text in found))


def observe(*, light: bool) -> Observed:
    """Look at the machine; changes nothing but loading kernel modules that a node needs anyway."""
    is_root = os.geteuid() == 0
    missing = tuple(_missing_programs(light=light))
    can_probe = is_root and not {"unshare"} & set(missing)
    version = cgroup_version()
    if is_root and not light:
        _load_modules()
    return Observed(
        platform=sys.platform,
        is_root=is_root,
        missing_programs=missing,
        namespaces_error=_namespaces_error() if can_probe else "",
        cgroup_version=version,
        cgroup_controllers=available_controllers(version),
        cgroup_error=try_cgroup() if is_root and not light and version is not None else "",
        has_overlay="overlay" in Path("/proc/filesystems").read_text(encoding="ascii").split(),
        paths={
            "the state folder": str(state_folder()),
            "the cache folder": str(cache_folder()),
            "this Python": sys.base_prefix,
            "the virtual environment": sys.prefix,
            "this program": str(Path(__file__).resolve()),
        },
        state_error=try_state_folder() if is_root else "",
    )


def try_state_folder() -> str:
    """Why a cluster's files can't be kept, or "". Nothing is made: whoever removes what he made for a try would take it
    from another process that starts at this moment."""
    folder = state_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except FileNotFoundError:
        return try_state_folder()  # the last cluster has just been removed, and the folder with it
    except OSError as error:
        return f"{folder} can't be written to: {error.strerror}"
    if free < STATE_BYTES:
        return f"{folder} has {free / 1e6:.0f} MB of free space, and {STATE_BYTES / 1e6:.0f} MB are needed"
    return ""


def _missing_programs(*, light: bool) -> list[str]:
    table = LIGHT_PROGRAMS if light else FULL_PROGRAMS
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return [name for name in table if shutil.which(name, path=path) is None]


def _install(missing: list[str], say: Callable[[str], None], *, light: bool) -> None:
    """Install the packages of missing programs. What can't be installed is reported by the check that follows."""
    apt = shutil.which("apt-get")
    if apt is None:
        return
    table = LIGHT_PROGRAMS if light else FULL_PROGRAMS
    packages = sorted({table[name] for name in missing})
    say(f"installing Debian packages: {' '.join(packages)}")
    install = ["install", "--yes", "--quiet", "--no-install-recommends", *packages]
    # A package that is half configured would be in the way of the next attempt.
    with uninterrupted():
        done = _apt(apt, *install)
        if done.returncode:
            _apt(apt, "update", "--quiet")
            done = _apt(apt, *install)
    if done.returncode:
        say("apt-get: " + "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:]))


def _apt(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, start_new_session=True)


def _namespaces_error() -> str:
    done = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _load_modules() -> None:
    """Most are loaded by use; those that aren't must be there before a network namespace shows their settings."""
    modprobe = shutil.which("modprobe", path=SYSTEM_PATH)
    if modprobe is not None:
        for module in MODULES:
            subprocess.run([modprobe, "--quiet", module], capture_output=True, check=False)
