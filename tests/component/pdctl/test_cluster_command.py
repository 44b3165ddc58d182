"""`pdctl cluster` where no cluster runs: help, refusals, and whose cluster is whose. Everything is told in one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.shell.app import app
from pdctl.shell.cluster import command, machine, places
from pdctl.shell.cluster.claims import Claim, owners
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import Interrupted

NAMES = (f"c-{os.getpid()}", f"d-{os.getpid()}")
HOLD = """import sys
from pdctl.shell.cluster.claims import Claim
claim = Claim(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters of which a folder is left, and none of this machine's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in NAMES:
        (tmp_path / "state" / "pd-operator" / "cluster" / name).mkdir(parents=True)
    monkeypatch.setattr(command, "known_clusters", lambda: list(NAMES))


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[str]]:
    """Has a claim to the first cluster."""
    argv = [sys.executable, "-c", HOLD, NAMES[0]]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def pdctl(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cluster", *arguments])
    return result.exit_code, result.output


def left() -> list[str]:
    return [name for name in NAMES if (Path(os.environ["XDG_STATE_HOME"]) / "pd-operator" / "cluster" / name).exists()]


def test_one_name_and_all_is_a_contradiction() -> None:
    code, output = pdctl("down", "--name", NAMES[0], "--all")
    assert code == 2
    assert "--name names one cluster and --all means every one" in " ".join(output.replace("│", " ").split())
    assert left() == list(NAMES)


def test_all_are_listed_and_ended() -> None:
    code, output = pdctl("down", "--all")
    assert code == 0
    assert [line for line in output.splitlines() if "broken" in line and NAMES[1] in line]
    assert f"cluster {NAMES[1]} is down, nothing is left" in output
    assert left() == []


@pytest.mark.parametrize("which", [("--all",), ("--name", NAMES[0])], ids=["all", "by-name"])
def test_what_a_running_process_uses_is_ended_only_when_that_is_confirmed(
    other_process: subprocess.Popen[str], which: tuple[str, ...]
) -> None:
    code, output = pdctl("down", *which)
    assert code == 1
    assert f"in use: {NAMES[0]} by process {other_process.pid} (" in output
    assert "add --yes" in output
    assert left() == list(NAMES)
    assert f"used by process {other_process.pid}" in pdctl("list")[1]
    assert pdctl("down", "--yes", *which)[0] == 0
    assert NAMES[0] not in left()


def test_a_claim_is_one_processs_and_ends_with_it(other_process: subprocess.Popen[str]) -> None:
    assert owners()[NAMES[0]] == other_process.pid
    with pytest.raises(ClusterError, match=rf"{NAMES[0]} is in use by process {other_process.pid} "):
        Claim(NAMES[0])
    other_process.kill()
    other_process.wait()
    claim = Claim(NAMES[0])
    assert owners()[NAMES[0]] == os.getpid()
    claim.release()
    assert NAMES[0] not in owners()


@pytest.mark.parametrize("name", ["kubectl", "helm", "exec"])
def test_help_needs_no_cluster(name: str) -> None:
    code, output = pdctl(name, "--help")
    assert code == 0
    assert "--name" in output
    assert "no cluster" not in output


@pytest.mark.parametrize("arguments", [("get", "--help"), ("--kubeconfig", "x", "get")])
def test_what_stands_behind_is_the_programs_own(arguments: tuple[str, ...]) -> None:
    code, output = pdctl("kubectl", "--name", NAMES[0], *arguments)
    assert code == 1
    assert output.startswith(f"pdctl: no cluster {NAMES[0]} is up")


@pytest.mark.parametrize("arguments", [("list",), ("status",), ("down",), ("build",), ("up",), ("demo",)])
def test_an_empty_home_is_told_as_such(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setenv("HOME", "")
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    more = ("--out", str(tmp_path / "out")) if arguments == ("demo",) else ()
    code, output = pdctl(*arguments, *more)
    assert code in (1, 2)
    assert output.splitlines() == [
        f"{'' if more else 'pdctl: '}HOME is empty; set it to a folder that can be written to, or unset it"
    ]


@pytest.mark.parametrize("arguments", [("build",), ("pack-images", "/dev/null/archive")])
def test_a_home_that_cannot_be_written_to_is_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null/home")
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    code, output = pdctl(*arguments)
    assert code == 1
    assert "/dev/null" in output
    assert "Not a directory" in output
    assert len(output.splitlines()) == 1
    assert machine.try_state_folder().endswith("can't be written to: Not a directory")


def test_a_signal_that_comes_too_late_for_a_start_is_told_with_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_self: object) -> None:
        monkeypatch.setattr(command.EmbeddedCluster, "is_up", True)
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(command.EmbeddedCluster, "up", late)
    code, output = pdctl("up", "--name", NAMES[0])
    assert code == 130
    assert f"cluster {NAMES[0]} is up; to end it: pdctl cluster down --name {NAMES[0]}" in output


def test_a_state_folder_that_is_full_is_told_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.try_state_folder() == ""
    monkeypatch.setattr(machine, "STATE_BYTES", 10**18)
    assert "MB of free space, and 1000000000000 MB are needed" in machine.try_state_folder()


def test_clusters_start_while_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that ends takes the folder along in which the next one begins."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    over = threading.Event()

    def start_and_end_another() -> None:
        while not over.is_set():
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                places.state_folder().mkdir(parents=True)
            for folder in (places.state_folder(), places.state_folder().parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    other = threading.Thread(target=start_and_end_another)
    other.start()
    try:
        for number in range(500):
            assert machine.try_state_folder() == ""
            layout = places.layout_of(f"one-{number}")
            places.make_state(layout)
            with pytest.raises(FileExistsError):
                places.make_state(layout)
            layout.state.rmdir()
    finally:
        over.set()
        other.join()


def test_looking_at_the_state_folder_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    assert machine.try_state_folder() == ""
    assert list((tmp_path / "empty").iterdir()) == []
