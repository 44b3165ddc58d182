"""Programs of Debian packages for tests, unpacked into the cache: nothing is installed into the system.

Separate because more than one test needs a program that pip doesn't have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pd-operator"


class NotThere(RuntimeError):
    """A package can't be had; the text says what to install."""


def unpacked(packages: Sequence[str], name: str) -> Path:
    """The folder `name` of the cache with these packages in it; made when it isn't there.

    Raises:
        NotThere: with what apt said.
    """
    target = CACHE / name
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        try:
            _run("apt-get", "download", *packages, folder=folder)
        except NotThere:
            _run("apt-get", "update", folder=folder)  # a new machine has no lists yet
            _run("apt-get", "download", *packages, folder=folder)
        made = Path(folder) / "unpacked"
        for package in Path(folder).glob("*.deb"):
            _run("dpkg", "-x", str(package), str(made), folder=folder)
        try:
            made.rename(target)
        except OSError:  # another run was faster
            shutil.rmtree(made, ignore_errors=True)
    return target


def _run(*words: str, folder: str) -> None:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotThere(f"{words[0]} is not there; install the programs of {' '.join(words[2:])} yourself") from error
    if done.returncode:
        raise NotThere(f"{' '.join(words)} failed: {done.stderr.strip()}")
