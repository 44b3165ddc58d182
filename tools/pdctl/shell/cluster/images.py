"""Make the development images from this machine's Python and this checkout, and hand archives to the nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

from pdctl.core.cluster.images import Host, development_images, outermost, pause_image
from pdctl.core.cluster.layout import RUNTIME_SOCKET
from pdctl.core.cluster.oci import pack_archive
from pdctl.shell.cluster.places import ASSETS, ClusterError
from pdctl.shell.model_maker import ModelMakerError, default_cache, tiny_model_folder

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
SYSTEM_FILES: Final = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/ca-certificates")
ROOT_NAMES: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
PACKAGES: Final = ("pd_operator", "pd_router", "pd_connector", "pd_wire", "pdctl")
PLUGIN_PACKAGES: Final = ("pd_connector", "pd_wire")


def host_architecture() -> str:
    """Go's name of this machine's architecture."""
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def observe_host(extra: tuple[str, ...] = ()) -> Host:
    """What containers need of this machine: the system, this Python with its packages, our sources, the cache of small
    models, and ``extra`` paths.
    """
    mounts = [path for path in SYSTEM_FILES if Path(path).exists()]
    links = {}
    for name in ROOT_NAMES:
        path = Path("/") / name
        if path.is_symlink():
            links[name] = str(path.readlink())
        elif path.is_dir():
            mounts.append(str(path))
    model = None
    python = Path(sys.executable).resolve()
    mounts += [sys.prefix, sys.base_prefix, str(python.parent.parent)]
    mounts += [str(_package_folder(name).parent) for name in PACKAGES]
    # Made now, so that a model which is made while the cluster is up is seen, too.
    models = default_cache()
    models.mkdir(parents=True, exist_ok=True)
    mounts += [str(models), *(str(Path(path).resolve(strict=True)) for path in extra)]
    with contextlib.suppress(ModelMakerError):
        model = str(tiny_model_folder())
    return Host(outermost(mounts), links, str(Path(sys.prefix) / "bin"), host_architecture(), model)


def pack_development_images(extra: tuple[str, ...] = ()) -> bytes:
    """One archive with all of them."""
    stand_in = (ASSETS / "stand_in.py").read_bytes()
    return pack_archive(development_images(observe_host(extra), stand_in, plugin_files()), host_architecture())


def pack_pause(program: Path) -> bytes:
    """The archive that every node gets first."""
    return pack_archive([pause_image(program.read_bytes())], host_architecture())


def plugin_files() -> dict[str, bytes]:
    """The connector's Python files, as they are on the engine's PYTHONPATH."""
    found = {}
    for name in PLUGIN_PACKAGES:
        folder = _package_folder(name)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[str(path.relative_to(folder.parent))] = path.read_bytes()
    return found


def import_archive(init: int, archive: Path) -> str:
    """Give an OCI or Docker archive to one node, by the machine's pid of its process 1. Returns what ctr said.

    Raises:
        ClusterError: it is no such archive.
    """
    socket = f"/proc/{init}/root{RUNTIME_SOCKET}"
    argv = ["ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", str(archive)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{archive} can't be imported: {done.stderr.strip()}")
    return done.stdout


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    locations = list((spec.submodule_search_locations if spec else None) or ())
    if not locations:
        raise ClusterError(f"the Python package {name} is not installed here, and the images need it")
    return Path(locations[0]).resolve()
