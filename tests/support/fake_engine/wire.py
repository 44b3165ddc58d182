"""The bytes of an answer: OpenAI bodies and stream events in the shape that vLLM gives them.

Values in, values out, so that the order and content of events can be tested without a server. Chat and completions
differ only here; the other APIs are in `other_wire`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pd_wire import names
from support.fake_engine.answers import Answer
from support.fake_engine.apis import Api
from support.fake_engine.behaviour import Behaviour

EventKind = Literal["first", "content", "finish", "usage", "extra", "done"]


@dataclass(frozen=True, slots=True)
class Event:
    """One stream event. ``data`` is None for ``[DONE]``.

    Attributes:
        name: of the ``event`` line that some APIs have.
        holder: the object in ``data`` that takes the handle; None means ``data`` itself.
    """

    kind: EventKind
    data: dict[str, Any] | None
    name: str | None = None
    holder: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that an answer is made of."""

    api: Api
    public_id: str
    created: int
    model: str
    answers: tuple[Answer, ...]
    prompt_tokens: int
    cached_tokens: int
    body: Mapping[str, Any]
    details: bool = True

    @property
    def chat(self) -> bool:
        """Whether this is a chat completion."""
        return self.api == "chat"

    def usage(self) -> dict[str, Any]:
        """The usage object; counts are in tokens."""
        generated = sum(len(answer.tokens) for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + generated,
            "completion_tokens": generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} if self.details else None,
        }


def full_body(reply: Reply, handle: Any, finish: str | None = None) -> dict[str, Any]:
    """The answer to a request without ``stream``."""
    choices = [_choice(reply, index, answer, finish) for index, answer in enumerate(reply.answers)]
    return {
        "id": reply.public_id,
        "object": "chat.completion" if reply.chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": "fake-engine-tp1",
        "usage": reply.usage(),
        "prompt_logprobs": None,
        names.KV_PARAMS: handle,
    }


def stream_events(reply: Reply, behaviour: Behaviour) -> Iterator[Event]:
    """The events of a stream without any handle, in order, ``[DONE]`` last."""
    options = reply.body.get("stream_options") or {}
    running = {"usage": reply.usage()} if options.get("continuous_usage_stats") else {}
    if reply.chat:
        for index in range(len(reply.answers)):
            delta = {"role": "assistant", "content": ""}
            yield Event("first", _chunk(reply, [_stream_choice(reply, index, delta)], running))
    for index, answer in enumerate(reply.answers):
        yield from _pieces(reply, behaviour, index, answer, running)
    if options.get("include_usage"):
        yield Event("usage", _chunk(reply, [], {"usage": reply.usage()}))
    if behaviour.handle_on == "extra":
        yield Event("extra", _chunk(reply, [], {}))
    yield Event("done", None)


def encode_event(event: Event, behaviour: Behaviour) -> bytes:
    """One event as it goes over the wire, in the SSE dialect asked for."""
    end = behaviour.line_end
    start = b"data: " if behaviour.data_space else b"data:"
    comment = b": keep-alive" + b"." * behaviour.comment_bytes
    lead = comment + end + end if behaviour.comments and event.kind == "content" else b""
    text = b"[DONE]" if event.data is None else json.dumps(event.data, ensure_ascii=False).encode()
    name = b"event: " + event.name.encode() + end if event.name is not None else b""
    return lead + name + start + text + end + end


def error_body(status: int, message: str, params: Any = None, *, kind: str | None = None) -> dict[str, Any]:
    """vLLM's error object; ``params`` stands where a careless engine might leave a handle."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    error = {
        "message": message,
        "type": kind or kinds.get(status, "InternalServerError"),
        "param": None,
        "code": status,
    }
    body: dict[str, Any] = {"error": error}
    if params is not None:
        body[names.KV_PARAMS] = params
        error[names.KV_PARAMS] = params
    return body


def _pieces(reply: Reply, behaviour: Behaviour, index: int, answer: Answer, running: dict[str, Any]) -> Iterator[Event]:
    size = behaviour.piece_chars
    if answer.reasoning is not None:
        for piece in cut(answer.reasoning, size):
            yield Event("content", _chunk(reply, [_stream_choice(reply, index, {"reasoning": piece})], running))
    if answer.tool is not None:
        name, arguments = answer.tool
        head = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": ""}}
        yield Event("content", _chunk(reply, [_stream_choice(reply, index, {"tool_calls": [head]})], running))
        for piece in cut(arguments, size):
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
            yield Event("content", _chunk(reply, [_stream_choice(reply, index, delta)], running))
    for piece in cut(answer.content, size):
        yield Event("content", _chunk(reply, [_stream_choice(reply, index, {"content": piece})], running))
    last = _stream_choice(reply, index, {"content": ""})
    last["finish_reason"] = finish_reason(answer)
    last["stop_reason"] = None
    yield Event("finish", _chunk(reply, [last], running))


def finish_reason(answer: Answer) -> str:
    """Why the model stopped."""
    if answer.tool is not None:
        return "tool_calls"
    return "stop" if answer.stopped else "length"


def _chunk(reply: Reply, choices: list[dict[str, Any]], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": reply.public_id,
        "object": "chat.completion.chunk" if reply.chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
        **extra,
    }


def _stream_choice(reply: Reply, index: int, delta: dict[str, Any]) -> dict[str, Any]:
    text = delta.get("content", "")
    if reply.chat:
        marks = _chat_logprobs(text) if reply.body.get("logprobs") and text else None
        return {"index": index, "delta": delta, "logprobs": marks, "finish_reason": None}
    marks = _text_logprobs(text) if reply.body.get("logprobs") and text else None
    return {"index": index, "text": text, "logprobs": marks, "finish_reason": None, "stop_reason": None}


def _choice(reply: Reply, index: int, answer: Answer, finish: str | None) -> dict[str, Any]:
    end = {"finish_reason": finish or finish_reason(answer), "stop_reason": None}
    if not reply.chat:
        marks = _text_logprobs(answer.content) if reply.body.get("logprobs") else None
        return {"index": index, "text": answer.content, "logprobs": marks, **end, "prompt_logprobs": None}
    calls = []
    if answer.tool is not None:
        name, arguments = answer.tool
        calls = [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}]
    message = {
        "role": "assistant",
        "content": answer.content or (None if calls else ""),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": calls,
        "reasoning": answer.reasoning,
    }
    marks = _chat_logprobs(answer.content) if reply.body.get("logprobs") else None
    return {"index": index, "message": message, "logprobs": marks, **end, "token_ids": None}


def _chat_logprobs(text: str) -> dict[str, Any]:
    entry = {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": []}
    return {"content": [entry]}


def _text_logprobs(text: str) -> dict[str, Any]:
    return {"text_offset": [0], "token_logprobs": [-0.25], "tokens": [text], "top_logprobs": [{text: -0.25}]}


def cut(text: str, size: int) -> list[str]:
    """``text`` in pieces of ``size`` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]
