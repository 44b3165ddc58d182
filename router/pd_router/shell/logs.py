"""How the log looks: JSON lines or text, the id of the request in each line, and the line that a turn leaves.

Separate from the record of a turn because the keys here are read by other people's programs: they are listed once, with
their meaning, and do not change. A turn's line is chosen from its record by that list, so that a new field of the
record is not logged by accident; prompts, handles and keys are in neither.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, TextIO

import orjson

from pd_router.core.observe import Logging

TURN_KEYS: Final[Mapping[str, str]] = {
    "api": "`chat.completions`, `completions`, …",
    "status": "what the client got; 499: it left before its answer",
    "model": "as the client named it, at most 128 characters",
    "stream": "whether it asked for a stream",
    "attempts": "how often the turn was begun",
    "retries": "what failed before, as `leg: reason`",
    "prefill": "engine of the last prefill leg",
    "decode": "engine of the last decode leg",
    "queue_ms": "waiting for admission",
    "prefill_ms": "prefill leg, request to answer",
    "handoff_ms": "from prefill's answer to the head of decode's",
    "first_token_ms": "from there to the first content; of an answer that is not streamed, to its end",
    "ttft_ms": "from the request's arrival to the first content",
    "total_ms": "from the request's arrival to the end of the answer",
    "prompt_tokens": "as prefill counts them",
    "cached_tokens": "of these, not computed by prefill: read back, or in its own cache",
    "attached": "whether a handle went to prefill",
    "linked_by": "what linked the turn to the one before: `history`, or the name of an id",
    "reason": "why the KV was not reused",
    "verdict": "what prefill's proof said of the handle",
    "proven_tokens": "tokens that the proof confirmed",
    "pulled_tokens": "tokens that prefill read back from decode",
    "local_tokens": "tokens that prefill had itself",
    "handle_lost": "the leg on which a handle was spent for nothing",
    "ending": "how decode's answer ended",
    "stored": "what became of the handle that decode returned",
    "not_stored": "why there is none for a next turn",
    "lease_seconds": "for how long decode promised to keep the turn's blocks",
    "lease_kept": "by which right that is prolonged: `hold N s`, the client's wish; `tools N s`, it is to run tools",
    "conversation": "`ended`, by the client",
    "client_left": "where the turn was when the client left",
    "engine_status": "status of an engine that refused or failed",
}
"""Keys of the line about a turn, besides those of every line. A key that does not apply is left out."""

LINE_KEYS: Final[Mapping[str, str]] = {
    "time": "UTC, in milliseconds",
    "level": "`debug`, `info`, `warning` or `error`",
    "logger": "part of the router; `pd_router.turns` for the line about a turn",
    "message": "a sentence; `turn` for that line",
    "request_id": "the client's `X-Request-Id`, or the router's own; the same is sent to both engines and back",
    "trace_id": "of the turn's trace, when it is traced",
    "worker": "number of the process, from 0, of a router with several",
    "exception": "a stack trace",
}
"""Keys of every line."""

LONGEST_VALUE: Final = 128
NO_REQUEST: Final = ("", "")

current: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("request", default=NO_REQUEST)
"""Request id and trace id of the task that logs."""

_turns = logging.getLogger("pd_router.turns")


def log_turn(fields: Mapping[str, Any]) -> None:
    """Write the line about a turn that is over."""
    if _turns.isEnabledFor(logging.INFO):
        get = fields.get
        # What is empty does not apply; False and 0 do.
        chosen = {key: value for key in TURN_KEYS if (value := get(key)) or value == 0}
        if len(model := str(chosen.get("model", ""))) > LONGEST_VALUE:
            chosen["model"] = model[:LONGEST_VALUE]
        handlers = logging.root.handlers
        if len(handlers) == 1 and isinstance(own := handlers[0], _Handler) and own.write_turn(chosen):
            return
        # Made by hand, since `info` would look through the stack for the line that calls it.
        record = logging.LogRecord(_turns.name, logging.INFO, "", 0, "turn", None, None)
        record.turn = chosen
        _turns.handle(record)


def configure(settings: Logging, worker: int | None = None) -> None:
    """Set up the root logger; what was set up before is replaced. `worker`: the process's number, if it is one."""
    # Each would be looked up for every line, and no line shows them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _Handler((JsonLines if settings.format == "json" else TextLines)(worker))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to standard error; a turn's line without a record, which would cost more than the line."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(lines)
        self._lines = lines

    def write_turn(self, chosen: Mapping[str, Any]) -> bool:
        """Whether it was written; a record says what is wrong."""
        line = self._lines.line(time.time(), "info", _turns.name, "turn", chosen) + self.terminator
        self.acquire()
        try:
            self.stream.write(line)
            self.flush()
        except (OSError, ValueError):
            return False
        finally:
            self.release()
        return True


class _Lines(logging.Formatter, ABC):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """One line, or more with a stack trace as text."""
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        turn: Mapping[str, Any] = getattr(record, "turn", {})
        return self.line(record.created, record.levelname.lower(), record.name, record.getMessage(), turn, exception)

    @abstractmethod
    def line(
        self, when: float, level: str, logger: str, message: str, turn: Mapping[str, Any], exception: str = ""
    ) -> str:
        """`when`: seconds since 1970."""

    def _head(self, when: float, level: str, logger: str, message: str) -> dict[str, Any]:
        second = int(when)
        fields: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{int((when - second) * 1e3):03d}Z",
            "level": level,
            "logger": logger,
            "message": message,
        }
        request_id, trace_id = current.get()
        if request_id:
            fields["request_id"] = request_id
        if trace_id:
            fields["trace_id"] = trace_id
        if self._worker is not None:
            fields["worker"] = self._worker
        return fields


class JsonLines(_Lines):
    """One JSON object per line: what log collectors expect."""

    def line(
        self, when: float, level: str, logger: str, message: str, turn: Mapping[str, Any], exception: str = ""
    ) -> str:
        fields = self._head(when, level, logger, message)
        fields |= turn
        if exception:
            fields["exception"] = exception
        try:
            return orjson.dumps(fields, default=str).decode()
        except orjson.JSONEncodeError:
            return _encodable(json.dumps(fields, ensure_ascii=False, default=str))


class TextLines(_Lines):
    """One line per record for people, but for stack traces."""

    def line(
        self, when: float, level: str, logger: str, message: str, turn: Mapping[str, Any], exception: str = ""
    ) -> str:
        fields = self._head(when, level.upper(), logger, message)
        words = [fields.pop("time"), fields.pop("level"), fields.pop("logger"), fields.pop("message")]
        fields |= turn
        # A line end in somebody's words would begin a line that looks like the router's own.
        text = " ".join((*words, *(f"{key}={_word(value)}" for key, value in fields.items())))
        line = _encodable(text).replace("\n", "\\n")
        return f"{line}\n{exception}" if exception else line


def _encodable(line: str) -> str:
    """Half of a surrogate pair can be in a client's JSON and in no file; as an escape it is valid JSON."""
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if text and not set(text) & set(' "=\n') else json.dumps(text, ensure_ascii=False)
