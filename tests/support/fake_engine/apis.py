"""The four APIs of an engine: which path is which, and what a request says in the terms of a chat.

Separate from the template because vLLM has the same seam: its Responses and Messages endpoints make a chat of what they
get, by the rules copied here from its converters (0.32), and render that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from support.fake_engine.tokens import PromptError

Api = Literal["chat", "completions", "responses", "messages"]

PATHS: Final[Mapping[str, Api]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
LIMITS: Final[Mapping[Api, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}


def limit_of(api: Api, body: Mapping[str, Any]) -> int | None:
    """The limit of output tokens."""
    return next((int(body[key]) for key in LIMITS[api] if body.get(key) is not None), None)


def as_chat(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as a chat; a chat as it is.

    Raises:
        PromptError: for what vLLM refuses.
    """
    make = {"responses": _chat_of_response, "messages": _chat_of_message}.get(api, dict)
    try:
        return make(body)
    except (AttributeError, KeyError, TypeError) as error:
        raise PromptError(f"the body is not as {api} are: {error!r}") from error


# --- Responses ------------------------------------------------------------------------------------


def _chat_of_response(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise PromptError("input must be text or a list of items")
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        message = _message_of(item, last)
        if message is not None:
            messages.append(message)
    effort = (body.get("reasoning") or {}).get("effort")
    return {
        **_common(body, messages),
        "tools": [{"type": tool["type"], "function": _function(tool)} for tool in body.get("tools") or ()],
        **({"reasoning_effort": effort} if effort else {}),
    }


def _message_of(item: Mapping[str, Any], last: dict[str, Any] | None) -> dict[str, Any] | None:
    """The message of an item; None when it went into the last one."""
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        if last is None:
            return {"role": "assistant", "tool_calls": [call]}
        last.setdefault("tool_calls", []).append(call)
        return None
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    if kind == "reasoning":
        thought = (item.get("content") or item.get("summary") or [{"text": ""}])[0]["text"]
        if last is not None and last.get("reasoning") is None:
            last["reasoning"] = thought
            return None
        return {"role": "assistant", "reasoning": thought}
    if kind != "message" or "role" not in item:
        raise PromptError(f"Unsupported input item type: {kind}")
    content = item.get("content")
    if item["role"] == "assistant":
        text = content if isinstance(content, str) else content[0]["text"] if content else ""
        if last is not None and last.get("content") is None:
            last["content"] = text
            return None
        return {"role": "assistant", "content": text}
    if isinstance(content, list):
        content = [{"type": "text", "text": part["text"]} if part["type"] == "input_text" else part for part in content]
    return {"role": item["role"], "content": content}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tool.get(key) for key in ("name", "description", "parameters")}


# --- Messages -------------------------------------------------------------------------------------


def _chat_of_message(body: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise PromptError("max_tokens must be positive")
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if isinstance(system, list):
        texts = [block["text"] for block in system if block.get("type") == "text"]
        system = "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body.get("messages") or ():
        if isinstance(message["content"], str):
            messages.append({"role": message["role"], "content": message["content"]})
        else:
            made = _blocks(message["role"], message["content"], messages)
            if message["role"] != "user" or "content" in made:
                messages.append(made)
    chat = _common(body, messages)
    chat["tools"] = [{"type": "function", "function": _anthropic_function(tool)} for tool in body.get("tools") or ()]
    choice = (body.get("tool_choice") or {}).get("type")
    chat["tool_choice"] = {"any": "required", "tool": "required"}.get(choice, choice)
    effort = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") == "disabled":
        effort = effort or "none"
    return {**chat, "reasoning_effort": effort} if effort else chat


def _blocks(role: str, blocks: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of content blocks; tool results become messages of their own, before it."""
    made: dict[str, Any] = {"role": role}
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block["type"]:
            case "text" if block["text"]:
                parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append({"type": "image_url", "image_url": block["source"]})
            case "thinking":
                made["reasoning"] = made.get("reasoning", "") + block["thinking"]
            case "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"] or {})}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "tool_result":
                content = block.get("content") or ""
                if isinstance(content, list):
                    content = "\n".join(part["text"] for part in content if part["type"] == "text")
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return made


def _anthropic_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}


def _common(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    kept = ("model", "tool_choice", "chat_template_kwargs", "cache_salt")
    return {"messages": messages, **{key: body[key] for key in kept if body.get(key) is not None}}
