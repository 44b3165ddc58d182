"""A key that `pdctl key make` makes is one that the router takes for its tenant."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_router.core.auth import parse_keys
from pdctl.shell.app import app


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["key", "make", *words])
    return result.exit_code, result.stdout, result.stderr


def test_the_key_and_its_line() -> None:
    code, key, line = run("team-a")
    assert code == 0
    assert key.startswith("sk-pd-")
    assert len(key.strip()) > 40
    assert parse_keys(line).tenant(key.strip()) == "team-a"
    assert key.strip() not in line
    assert run("team-a")[1] != key


@pytest.mark.parametrize("there", [None, "", "# keys\n", "old:" + "0" * 64])
def test_it_is_added_to_a_file(tmp_path: Path, there: str | None) -> None:
    path = tmp_path / "keys"
    if there is not None:
        path.write_text(there)
    keys = [run(name, "--append", str(path)) for name in ("team-a", "team-b")]
    table = parse_keys(path.read_text())
    assert [table.tenant(key.strip()) for _, key, _ in keys] == ["team-a", "team-b"]
    assert len(table) == (3 if there and there.startswith("old") else 2)
    assert [error for _, _, error in keys] == ["", ""]


@pytest.mark.parametrize("name", ["", "a b", "a:b", "n" * 65, "-a", "ü"])
def test_names_that_the_file_cannot_hold(name: str) -> None:
    code, key, error = run("--", name)
    assert (code, key) == (2, "")
    assert error.startswith("NAME:")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    code, key, error = run("team-a", "--append", str(tmp_path / "no" / "file"))
    assert (code, key) == (2, "")
    assert "--append" in error
