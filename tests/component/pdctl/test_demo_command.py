"""How the demo ends: figures and pictures with exit code 0, or a clear statement and not 0. The legs are stand-ins."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.core.measurements import Leg, TurnRecord
from pdctl.shell import demo_report
from pdctl.shell.app import app
from pdctl.shell.player import PlayError

ARGUMENTS = ["demo", "--conversations", "1", "--turns", "2", "--longest", "3000"]


def record(leg: Leg, turn: int, pulled: int) -> TurnRecord:
    return TurnRecord(
        leg=leg,
        conversation=1,
        turn=turn,
        request_id=f"{leg}-{turn}",
        prompt_tokens=2000 * turn,
        reply_tokens=64,
        ttft_ms=100.0,
        prefill_ms=80.0 if not pulled else 20.0,
        pulled_tokens=pulled,
        reported_tokens=pulled or None,
        transfer_ms=5.0 if pulled else 0.0,
        ending="length",
    )


@pytest.fixture
def finish(monkeypatch, tmp_path):
    """Runs the command with legs that end in the given way; returns exit code, output and the output folder."""

    def run(pulled: int = 1920, error: Exception | None = None) -> tuple[int, str, Path]:
        class StandIn:
            def __init__(self, *_arguments: object) -> None:
                self.records: list[TurnRecord] = []
                self.decisions: list[dict[str, object]] = []
                self.stages = [("reuse OFF: start", 1.0)]

            def stage(self, _name: str) -> nullcontext[None]:
                return nullcontext()

            def describe(self) -> dict[str, object]:
                return {}

            async def both_legs(self, _model: Path) -> None:
                if error is not None:
                    raise error
                self.records = [record(leg, turn, 0) for leg in Leg for turn in (1, 2)]
                self.records[-1] = record(Leg.ON, 2, pulled)

        monkeypatch.setattr(demo_report, "DemoRun", StandIn)
        monkeypatch.setattr(demo_report, "cached_tiny_model", lambda _say: tmp_path)
        result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path / "out")])
        return result.exit_code, result.output, tmp_path / "out"

    return run


def test_good_figures_give_a_table_pictures_and_records(finish):
    code, output, out = finish()
    assert code == 0
    assert f"raw records: {out / 'records.json'}" in output
    assert "prefill is 4.0 times shorter with reuse (80 ms -> 20 ms)" in output
    assert "P pulled 1,920 tokens from D in 5.0 ms" in output
    assert "total" in output
    for name in ("ttft.png", "prefill.png"):
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
    saved = json.loads((out / "records.json").read_text())
    assert len(saved["records"]) == 4
    assert saved["rows"][1]["prefill_ratio"] == 4.0
    assert saved["faults"] == []


def test_nothing_pulled_is_a_failure_whatever_the_speed(finish):
    code, output, out = finish(pulled=0)
    assert code == 1
    assert "FAILED: 1 faults" in output
    assert "reuse ON, conversation 1, turn 2: P pulled nothing from D" in output
    assert not (out / "ttft.png").exists()
    assert json.loads((out / "records.json").read_text())["faults"]


def test_a_turn_that_fails_is_a_failure(finish):
    code, output, out = finish(error=PlayError("the router answered 500: boom"))
    assert code == 1
    assert json.loads((out / "records.json").read_text())["faults"] == ["the router answered 500: boom"]
    assert "FAILED: the router answered 500: boom" in output
    # Nothing was recorded, and no engine wrote a log.
    assert "raw records" not in output
    assert "logs" not in output


def test_sizes_that_contradict_each_other_are_refused_before_anything_starts(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--longest", "1000", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "don't fit" in result.output
    assert not (tmp_path / "out").exists()


def test_prompts_beyond_the_model_are_refused_before_anything_starts(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--longest", "100000", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "at most 32384 fit" in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(demo_report, "cached_tiny_model", None)
    result = CliRunner().invoke(app, ["demo", "--out", "/proc/x"])
    assert result.exit_code == 2
    assert "/proc/x: cannot be written to: " in result.output


def test_a_model_that_cannot_be_written_is_refused():
    result = CliRunner().invoke(app, ["model", "make", "/proc/x/model"])
    assert result.exit_code == 2
    assert "/proc/x/model: cannot be made: " in result.output
