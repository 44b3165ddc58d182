"""What an answer said: the reply as its client holds it, the ending marks, the usage. Read once, when it is over.

Separate from `sse` because nothing here is on the way of a byte to the client. A stream of tokens is the same
envelope again and again around a few letters; `_merge_tokens` joins such neighbours as text before anything is
parsed, which makes reading a long stream cost little more than reading one event.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from pd_router.core.cutting import data_lines, is_error
from pd_router.core.history import Reply, make_reply

_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_DONE_EVENT: Final = b"data: [DONE]\n\n"
_MARKERS: Final = (b'"delta":{"content":"', b'"delta":{"reasoning":"', b'"delta":{"reasoning_content":"', b'"text":"')
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"')
_CONTENT_FIELDS: Final = (
    "content",
    "tool_calls",
    "reasoning",
    "reasoning_content",
    "refusal",
    "function_call",
    "audio",
)


@dataclass(slots=True)
class Transcript:
    """The facts of one answer, streamed or not. `finished`: every choice that was seen has its finish reason."""

    id: str = ""
    done: bool = False
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    finish_reasons: tuple[str, ...] = ()
    finished: bool = False
    several: bool = False
    """More than one choice: no single reply."""
    legacy: bool = False
    """A function call in the form before tool calls; not linked."""
    chat: bool = False
    role: str = "assistant"
    stop_reason: Any = None
    content: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    reasoning: bool = False
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def reply(self) -> Reply | None:
        """The assistant message, or None where there is no single chat reply."""
        if not self.chat or self.several or self.legacy or not self.finished:
            return None
        message: dict[str, Any] = {"role": self.role, "content": "".join(self.content)}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.reasoning:
            message["reasoning"] = True
        return make_reply(message, self.finish_reasons[-1], self.stop_reason)


def read(stream: bytes) -> Transcript:
    """Read the events of a whole stream; what is not JSON is skipped. Never raises."""
    out = Transcript()
    finishes: dict[int, str] = {}
    for event in _parse_stream(_merge_tokens(stream), out):
        if not isinstance(event, dict):
            continue
        if is_error(event) and out.error is None:
            out.error = error_of(event)
        if isinstance(event.get("usage"), dict):
            out.usage = event["usage"]
        if not out.id and isinstance(event.get("id"), str):
            out.id = event["id"]
        for choice in _choices(event):
            _read_choice(out, choice, choice.get("delta"), finishes)
    _close(out, finishes)
    return out


def parse_answer(body: bytes) -> Transcript:
    """Read a whole JSON answer; a body that is not JSON gives an unfinished transcript. Never raises."""
    out = Transcript(done=True)
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return out
    if not isinstance(answer, dict):
        return out
    if is_error(answer):
        out.error = error_of(answer)
    if isinstance(answer.get("usage"), dict):
        out.usage = answer["usage"]
    if isinstance(answer.get("id"), str):
        out.id = answer["id"]
    finishes: dict[int, str] = {}
    for choice in _choices(answer):
        _read_choice(out, choice, choice.get("message"), finishes)
    _close(out, finishes)
    return out


def parse_events(events: bytes) -> list[Any]:
    """The JSON values of a run of whole events; comments, [DONE] and unreadable ones are left out."""
    out: list[Any] = []
    payload: list[bytes] = []
    for line in (*events.splitlines(), b""):
        if line:
            if line.startswith(b"data:"):
                payload.append(line[5:])
            continue
        if payload:
            with suppress(orjson.JSONDecodeError):
                out.append(orjson.loads(b"\n".join(payload)))
            payload = []
    return out


def error_of(event: Any) -> dict[str, Any] | None:
    """The error object of an error event, or None."""
    if not is_error(event):
        return None
    inner = event.get("error")
    return inner if isinstance(inner, dict) else {"message": str(inner or event.get("message", ""))}


def bears_content(event: Any) -> bool:
    """Whether a client would see something happen: text, reasoning, a call, or the end."""
    if not isinstance(event, dict):
        return False
    for choice in _choices(event):
        if choice.get("finish_reason") or choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT_FIELDS):
            return True
    return False


def _merge_tokens(stream: bytes) -> bytes:
    """Join neighbouring events that differ in the letters of one string only. The result says the same."""
    for marker in _MARKERS:
        at = stream.find(marker)
        if at < 0:
            continue
        letters = at + len(marker)
        closing = _REST_OF_STRING.match(stream, letters)
        end = stream.find(b"\n\n", letters)
        if closing is None or not letters < closing.end() <= end:
            continue
        start = stream.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in stream[:at] else 0
        # An empty line cannot occur inside an event, so this joint is never part of a text.
        stream = stream.replace(stream[closing.end() - 1 : end + 2] + stream[start:letters], b"")
    return stream


def _parse_stream(stream: bytes, out: Transcript) -> list[Any]:
    if stream.endswith(_DONE_EVENT):
        out.done = True
        stream = stream[: -len(_DONE_EVENT)]
    if stream.startswith(_DATA) and stream.endswith(b"\n\n"):
        try:
            events: list[Any] = orjson.loads(b"[" + stream[len(_DATA) : -2].replace(b"\n\ndata: ", b",") + b"]")
            return events
        except orjson.JSONDecodeError:
            pass
    if not out.done:
        out.done = _says_done(stream)
    return parse_events(stream)


def _says_done(stream: bytes) -> bool:
    return _DONE in stream and any(stream[start:end].strip() == _DONE for start, end in data_lines(stream))


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _read_choice(out: Transcript, choice: dict[str, Any], message: Any, finishes: dict[int, str]) -> None:
    index = choice.get("index")
    index = index if isinstance(index, int) else 0
    out.several = out.several or index != 0
    reason = choice.get("finish_reason")
    finishes.setdefault(index, "")
    if isinstance(reason, str):
        finishes[index] = reason
        out.stop_reason = choice.get("stop_reason")
    if not isinstance(message, dict):
        return
    out.chat = True
    content = message.get("content")
    if isinstance(content, str):
        out.content.append(content)
    if isinstance(message.get("role"), str):
        out.role = message["role"]
    if message.get("reasoning") or message.get("reasoning_content"):
        out.reasoning = True
    if isinstance(message.get("refusal"), str):
        out.refusal.append(message["refusal"])
    if message.get("function_call"):
        out.legacy = True
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for place, call in enumerate(calls):
            if isinstance(call, dict):
                _read_call(out.calls, call, place)


def _read_call(calls: dict[int, dict[str, Any]], call: dict[str, Any], place: int) -> None:
    """Add a whole call, or the fragment of one that a stream delivers under its index."""
    index = call.get("index")
    known = calls.setdefault(index if isinstance(index, int) else place, {"function": {"name": "", "arguments": ""}})
    for name in ("id", "type"):
        if call.get(name):
            known[name] = call[name]
    function = call.get("function")
    if isinstance(function, dict):
        for name in ("name", "arguments"):
            if isinstance(function.get(name), str):
                known["function"][name] += function[name]


def _close(out: Transcript, finishes: dict[int, str]) -> None:
    out.finish_reasons = tuple(reason for reason in finishes.values() if reason)
    out.finished = bool(finishes) and all(finishes.values())
