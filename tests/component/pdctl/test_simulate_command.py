"""`pdctl simulate`: a small trace gives exactly this table; files, pictures and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.shell.app import app

TRACE = """\
{"session_id": "talk", "timestamp": 0, "input_length": 2000, "output_length": 48}
{"session_id": "talk", "delay": 90000, "input_length": 2500, "output_length": 60, "tool": true}
{"session_id": "talk", "delay": 5000, "input_length": 3000, "output_length": 72}
{"timestamp": 10000, "input_length": 1000, "output_length": 24}
{"timestamp": 60000, "input_length": 1000, "output_length": 24}
"""
# Worked out by hand: 256 blocks of 16; the talk's turns have 128, 160 and 192 blocks, the other two 64 each.
GOLDEN = """\
5 turns of 3 clients in 110 s; keeping every conversation takes 2,188 tokens of KV

0.53 Pinned 480 s | 3 | 100.0 % | 100.0 % | 10.19 | 74.1 % | 1 | 16.0 s
0.53 Pinned 60 s | 5 | 50.0 % | 55.6 % | 6.01 | 54.7 % | 0 | 0.0 s
0.53 Leased | 5 | 100.0 % | 100.0 % | 2.64 | 43.2 % | 0 | 0.0 s
0.53 Unpinned | 5 | 100.0 % | 100.0 % | 0.00 | 0.0 % | 0 | 0.0 s
"""
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(TRACE)
    return file


def test_a_small_trace_gives_this_table(trace: Path) -> None:
    code, out, _ = run("--trace", str(trace), "--pool-tokens", "4096", "--decode-speed", "12")
    assert code == 0
    head, lines = GOLDEN.strip().split("\n\n")
    said, _, table = out.partition("\n\n")
    assert said == head
    columns, _rule, *rows = table.splitlines()
    assert columns.startswith("| pressure | retention | turns done | turns that read | tokens read back |")
    assert [row.replace("| ", "", 1).replace(" | ", " ", 1).removesuffix(" |") for row in rows] == lines.splitlines()


def test_everything_is_written_and_the_same_again(tmp_path: Path) -> None:
    arguments = ["--clients", "8", "--hours", "0.5", "--pressure", "1", "--pressure", "2", "--max-context", "20000"]
    for name in ("one", "two"):
        assert run(*arguments, "--out", str(tmp_path / name))[0] == 0
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert sorted(one) == ["retention.json", "retention.md", "retention.png"]
    assert one == two
    assert one["retention.png"].startswith(PNG)
    content = json.loads(one["retention.json"])
    assert [(cell["pressure"], cell["retention"]) for cell in content["runs"]] == [
        (pressure, mode) for pressure in (1, 2) for mode in ("Pinned 480 s", "Pinned 60 s", "Leased", "Unpinned")
    ]
    for cell in content["runs"]:
        assert cell["pool_tokens"] == pytest.approx(content["working_set_tokens"] / cell["pressure"], rel=0.01)
        assert (cell["held_block_seconds"] == 0) == (cell["retention"] == "Unpinned")


def test_the_made_up_turns_can_be_written_and_played_again(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    size = ["--pool-tokens", "200000"]
    _, made, _ = run("--clients", "4", "--hours", "0.3", "--json", "--write-trace", str(file), *size)
    _, again, _ = run("--trace", str(file), "--json", *size)
    first, second = (json.loads(text) for text in (made, again))
    assert first["turns"] == second["turns"] > 20
    for one, other in zip(first["runs"], second["runs"], strict=True):
        # Times are rounded to milliseconds in the file, and its time ends with the last answer.
        assert one["token_hit_rate"] == pytest.approx(other["token_hit_rate"], abs=0.02)


def test_modes_are_as_asked(trace: Path) -> None:
    code, out, _ = run("--trace", str(trace), "--pool-tokens", "9999", "--json", "--ttl", "120")
    assert code == 0
    assert [cell["retention"] for cell in json.loads(out)["runs"]] == ["Pinned 120 s", "Leased", "Unpinned"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "none.jsonl"], "none.jsonl: cannot be read: No such file or directory"),
        (["--clients", "1", "--hours", "0.1", "--pressure", "50"], "use more clients or less pressure"),
        (["--clients", "1", "--hours", "0.1", "--pressure", "-1"], "--pressure must be over 0"),
        (["--clients", "1", "--hours", "0.1", "--pool-tokens", "160"], "the pool has 10"),
        (["--clients", "10000", "--hours", "240"], "that would be up to 288,000,000 turns; at most 3,000,000"),
        (["--clients", "1", "--hours", "0.1", "--out", "/proc/none"], "/proc/none: cannot be written to"),
        (["--clients", "1", "--hours", "0.1", "--write-trace", "/proc/none"], "/proc/none: cannot be written"),
    ],
    ids=["no-file", "too-much", "negative", "small-pool", "too-long", "no-folder", "no-trace"],
)
def test_what_cannot_be_done_is_said(arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pdctl simulate: ")
    assert says in err


def test_a_line_that_is_no_turn_is_named_with_its_file(trace: Path) -> None:
    trace.write_text(TRACE + "{}\n")
    code, _, err = run("--trace", str(trace))
    assert code == 2
    assert err == f"pdctl simulate: {trace}: line 6: input_length must be a whole number of tokens, at least 1\n"


@pytest.mark.parametrize(
    "option", ["--hours", "--decode-speed", "--ttl", "--pressure", "--singles-per-minute", "--lease"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_refused(option: str, value: str) -> None:
    code, out, err = run("--clients", "1", "--hours", "0.1", option, value)
    assert (code, out) == (2, "")
    assert option in err
