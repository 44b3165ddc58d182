"""What the self-test leaves for the operator, and when it leaves nothing."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from pd_connector import compat, selftest
from pd_connector.core.verdicts import Check

GOOD, BAD = Check("NIXL", "nixl 1.1.0"), Check("NIXL", fault="can't be imported")


def run(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> int:
    """The command with these results."""
    monkeypatch.setattr(selftest, "run", lambda *_: iter(checks))
    return selftest.main([])


def test_versions_are_written_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = tmp_path / "report"
    monkeypatch.setenv("PD_SELF_TEST_REPORT", str(report))
    assert run(monkeypatch, GOOD) == 0
    assert json.loads(report.read_text()) == {"vllm": compat.installed_version(), "nixl": metadata.version("nixl")}


def test_a_failed_self_test_leaves_its_last_lines_to_speak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    monkeypatch.setenv("PD_SELF_TEST_REPORT", str(report))
    assert run(monkeypatch, GOOD, BAD) == 1
    assert not report.exists()
    assert "can't be imported" in capsys.readouterr().out


def test_outside_a_pod_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PD_SELF_TEST_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, GOOD) == 0
    assert list(tmp_path.iterdir()) == []
