"""The bytes of an answer in the Responses and the Messages API: bodies and events as vLLM 0.32 sends them.

Separate from `wire`, which has OpenAI's two older APIs: nothing but the answer's facts is common. The handle of a
streamed response is in its last event; of a streamed message in the one with the stop reason, where the connector's
plugin puts it. How many tokens of the prompt were cached a streamed message says in that event, and not when it starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from pd_wire import names
from support.fake_engine.answers import Answer
from support.fake_engine.behaviour import Behaviour
from support.fake_engine.wire import Event, Reply, cut, finish_reason

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def full_body(reply: Reply, handle: Any, failed: bool) -> dict[str, Any]:
    """The answer to a request without ``stream``."""
    return response(reply, handle, failed) if reply.api == "responses" else message(reply, handle, failed)


def stream_events(reply: Reply, behaviour: Behaviour) -> Iterator[Event]:
    """The events of a stream, in order. The one that may take a handle says where."""
    return _response_events(reply, behaviour) if reply.api == "responses" else _message_events(reply, behaviour)


def break_finish(event: Event) -> None:
    """Make of the last event that of an answer which failed."""
    assert event.data is not None
    if "response" in event.data:
        event.data["response"]["status"] = "failed"
    else:
        event.data["delta"]["stop_reason"] = None


def error_event(api: str, body: dict[str, Any]) -> Event:
    """An error in the middle of a stream."""
    if api == "responses":
        return Event("content", body)
    inner = {"type": "internal_error", "message": body["error"]["message"]}
    more = {names.KV_PARAMS: body[names.KV_PARAMS]} if names.KV_PARAMS in body else {}
    return _named("content", {"type": "error", "error": inner, **more})


# --- Responses ------------------------------------------------------------------------------------


def response(reply: Reply, handle: Any, failed: bool = False, *, begun: bool = False) -> dict[str, Any]:
    """A response object; ``begun``: as the first events show it."""
    answer, body = reply.answers[0], reply.body
    status = "in_progress" if begun else "failed" if failed else "completed" if _whole(answer) else "incomplete"
    return {
        "id": reply.public_id,
        "created_at": reply.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": reply.model,
        "object": "response",
        "output": [] if begun or not answer.tokens else [item for _, item in _items(reply, answer)],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": body.get("max_output_tokens") or 1024,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": body.get("reasoning"),
        "service_tier": "auto",
        "status": status,
        "text": body.get("text"),
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": None if begun else _response_usage(reply),
        "user": None,
        names.KV_PARAMS: handle,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _response_usage(reply: Reply) -> dict[str, Any]:
    generated = len(reply.answers[0].tokens)
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": reply.cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [reply.prompt_tokens],
            "cached_tokens_per_turn": [reply.cached_tokens],
        },
        "output_tokens": generated,
        "output_tokens_details": {
            "reasoning_tokens": len(reply.answers[0].reasoning or ""),
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [generated],
            "tool_output_tokens_per_turn": [0],
        },
        "total_tokens": reply.prompt_tokens + generated,
    }


def _whole(answer: Answer) -> bool:
    return answer.stopped or answer.tool is not None


def _items(reply: Reply, answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    """The output's items, each with the letters that its deltas bring."""
    tag = hashlib.blake2b(reply.public_id.encode(), digest_size=8).hexdigest()
    if answer.reasoning is not None:
        content = [{"text": answer.reasoning, "type": "reasoning_text"}]
        yield (
            answer.reasoning,
            {"id": f"rs_{tag}", "summary": [], "type": "reasoning", "content": content, "status": "completed"},
        )
    if answer.tool is not None:
        name, arguments = answer.tool
        call: dict[str, Any] = {"id": f"fc_{tag}", "call_id": f"call_{name}", "type": "function_call"}
        yield arguments, {**call, "status": "completed", "name": name, "namespace": None, "arguments": arguments}
    if answer.content:
        part = {"annotations": [], "text": answer.content, "type": "output_text", "logprobs": None}
        made: dict[str, Any] = {"id": f"msg_{tag}", "content": [part], "role": "assistant", "status": "completed"}
        yield answer.content, {**made, "type": "message", "phase": None}


_DELTA = {
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "message": "response.output_text.delta",
}


def _response_events(reply: Reply, behaviour: Behaviour) -> Iterator[Event]:
    number = 0

    def event(kind: Any, name: str, /, **fields: Any) -> Event:
        nonlocal number
        data = {**fields, "sequence_number": number, "type": name}
        number += 1
        return _named(kind, data)

    begun = response(reply, None, begun=True)
    made = event("first", "response.created", response=dict(begun))
    yield Event(made.kind, made.data, made.name, made.data["response"] if made.data else None)
    yield event("first", "response.in_progress", response=dict(begun))
    for index, (letters, item) in enumerate(_items(reply, reply.answers[0])):
        empty = {**item, "status": "in_progress"}
        empty.update({"content": []} if "content" in item else {"arguments": ""})
        at = {"item_id": item["id"], "output_index": index}
        yield event("content", "response.output_item.added", item=empty, output_index=index)
        text = item["type"] == "message"
        more = {"content_index": 0, "logprobs": []} if text else {"content_index": 0} if "content" in item else {}
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            yield event("content", "response.content_part.added", part=part, content_index=0, **at)
        for piece in cut(letters, behaviour.piece_chars):
            yield event("content", _DELTA[item["type"]], delta=piece, **more, **at)
        done = {"arguments": letters, "name": item["name"]} if "arguments" in item else {"text": letters}
        yield event("content", _DELTA[item["type"]].replace(".delta", ".done"), **done, **more, **at)
        if "content" in item:
            part = item["content"][0]
            yield event("content", "response.content_part.done", part=part, content_index=0, **at)
        yield event("content", "response.output_item.done", item=item, output_index=index)
    last = response(reply, None)
    made = event("finish", "response.completed", response=last)
    yield Event(made.kind, made.data, made.name, last)


# --- Messages -------------------------------------------------------------------------------------


def message(reply: Reply, handle: Any, failed: bool = False) -> dict[str, Any]:
    """A whole message; what is null is left out, as vLLM does."""
    answer = reply.answers[0]
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "0" * 32})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    if answer.tool is not None:
        name, arguments = answer.tool
        blocks.append({"type": "tool_use", "id": f"call_{name}", "name": name, "input": json.loads(arguments)})
    made = {
        "id": reply.public_id,
        "type": "message",
        "role": "assistant",
        "content": blocks or [{"type": "text", "text": ""}],
        "model": reply.model,
        "stop_reason": None if failed else _STOP[finish_reason(answer)],
        "usage": _message_usage(reply, len(answer.tokens)),
        names.KV_PARAMS: handle,
    }
    return {key: value for key, value in made.items() if value is not None}


def _message_usage(reply: Reply, generated: int) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - (reply.cached_tokens if reply.details else 0),
        "output_tokens": generated,
        **({"cache_read_input_tokens": reply.cached_tokens} if reply.details else {}),
    }


def _message_events(reply: Reply, behaviour: Behaviour) -> Iterator[Event]:
    answer = reply.answers[0]
    start = {
        "id": reply.public_id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": reply.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": 0},
    }
    yield Event("first", {"type": "message_start", "message": start}, "message_start", start)
    blocks: list[tuple[dict[str, Any], str, str, str]] = []
    if answer.reasoning is not None:
        blocks.append(({"type": "thinking", "thinking": ""}, "thinking_delta", "thinking", answer.reasoning))
    if answer.content:
        blocks.append(({"type": "text", "text": ""}, "text_delta", "text", answer.content))
    if answer.tool is not None:
        name, arguments = answer.tool
        head = {"type": "tool_use", "id": f"call_{name}", "name": name, "input": {}}
        blocks.append((head, "input_json_delta", "partial_json", arguments))
    for index, (head, kind, name, letters) in enumerate(blocks):
        yield _named("content", {"type": "content_block_start", "index": index, "content_block": head})
        for piece in cut(letters, behaviour.piece_chars):
            delta = {"type": kind, name: piece}
            yield _named("content", {"type": "content_block_delta", "index": index, "delta": delta})
        yield _named("content", {"type": "content_block_stop", "index": index})
    usage = _message_usage(reply, len(answer.tokens))
    delta = {"stop_reason": _STOP[finish_reason(answer)], "stop_sequence": None}
    last = {"type": "message_delta", "delta": delta, "usage": usage}
    yield Event("finish", last, "message_delta")
    if behaviour.handle_on == "extra":
        yield _named("extra", {"type": "ping"})
    yield _named("done", {"type": "message_stop"})


def _named(kind: Any, data: dict[str, Any]) -> Event:
    return Event(kind, data, data["type"])
