"""The log's two shapes, and which of a turn's facts are logged."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_router.core.observe import Logging
from pd_router.shell import logs

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def request_id() -> Iterator[str]:
    token = logs.current.set(("req-1", "0af7"))
    yield "req-1"
    logs.current.reset(token)


FIELDS = {
    "request_id": "req-1", "api": "chat.completions", "status": 200, "model": "m" * 500, "stream": True, "attempts": 1,
    "retries": [], "attached": False, "reason": "not_found", "total_ms": 1.5, "prompt_tokens": None,
    "handle": "never logged", "rejected": [["a", "b"]],
}  # fmt: skip


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_turn_in_json(capsys: pytest.CaptureFixture[str], request_id: str) -> None:
    logs.configure(Logging())
    logs.log_turn(FIELDS)
    [line] = lines(capsys)
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "info", "logger": "pd_router.turns", "message": "turn", "request_id": request_id, "trace_id": "0af7",
        "api": "chat.completions", "status": 200, "model": "m" * 128, "stream": True, "attempts": 1, "attached": False,
        "reason": "not_found", "total_ms": 1.5,
    }  # fmt: skip


def test_a_turn_in_text(capsys: pytest.CaptureFixture[str], request_id: str) -> None:
    logs.configure(Logging(format="text"))
    logs.log_turn({**FIELDS, "model": 'a "b"\n2026 ERROR', "retries": ["prefill: timeout"]})
    [line] = lines(capsys)
    assert re.match(r"\S+Z INFO pd_router\.turns turn request_id=req-1 trace_id=0af7 api=chat\.completions ", line)
    assert 'model="a \\"b\\"\\n2026 ERROR"' in line
    assert "total_ms=1.5" in line


def test_a_line_end_in_a_message_begins_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    for shape in ("text", "json"):
        logs.configure(Logging(format=shape))
        logging.getLogger("pd_router").warning("path %s", "/x\n2026-01-01T00:00:00.000Z INFO forged")
        [line] = lines(capsys)
        assert "\\n2026" in line


@pytest.mark.parametrize("shape", ["json", "text"])
def test_words_that_are_no_unicode(capsys: pytest.CaptureFixture[str], shape: str) -> None:
    logs.configure(Logging(format=shape))
    logs.log_turn({**FIELDS, "model": "\ud800x"})
    [line] = lines(capsys)
    assert "\\ud800x" in line


def test_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logging())
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("pd_router").exception("failed")
    [line] = lines(capsys)
    assert "ValueError: odd" in json.loads(line)["exception"]
    assert "request_id" not in json.loads(line)


def test_turns_are_of_level_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logging(level="warning"))
    logs.log_turn(FIELDS)
    assert lines(capsys) == []


@pytest.mark.parametrize("worker", [0, 3])
def test_a_worker_says_which_one_it_is(capsys: pytest.CaptureFixture[str], worker: int) -> None:
    logs.configure(Logging(), worker)
    logs.log_turn(FIELDS)
    logs.configure(Logging(format="text"), worker)
    logs.log_turn(FIELDS)
    as_json, as_text = lines(capsys)
    assert json.loads(as_json)["worker"] == worker
    assert f" worker={worker}" in as_text


def test_the_keys_are_documented() -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    part = text.partition("## Log")[2].partition("\n## ")[0]
    listed: Any = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.MULTILINE))
    assert listed == {**logs.LINE_KEYS, **logs.TURN_KEYS}


def test_another_handler_gets_a_record_of_the_turn(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    other = logging.Handler()
    other.emit = seen.append  # type: ignore[method-assign]
    logs.configure(Logging())
    logging.getLogger().addHandler(other)
    try:
        logs.log_turn(FIELDS)
    finally:
        logging.getLogger().removeHandler(other)
    [line] = lines(capsys)
    assert json.loads(line)["status"] == seen[0].turn["status"] == 200


def test_a_turn_that_cannot_be_written_ends_like_any_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logging())
    with open("/dev/full", "w", encoding="utf-8") as full:
        [handler] = logging.getLogger().handlers
        handler.stream = full  # type: ignore[attr-defined]
        logs.log_turn(FIELDS)
        with contextlib.suppress(OSError):
            full.close()
    assert "No space left on device" in capsys.readouterr().err
