"""Whom `kill_marked` finds, with a process table whose moments can be chosen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.shell import guard

MARK = "PD_MARK=one"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"], env={}) as process:
        yield process
        process.kill()


def entry(proc: Path, pid: int, environ: str = "", cmdline: str = "", *, has_program: bool = True) -> Path:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "environ").write_text(environ)
    (folder / "cmdline").write_text(cmdline)
    if has_program:
        (folder / "exe").symlink_to("/bin/sleep")
    return folder


def test_a_program_that_is_just_being_loaded_is_found(victim: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = entry(tmp_path, victim.pid)

    def load() -> None:
        time.sleep(0.1)
        (folder / "environ").write_text(f"A=b\0{MARK}\0")
        victim.wait()
        shutil.rmtree(folder)

    loading = threading.Thread(target=load)
    loading.start()
    guard.kill_marked(MARK, str(tmp_path))
    loading.join()
    assert victim.returncode == -signal.SIGKILL


def test_who_has_no_mark_is_spared_and_not_waited_for(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry(tmp_path, victim.pid, f"{MARK}s\0", "sleep\0")
    entry(tmp_path, 2, has_program=False)
    entry(tmp_path, 3, "", "cleared its environment\0")
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(guard, "EXEC_SECONDS", 10**6)
    monkeypatch.setattr(guard, "CLEAN_UP_SECONDS", 10**6)
    guard.kill_marked(MARK, str(tmp_path))
    assert victim.poll() is None


def test_who_never_shows_an_environment_is_not_waited_for_without_end(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry(tmp_path, victim.pid)
    monkeypatch.setattr(guard, "EXEC_SECONDS", 0.2)
    monkeypatch.setattr(guard, "CLEAN_UP_SECONDS", 10**6)
    guard.kill_marked(MARK, str(tmp_path))
    assert victim.poll() is None


def test_the_table_of_this_machine_is_read(victim: subprocess.Popen[bytes]) -> None:
    mark = f"PD_MARK=one-{os.getpid()}"
    with subprocess.Popen(["sleep", "100"], env={"PD_MARK": mark.partition("=")[2]}) as marked:
        guard.kill_marked(mark)
        assert marked.wait(10) == -signal.SIGKILL
    assert victim.poll() is None
