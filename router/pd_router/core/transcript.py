"""What an answer said: the reply as its client holds it, the ending marks, the usage. Read once, when it is over.

Separate from `sse` because nothing here is on the way of a byte to the client. A stream of tokens is the same
envelope again and again around a few letters; `_merge_tokens` joins such neighbours as text before anything is
parsed, which makes reading a long stream cost little more than reading one event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from pd_router.core.cutting import data_lines, is_error
from pd_router.core.history import Reply, make_reply

_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_DONE_EVENT: Final = b"data: [DONE]\n\n"
_MARKERS: Final = (b'"delta":{"content":"', b'"delta":{"reasoning":"', b'"delta":{"reasoning_content":"', b'"text":"')
_STRING_BODY: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_GAP: Final = b"\n\n"
_RUNS: Final = 4
"""Runs that are merged: reasoning, content, and some that a call interrupts."""
_FEW: Final = 8
_REACH: Final = 4096
"""Bytes of an event in which its letters begin."""
_SMALL: Final = 8192
"""Bytes of a stream that is read as it is."""
_HEAD: Final = 8
"""Events in which the first token of a run is looked for."""
_CALLS: Final = frozenset({"tool_calls", "function_call"})
"""Finish reasons after which the client runs something and comes back."""
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
    items: list[Any] | None = None
    """A response's output, as it came."""

    @property
    def calls_tools(self) -> bool:
        """Whether the client is to run tools and come back with what they say."""
        if self.calls or not _CALLS.isdisjoint(self.finish_reasons):
            return True
        return any(isinstance(item, dict) and item.get("type") == "function_call" for item in self.items or ())

    def reply(self) -> Reply | None:
        """The assistant message, or None where there is no single chat reply."""
        if self.items is not None and self.finished and (self.several or not self.chat):
            # No message that a client could echo has these keys, so the turn is found by its id only.
            return Reply({"role": "assistant", "several": True}, "several messages in the reply", tuple(self.items))
        if not self.chat or self.several or self.legacy or not self.finished:
            return None
        message: dict[str, Any] = {"role": self.role, "content": "".join(self.content)}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.reasoning or _hidden_reasoning(self.usage):
            message["reasoning"] = True
        made = make_reply(message, self.finish_reasons[-1], self.stop_reason)
        return made if self.items is None else Reply(made.message, made.inexact, tuple(self.items))


def read(chunks: Sequence[bytes]) -> Transcript:
    """Read the events of a whole stream, each chunk whole events; what is not JSON is skipped. Never raises."""
    out = Transcript()
    finishes: dict[int, str] = {}
    for event in _parse_stream(_merge_tokens(chunks), out):
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
    if events.startswith(_DATA) and events.find(b"\n") == len(events) - 2:
        with suppress(orjson.JSONDecodeError):
            return [orjson.loads(events[len(_DATA) : -2])]
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


def _hidden_reasoning(usage: dict[str, Any] | None) -> bool:
    details = usage.get("completion_tokens_details") if usage is not None else None
    return isinstance(details, dict) and bool(details.get("reasoning_tokens"))


def error_of(event: Any) -> dict[str, Any] | None:
    """The error object of an error event, or None."""
    if not is_error(event):
        return None
    failed = event.get("response")
    inner = event.get("error") or (failed.get("error") if isinstance(failed, dict) else None)
    return inner if isinstance(inner, dict) else {"message": str(inner or event.get("message", ""))}


def bears_content(event: Any) -> bool:
    """Whether a client would see something happen: text, reasoning, a call, or a good end.

    A turn that ends in an error before anything else has been said can still be tried again.
    """
    if not isinstance(event, dict):
        return False
    for choice in _choices(event):
        if choice.get("finish_reason") not in (None, "", "error", "abort") or choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(map(delta.get, _CONTENT_FIELDS)):
            return True
    return False


def _merge_tokens(chunks: Sequence[bytes]) -> bytes:
    """The stream of `chunks`, with neighbours joined that differ in one string only. It says the same."""
    if len(chunks) <= _FEW:
        stream = b"".join(chunks)
        if len(stream) < _SMALL:
            return stream
        # A slow stream comes event by event; one that came in few reads has to be taken apart first.
        events, gap = stream.split(_GAP), _GAP
    else:
        events, gap = list(chunks), b""
    at = 0
    for _ in range(_RUNS):
        run = _first_run(events, at)
        if run is None:
            break
        at, end, envelope = run
        merged = _merge_run(events[at:end], gap, *envelope)
        if merged is None:
            break
        events[at:end] = [merged]
        at += 1
    return gap.join(events)


def _first_run(events: list[bytes], start: int) -> tuple[int, int, tuple[bytes, bytes]] | None:
    """Where token events begin and end, and what stands before and after their letters."""
    for at in range(start, min(start + _HEAD, len(events))):
        envelope = around_letters(events[at])
        if envelope is not None:
            before, after = envelope
            end = len(events)
            while end > at + 1 and not (events[end - 1].startswith(before) and events[end - 1].endswith(after)):
                end -= 1
            return at, end, envelope
    return None


def around_letters(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the letters of an event that brings a token, or None for another event."""
    for marker in _MARKERS:
        found = event.find(marker, 0, _REACH)
        letters = found + len(marker)
        closing = _STRING_BODY.match(event, letters) if found >= 0 else None
        if closing is not None and letters < closing.end() < len(event):
            return event[:letters], event[closing.end() :]
    return None


class Run(NamedTuple):
    """Neighbours in a stream that differ in their letters only."""

    start: int
    end: int
    first: bytes
    """The first of them."""
    letters: bytes
    """Of all of them."""
    merged: bytes
    """One event that says the same as all."""


def find_run(stream: bytes) -> Run | None:
    """The tokens among whole events, if all that is between the first and the last of them is alike."""
    lines = stream.split(b"\n")
    if b"\r" in stream or any(lines[1::2]):
        return None
    run = _first_run(lines[:-1:2], 0)
    if run is None:
        return None
    at, end, (before, after) = run
    events = lines[2 * at : 2 * end : 2]
    head, tail = len(before), len(after)
    letters = [event[head:-tail] for event in events]
    whole = before + (after + _GAP + before).join(letters) + after + _GAP
    start = sum(map(len, lines[: 2 * at])) + 2 * at
    text = b"".join(letters)
    if not stream.startswith(whole, start) or _STRING_BODY.fullmatch(text) is None:
        return None
    return Run(start, start + len(whole), events[0] + _GAP, text, before + text + after + _GAP)


def _merge_run(events: list[bytes], gap: bytes, before: bytes, after: bytes) -> bytes | None:
    """One event for a run of them, or None when they are not all alike. Both checks are one pass over the bytes."""
    head, tail = len(before), len(after)
    letters = [event[head:-tail] for event in events]
    if (after + gap + before).join(letters) != gap.join(events)[head:-tail]:
        return None
    text = b"".join(letters)
    if _GAP in text:
        text = text.replace(after + gap + before, b"")
    # A further member between the letters and the end of some event would show as a quote.
    if _STRING_BODY.fullmatch(text) is None:
        return None
    return before + text + after


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
