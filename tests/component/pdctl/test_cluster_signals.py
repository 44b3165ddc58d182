"""Signals to programs that start something: each is told in a line, and cleaning up runs to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.core.cluster.binaries import BINARIES
from pdctl.shell.cluster.places import cache_folder
from support.clusters import eventually

STARTS = """
import signal, sys, time, typer
from pdctl.shell.cluster import signals
from pdctl.shell.cluster.signals import uninterrupted
signals.PATIENCE_SECONDS = 0  # so that each signal would count by itself
from pdctl.shell.cluster.told import ToldGroup
app = typer.Typer(cls=ToldGroup)
@app.command()
def one():
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        with uninterrupted():
            print("cleaning", flush=True)
            print("was told", sys.stdin.readline().strip(), flush=True)
        print("clean", flush=True)
@app.command()
def other(): pass
app()
"""
BUILDS = """
from pdctl.shell.cluster.build import build_programs
from pdctl.shell.cluster.signals import Interrupting
with Interrupting(): build_programs(print)
"""
GO = """#!/bin/sh
sleep 600 &
echo $$ $! > {pids}.new; mv {pids}.new {pids}
wait
"""


def python(code: str, *arguments: str, **more: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **(pipes | more))  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("later", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_cleans_up_changes_nothing(first: signal.Signals, later: signal.Signals) -> None:
    with python(STARTS, "one") as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == "started\n"
        program.send_signal(first)
        assert program.stdout.readline() == "cleaning\n"
        program.send_signal(later)
        program.stdin.write("to go on\n")
        program.stdin.flush()
        assert program.stdout.read() == f"was told to go on\nclean\npdctl: ended by {first.name}\n"
    assert program.returncode == 128 + first


def test_a_signal_that_comes_while_it_cleans_up_counts_afterwards() -> None:
    code = """
import signal
from pdctl.shell.cluster.signals import Interrupted, Interrupting, uninterrupted
try:
    with Interrupting(), uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        print("clean")
except Interrupted as interrupted:
    print(interrupted)
"""
    with python(code) as program:
        assert program.communicate()[0] == "clean\nSIGTERM\n"


def test_a_signal_that_something_has_swallowed_can_be_repeated() -> None:
    code = """
import signal
from pdctl.shell.cluster import signals
signals.PATIENCE_SECONDS = 0
with signals.Interrupting():
    for _ in range(2):
        try:
            signal.raise_signal(signal.SIGTERM)
        except signals.Interrupted as interrupted:
            print(interrupted)
"""
    with python(code) as program:
        assert program.communicate()[0] == "SIGTERM\nSIGTERM\n"


def test_what_is_ignored_at_the_start_stays_ignored() -> None:
    with python(f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{STARTS}", "one") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate("on\n")
    assert output.endswith("ended by SIGTERM\n")


def test_ctrl_c_while_the_commands_are_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)\n"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    argv = [sys.executable, "-m", "pdctl", "cluster", "list"]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pdctl: ended by SIGINT\n")


def test_an_interrupted_build_takes_its_compilers_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    go, pids = tmp_path / "tools" / "go", tmp_path / "pids"
    go.parent.mkdir()
    go.write_text(GO.format(pids=pids))
    go.chmod(0o755)
    abandoned = cache_folder() / "parts" / "some-1" / ".building-x" / "half"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_text("half")
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    with python(BUILDS) as program:
        eventually("compiling", pids.exists)
        program.send_signal(signal.SIGTERM)
        output, _ = program.communicate()
    assert f"1 of {len(BINARIES)}: building" in output
    eventually("the compiler has gone", lambda: not [pid for pid in pids.read_text().split() if is_running(pid)])
    assert [path for path in cache_folder().rglob("*") if path.is_file()] == [cache_folder() / "lock"]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
