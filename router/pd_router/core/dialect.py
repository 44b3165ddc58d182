"""What differs between the APIs in an answer: what counts as content, how it ends, what it said, how an error looks.

Separate from framing and cutting, which are the same for all. A dialect is a value that the stream's filter and the
turn ask; nothing else branches on the API of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pd_router.core import anthropic, responses, transcript
from pd_router.core.careless import Shape
from pd_router.core.cutting import frame_openai, is_error
from pd_router.core.fields import Api
from pd_router.core.transcript import Transcript

Event = dict[str, Any]

_REACH: Final = 16
"""Bytes at the end of a read in which `[DONE]` is looked for; a model's text is followed by quotes and braces."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API's answers are read and its errors written."""

    read: Callable[[Sequence[bytes]], Transcript]
    """A whole stream, each chunk whole events."""
    parse_answer: Callable[[bytes], Transcript]
    bears_content: Callable[[Any], bool]
    """Whether a client would see something happen; before that a failed turn can still be tried again."""
    may_end: Callable[[bytes], bool]
    """Whether these bytes may hold what a client takes for the end."""
    error_body: Callable[[bytes, int], bytes]
    """OpenAI's error body and the status, as a body of this API."""
    error_event: Callable[[bytes], bytes]
    """OpenAI's error body as an event of this API."""
    shape: Shape
    """Of events; one that is otherwise is looked at before it is passed on."""


# -- the Responses API -------------------------------------------------------------------------------
_LAST_OF_RESPONSE: Final = ("response.completed", "response.incomplete", "response.failed")
_SILENT: Final = frozenset({"response.created", "response.in_progress", "response.queued"})
_FINISH: Final = {"completed": "stop", "incomplete": "length", "cancelled": "abort", "failed": "error"}


def read_response(chunks: Sequence[bytes]) -> Transcript:
    """The last event says all of it; those before are looked at only for an error. Never raises."""
    out = Transcript()
    for chunk in reversed(chunks):
        for event in reversed(transcript.parse_events(chunk)):
            if not isinstance(event, dict):
                continue
            if is_error(event):
                out.error = transcript.error_of(event)
                return out
            whole = event.get("response")
            if event.get("type") in _LAST_OF_RESPONSE and isinstance(whole, dict):
                out.done = True
                _take_response(out, whole)
                return out
    return out


def parse_response(body: bytes) -> Transcript:
    """A whole answer. Never raises."""
    out = Transcript(done=True)
    answer = _object(body)
    if is_error(answer):
        out.error = transcript.error_of(answer)
    elif answer.get("object") == "response":
        _take_response(out, answer)
    return out


def _take_response(out: Transcript, whole: Event) -> None:
    out.id = whole["id"] if isinstance(whole.get("id"), str) else ""
    out.usage = whole["usage"] if isinstance(whole.get("usage"), dict) else None
    status = whole.get("status")
    finish = _FINISH.get(status) if isinstance(status, str) else None
    items = whole.get("output")
    if finish is None or not isinstance(items, list):
        return
    out.finish_reasons, out.finished = (finish,), True
    if not all(isinstance(item, dict) for item in items):
        return
    out.items = items
    out.chat = True
    messages = _messages_of(items)
    out.several = len(messages) > 1
    for message in messages[:1]:
        if message["role"] != "assistant" or not isinstance(message["content"], str):
            out.several = True
            return
        out.content = [message["content"]]
        out.calls = dict(enumerate(message.get("tool_calls", ())))
        out.reasoning = bool(message.get("reasoning"))


def _messages_of(items: list[Any]) -> list[Event]:
    with suppress(KeyError, TypeError):
        return responses.chat_messages(items)
    return [{"role": "", "content": None}]


def _bears_item(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("type"), str) or event["type"] in _SILENT:
        return False
    whole = event.get("response")
    # An end that is none, before anything was said, can still be tried again.
    return not isinstance(whole, dict) or whole.get("status") in ("completed", "incomplete")


def _response_error(body: bytes) -> bytes:
    """Both forms that clients know: the documented flat one, and `error`, which makes the official ones raise."""
    inner = orjson.loads(body)["error"]
    flat = {"type": "error", "code": inner["code"], "message": inner["message"], "param": inner["param"]}
    return b"event: error\ndata: " + orjson.dumps({**flat, "error": inner}) + b"\n\n"


# -- the Messages API --------------------------------------------------------------------------------
_STOP: Final = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's clients choose an exception by the type."""


def read_message(chunks: Sequence[bytes]) -> Transcript:
    """Put a streamed message together. Never raises."""
    out = Transcript()
    message: Event = {}
    blocks: list[Event] = []
    for event in transcript.parse_events(b"".join(chunks)):
        if not isinstance(event, dict):
            continue
        if is_error(event) and out.error is None:
            out.error = transcript.error_of(event)
        match event.get("type"):
            case "message_start" if isinstance(event.get("message"), dict):
                message, blocks = dict(event["message"]), []
            case "content_block_start" if isinstance(event.get("content_block"), dict):
                blocks.append({**event["content_block"], "partial_json": ""})
            case "content_block_delta" if isinstance(event.get("delta"), dict) and blocks:
                _add_delta(blocks[-1], event["delta"])
            case "message_delta" if isinstance(event.get("delta"), dict):
                message.update(event["delta"])
                message["usage"] = event.get("usage")
            case "message_stop":
                out.done = True
    for block in blocks:
        if block.get("type") == "tool_use" and block["partial_json"]:
            block["input"] = _input(block["partial_json"])
    _take_message(out, {**message, "content": blocks})
    return out


def parse_message(body: bytes) -> Transcript:
    """A whole answer. Never raises."""
    out = Transcript(done=True)
    answer = _object(body)
    if is_error(answer):
        out.error = transcript.error_of(answer)
    elif answer.get("type") == "message" and isinstance(answer.get("content"), list):
        _take_message(out, answer)
    return out


def _add_delta(block: Event, delta: Event) -> None:
    kind = delta.get("type")
    name = _DELTAS.get(kind) if isinstance(kind, str) else None
    text = delta.get(name) if name is not None else None
    if name is not None and isinstance(text, str):
        block[name] = str(block.get(name) or "") + text


def _input(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _take_message(out: Transcript, message: Event) -> None:
    out.id = message["id"] if isinstance(message.get("id"), str) else ""
    out.usage = message["usage"] if isinstance(message.get("usage"), dict) else None
    blocks = message["content"]
    reason = message.get("stop_reason")
    finish = _STOP.get(reason) if isinstance(reason, str) else None
    # The converter has no word for an answer that was given up or failed.
    out.finish_reasons, out.finished = (finish or "error",), finish is not None or out.done
    out.stop_reason = message.get("stop_sequence")
    if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
        return
    with suppress(ValueError):
        made = anthropic.chat_message("assistant", blocks)
        if isinstance(made["content"], str):
            out.chat = True
            out.content = [made["content"]]
            out.calls = dict(enumerate(made.get("tool_calls", ())))
            out.reasoning = bool(made.get("reasoning"))


def _bears_block(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    if event.get("type") == "message_delta":
        delta = event.get("delta")
        return isinstance(delta, dict) and delta.get("stop_reason") is not None
    return event.get("type") in ("content_block_start", "content_block_delta")


def _message_error(body: bytes, status: int) -> bytes:
    inner = orjson.loads(body)["error"]
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": inner["message"]}})


def _message_error_event(body: bytes) -> bytes:
    return b"event: error\ndata: " + _message_error(body, 500) + b"\n\n"


def _object(body: bytes) -> Event:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


OPENAI: Final = Dialect(
    read=transcript.read,
    parse_answer=transcript.parse_answer,
    bears_content=transcript.bears_content,
    may_end=lambda data: b"[DONE]" in data[-_REACH:],
    error_body=lambda body, _status: body,
    error_event=frame_openai,
    shape=Shape(b"data: {", 2, (b'"choices":',)),
)
_RESPONSES: Final = Dialect(
    read=read_response,
    parse_answer=parse_response,
    bears_content=_bears_item,
    may_end=lambda data: any(name.encode() in data for name in _LAST_OF_RESPONSE),
    error_body=lambda body, _status: body,
    error_event=_response_error,
    shape=Shape(b"event: response.", 3, (b'"type":"response.',)),
)
_MESSAGES: Final = Dialect(
    read=read_message,
    parse_answer=parse_message,
    bears_content=_bears_block,
    may_end=lambda data: b"message_stop" in data,
    error_body=_message_error,
    error_event=_message_error_event,
    shape=Shape(b"event: ", 3, (b'"type":"content_block_', b'"type":"message_', b'"type":"ping"')),
)

DIALECTS: Final[Mapping[Api, Dialect]] = {
    Api.CHAT: OPENAI,
    Api.COMPLETIONS: OPENAI,
    Api.RESPONSES: _RESPONSES,
    Api.MESSAGES: _MESSAGES,
}
