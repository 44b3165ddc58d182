"""The Python sources of vLLM releases that are not installed, for the connector's contract tests.

A release's wheel is fetched by pip, its `.py` files are unpacked into a cache in the user's home, and the rest is
thrown away: the compiled parts are of no use to the scheduler's hooks. The wheel is taken rather than the source
distribution, because pip builds metadata for the latter, which needs torch and half of vLLM's build tools.

Measured here, download included: 4 s per release on a fast line (about 330 MB each), nothing afterwards.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("PD_VLLM_SOURCES", "~/.cache/pd-operator/vllm-src")).expanduser()
DOWNLOAD_SECONDS = 600


class SourcesUnavailable(RuntimeError):
    """pip could not fetch a release; the message holds what pip said."""


def fetch(version: str, cache: Path = CACHE) -> Path:
    """The folder that holds the package `vllm` of this release, fetched unless it is there.

    Raises:
        SourcesUnavailable: when pip fails or the wheel holds no `vllm` package.
    """
    home = cache / version
    if _complete(home):
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(home):
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                wheel = _download(version, Path(scratch))
                unpacked = Path(scratch) / "unpacked"
                _unpack(wheel, unpacked)
                if not _complete(unpacked):
                    raise SourcesUnavailable(f"the wheel {wheel.name} holds no vllm package")
                # One rename, so that a stopped run never leaves half a package behind.
                unpacked.rename(home)
    return home


def _complete(home: Path) -> bool:
    return (home / "vllm" / "__init__.py").is_file()


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.CalledProcessError as error:
        raise SourcesUnavailable(f"pip could not download vllm=={version}:\n{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise SourcesUnavailable(f"pip did not download vllm=={version} within {DOWNLOAD_SECONDS} s") from error
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
