"""What clients ask for, as a trace: who sends which turn how long after the last answer. No text, lengths only.

The file has one JSON object per line with the keys of Mooncake's traces as AIPerf and Dynamo replay them (`session_id`,
`timestamp`, `delay`, `input_length`, `output_length`), so that such a file can be used as it is; two keys are ours
(`tool`, `fresh`). A turn never starts before the answer to the one before it has ended: what waits, delays the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_TOKENS: Final = 1 << 30
MAX_MILLISECONDS: Final = 366 * 24 * 3600 * 1000


class TraceError(Exception):
    """A line that is no turn, in one sentence that names the line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer.

    ``wait_s`` passes after the previous answer's end (for the first turn: after the start), and the turn does not come
    before ``not_before_s`` either. ``after_tool``: the previous answer asked for tools, and the wait is theirs.
    ``fresh``: nothing of the previous turn's KV is of use: the history was rewritten, or the conversation is new.
    """

    prompt_tokens: int
    reply_tokens: int
    wait_s: float = 0.0
    not_before_s: float = 0.0
    after_tool: bool = False
    fresh: bool = False

    @property
    def tokens(self) -> int:
        """What D holds when the answer has ended."""
        return self.prompt_tokens + self.reply_tokens


Client = Sequence[Turn]
"""The turns of one `session_id`, each after the one before it; never empty."""


def reusable_tokens(before: Turn | None, turn: Turn) -> int:
    """How many leading tokens of the turn's prompt the previous turn left on D.

    A prompt shorter than the previous one was rewritten; one that is only shorter than prompt and answer together has
    dropped a part of the answer, its reasoning for example.
    """
    if before is None or turn.fresh or turn.prompt_tokens < before.prompt_tokens:
        return 0
    return min(before.tokens, turn.prompt_tokens)


def parse_trace(lines: Iterable[str]) -> list[Client]:
    """Clients in the order of their first lines. Empty lines are passed over.

    Raises:
        TraceError: a line is no turn, or there is none.
    """
    clients: dict[str, list[Turn]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"line {number}: not JSON") from None
        if not isinstance(content, dict):
            raise TraceError(f"line {number}: must be an object")
        try:
            # As in Mooncake's own files: a line without a session is a conversation of one turn.
            name = _name(content, number)
            turn = _turn(content, first=name not in clients)
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
        clients.setdefault(name, []).append(turn)
    if not clients:
        raise TraceError("there is no turn in it")
    return list(clients.values())


def format_trace(clients: Sequence[Client]) -> Iterator[str]:
    """Lines that `parse_trace` reads back, rounded to milliseconds."""
    for number, turns in enumerate(clients):
        for at, turn in enumerate(turns):
            content: dict[str, Any] = {"session_id": str(number)}
            if at == 0 or turn.not_before_s:
                content["timestamp"] = round(turn.not_before_s * 1000)
            if at or turn.wait_s:
                content["delay"] = round(turn.wait_s * 1000)
            content |= {"input_length": turn.prompt_tokens, "output_length": turn.reply_tokens}
            content |= {"tool": True} if turn.after_tool else {}
            content |= {"fresh": True} if turn.fresh and at else {}
            yield json.dumps(content)


def _name(content: dict[str, Any], number: int) -> str:
    name = content.get("session_id", f"line {number}")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError("session_id must be a string or a whole number")
    return str(name)


def _turn(content: dict[str, Any], *, first: bool) -> Turn:
    if not first and "delay" not in content and "timestamp" not in content:
        raise ValueError("needs delay or timestamp, since it is not the first of its session")
    return Turn(
        prompt_tokens=_tokens(content, "input_length"),
        reply_tokens=_tokens(content, "output_length"),
        wait_s=_milliseconds(content, "delay") / 1000,
        not_before_s=_milliseconds(content, "timestamp") / 1000,
        after_tool=_flag(content, "tool"),
        fresh=first or _flag(content, "fresh"),
    )


def _tokens(content: dict[str, Any], key: str) -> int:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{key} must be a whole number of tokens, at least 1")
    return value


def _milliseconds(content: dict[str, Any], key: str) -> float:
    value = content.get(key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_MILLISECONDS:
        raise ValueError(f"{key} must be milliseconds, from 0 to a year")
    return float(value)


def _flag(content: dict[str, Any], key: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false")
    return value
