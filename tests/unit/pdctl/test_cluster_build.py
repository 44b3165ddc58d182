"""Building into the cache: once, atomically, never twice at the same time. `go` is a script here."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pdctl.core.cluster.binaries import BINARIES
from pdctl.shell.cluster.build import build_programs, missing_programs, programs_folder
from pdctl.shell.cluster.places import ClusterError, cache_folder

NAMES = [binary.name for binary in BINARIES]
GO = """#!/bin/sh
echo "$PWD $*" >> {calls}
while [ "$1" != -o ]; do shift; done
{action}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a `go` that notes how it was called and writes a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    install_go(tmp_path, 'echo program > "$2"')
    return tmp_path / "calls"


def install_go(folder: Path, action: str) -> None:
    tool = folder / "tools" / "go"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(GO.format(calls=folder / "calls", action=action))
    tool.chmod(0o755)


def built(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_everything_is_built_once_with_progress(calls: Path):
    lines: list[str] = []
    assert missing_programs() == NAMES
    folder = build_programs(lines.append, jobs=1)
    assert folder == programs_folder()
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert built(calls) == len(NAMES)
    assert [line.split(":")[0] for line in lines[::2]] == [f"{n} of {len(NAMES)}" for n in range(1, len(NAMES) + 1)]
    assert all(" -trimpath " in line and " -p 1 " in line for line in calls.read_text().splitlines())
    assert build_programs(lines.append) == folder
    assert built(calls) == len(NAMES)


def test_a_missing_link_costs_no_build(calls: Path):
    folder = build_programs(lambda _: None)
    (folder / "etcd").unlink()
    build_programs(lambda _: None)
    assert (folder / "etcd").exists()
    assert built(calls) == len(NAMES)


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing_half(calls: Path, tmp_path: Path):
    install_go(tmp_path, 'echo half > "$2"; echo "no such package" >&2; exit 1')
    with pytest.raises(ClusterError, match=r"(?s)pause can't be built:\nno such package") as failed:
        build_programs(lambda _: None)
    # Nothing speaks for an old Go here.
    assert "1.26.8" not in str(failed.value)
    assert missing_programs() == NAMES
    assert [path for path in cache_folder().rglob("*") if path.is_file()] == [cache_folder() / "lock"]


def test_an_old_go_is_told_as_such(calls: Path, tmp_path: Path):
    install_go(tmp_path, 'echo "go: go.mod requires go >= 1.26.8 (running go 1.19)" >&2; exit 1')
    with pytest.raises(ClusterError, match=r"(?s)running go 1\.19\)\nGo 1\.26\.8 or newer is needed"):
        build_programs(lambda _: None)


def test_without_go_it_says_where_to_get_it(calls: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="no `go` on the PATH, and pause isn't built yet"):
        build_programs(lambda _: None)


def test_builders_at_the_same_time_share_the_work(calls: Path):
    problems: list[BaseException] = []

    def run() -> None:
        try:
            build_programs(lambda _: None)
        except BaseException as error:  # noqa: BLE001 - a thread's failure must reach the test
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (problems, built(calls), missing_programs()) == ([], len(NAMES), [])
