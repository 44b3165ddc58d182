"""The figures in docs/retention.md are what the commands above them print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.core.kv_trace import parse_trace
from pdctl.shell.app import app

PAGE = (Path(__file__).parents[3] / "docs" / "retention.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```\n\.venv/bin/pdctl (simulate .*)\n```\n\n((?:^\|.*\n)+)", PAGE, re.M)


def test_there_are_two_tables() -> None:
    assert len(SHOWN) == 2


@pytest.mark.parametrize(("command", "table"), SHOWN, ids=["conversations", "single-turns"])
def test_a_table_is_what_its_command_prints(command: str, table: str, tmp_path: Path) -> None:
    arguments = command.replace("out/retention", str(tmp_path)).split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.partition("\n\n")[2] == table


def test_the_picture_that_it_shows_is_there() -> None:
    for image in re.findall(r"!\[.*\]\((.*)\)", PAGE):
        assert (Path(__file__).parents[3] / "docs" / image).read_bytes().startswith(b"\x89PNG")
    assert "![" in PAGE


def test_the_trace_that_it_shows_is_one() -> None:
    [shown] = re.findall(r"^```\n(\{.*?)^```", PAGE, re.M | re.S)
    [turns] = parse_trace(shown.splitlines())
    assert [turn.after_tool for turn in turns] == [False, True, False]


def test_the_command_for_that_trace_plays_it(tmp_path: Path) -> None:
    [shown] = re.findall(r"^```\n(\{.*?)^```", PAGE, re.M | re.S)
    [command] = re.findall(r"^\.venv/bin/pdctl (simulate --trace .*)$", PAGE, re.M)
    file = tmp_path / "trace.jsonl"
    file.write_text(shown)
    result = CliRunner().invoke(app, command.replace("trace.jsonl", str(file)).split())
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("3 turns of 1 clients")
