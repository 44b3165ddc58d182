"""Bring what the comparison needs onto this machine: wrk, the peers' virtual environment, vLLM's example proxy.

Separate from the measurement because it is the only part that talks to package registries. Everything comes through the
ordinary clients (apt-get, uv, pip), pinned and hashed, and is kept below ``~/.cache/pd-operator/perf-<hash>`` under a
hash of the pins, so a second run installs nothing. Nothing of the peers' code is kept in the repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perf.errors import PerfError

_ROOT: Final = Path(__file__).resolve().parents[2]
_PEERS: Final = _ROOT / "requirements" / "perf.txt"
_SOURCE: Final = _ROOT / "requirements" / "perf-source.txt"
_PROXY_NAME: Final = "disagg_proxy_multiturn.py"


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers' programs are."""

    python: Path
    vllm_router: Path
    example_proxy: Path


def ensure_programs() -> None:
    """Make sure that wrk and taskset can be started.

    Raises:
        PerfError: when one is missing and cannot be installed here.
    """
    if shutil.which("taskset") is None:
        raise PerfError("taskset is missing (Debian package util-linux): without it nothing can be pinned to one core")
    if shutil.which("wrk") is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PerfError("wrk is missing and can only be installed by root with apt-get: apt-get install wrk")
    print("==> installing wrk (Debian package)", flush=True)
    _run(["apt-get", "update", "-qq"])
    _run(["apt-get", "install", "-y", "-qq", "wrk"])


def ensure_peers() -> Peers:
    """Install the peers unless an earlier run did.

    Raises:
        PerfError: when an installer fails; its output is part of the message.
    """
    pins = hashlib.sha256(_PEERS.read_bytes() + _SOURCE.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pd-operator" / f"perf-{pins}"
    home.mkdir(parents=True, exist_ok=True)
    peers = Peers(home / "venv/bin/python", home / "venv/bin/vllm-router", home / _PROXY_NAME)
    with _exclusively(home / "lock"):
        done = home / "complete"
        if not done.exists():
            _install_peers(home / "venv")
            _extract_example_proxy(home)
            done.touch()
    return peers


def _install_peers(venv: Path) -> None:
    print(f"==> installing the peers into {venv}", flush=True)
    uv = str(Path(sys.executable).with_name("uv"))
    shutil.rmtree(venv, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)])
    python = str(venv / "bin/python")
    _run([uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "--no-deps", "-r", str(_PEERS)])


def _extract_example_proxy(home: Path) -> None:
    """Fetch vLLM's source distribution and keep one file of it.

    pip prepares a source distribution's metadata before it hands it over, and vLLM's setup script imports torch for
    that. torch is taken from the interpreter that runs this; the build tools come from the peers' environment.
    """
    print("==> fetching vLLM's source distribution for its example proxy", flush=True)
    download = home / "sdist"
    shutil.rmtree(download, ignore_errors=True)
    build_tools = next((home / "venv/lib").glob("python3*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--require-hashes"]
    _run(
        [*pip, *options, "-r", str(_SOURCE), "-d", str(download)],
        # "empty" builds nothing for any device; the version comes from the pin, as there is no git history to ask.
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=_pinned_version(),
        PYTHONPATH=str(build_tools),
    )
    archive = next(download.glob("vllm-*.tar.gz"))
    with tarfile.open(archive) as tar:
        member = next(m for m in tar if m.isfile() and m.name.endswith("/" + _PROXY_NAME))
        content = tar.extractfile(member)
        assert content is not None
        (home / _PROXY_NAME).write_bytes(content.read())
    shutil.rmtree(download)


def _pinned_version() -> str:
    found = re.search(r"^vllm==([^\s\\]+)", _SOURCE.read_text(), re.MULTILINE)
    if found is None:
        raise PerfError(f"{_SOURCE} does not pin vllm")
    return found[1]


def _run(command: list[str], **environment: str) -> None:
    result = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise PerfError(f"{' '.join(command)} exited with {result.returncode}:\n{result.stdout[-3000:]}")


@contextmanager
def _exclusively(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
