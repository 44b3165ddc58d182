"""Anthropic's Messages API in the terms of a chat: its messages, its reply, and what of its options the prompt shows.

Separate from `history` because here the shapes are another company's. What vLLM's converter makes of them is followed
only as far as equality goes: two requests have equal digests when the converter gives equal chats. Markers for a cache
that no engine here has move from turn to turn and are no part of a message; neither is a line with a hash of its own
per request that one client puts before its system prompt, and that the converter cuts out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pd_router.core import history
from pd_router.core.errors import bad_field
from pd_router.core.jsontext import encode

_ROLES: Final = "a list of objects, each with a role of user, assistant or system, and content"
_CONTENT: Final = "a string or a list of blocks, each an object with a type that is a string"
_SYSTEM: Final = "a string or a list of text blocks"
_BILLING: Final = "x-anthropic-billing-header"
_CACHE_MARK: Final = "cache_control"
_IGNORED: Final = frozenset(
    {
        *(_CACHE_MARK, "context_management", "diagnostics", "inference_geo", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
"""Options of Anthropic's own service, which engines do not read; some change from turn to turn."""
_MEDIA: Final = frozenset({"image", "document"})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The request's messages. Raises ApiError 400."""
    if type(messages) is not list or not messages:
        raise bad_field("messages", _ROLES)
    for index, message in enumerate(messages):
        if type(message) is not dict or type(message.get("role")) is not str:
            raise bad_field(f"messages[{index}]", "an object with a role that is a string")
        content = message.get("content")
        if type(content) is str:
            continue
        if type(content) is not list or not all(
            type(block) is dict and type(block.get("type")) is str for block in content
        ):
            raise bad_field(f"messages[{index}].content", _CONTENT)
    return messages


def conversation(messages: list[dict[str, Any]]) -> history.Conversation:
    """Digest checked messages.

    Raises:
        ValueError: nested too deeply.
    """
    found = history.read_messages([chat_message(message["role"], message["content"]) for message in messages])
    found.media = any(type(message["content"]) is list and _has_media(message["content"]) for message in messages)
    # Where a template wants the system prompt first, the converter moves what came later, and with it every token.
    found.inexact = "messages that the engine converts"
    return found


def chat_message(role: str, content: Any) -> dict[str, Any]:
    """A message as one of a chat, with equal values for what the converter takes for equal."""
    if type(content) is not list:
        return {"role": role, "content": content}
    texts: list[str] = []
    others: list[Any] = []
    calls: list[Any] = []
    reasoning = False
    for block in content:
        kind = block["type"]
        if kind == "text":
            if block.get("text"):
                texts.append(block["text"])
                others.append({"type": "text", "text": block["text"]})
        elif kind in ("thinking", "redacted_thinking"):
            reasoning = True
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(block))
        else:
            others.append(_without_marks(block))
    made: dict[str, Any] = {"role": role}
    joined = len(texts) == len(others) and (len(texts) < 2 or role == "assistant")
    made["content"] = "".join(map(str, texts)) if joined else others
    if calls:
        made["tool_calls"] = calls
    if reasoning:
        made["reasoning"] = True
    return made


def tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    """A `tool_use` block as a tool call. Its input has no text of its own, so members are sorted.

    Raises:
        ValueError: nested too deeply.
    """
    arguments = encode(block.get("input") or {}, sort=True).decode()
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def prompt_side(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without those parts of its options that shape the output only; for the prefill leg."""
    made = dict(body)
    thinking = made.get("thinking")
    if type(thinking) is dict and thinking.get("type") != "disabled":
        # A budget limits the output, and would have to be below the prefill's one token.
        del made["thinking"]
    config = made.get("output_config")
    if type(config) is dict and "format" in config:
        made["output_config"] = {name: value for name, value in config.items() if name != "format"}
    return made


def scope_side(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same with what is told apart without a reason taken away, for the digest. Raises ApiError 400."""
    made = prompt_side(body)
    system = made.get("system")
    if type(system) is list:
        if not all(type(block) is dict for block in system):
            raise bad_field("system", _SYSTEM)
        texts = [block.get("text") for block in system if block.get("type") == "text"]
        made["system"] = "".join(text for text in texts if type(text) is str and not text.startswith(_BILLING))
    elif system is not None and type(system) is not str:
        raise bad_field("system", _SYSTEM)
    if type(made.get("tools")) is list:
        made["tools"] = [_without_marks(tool) for tool in made["tools"]]
    return {name: value for name, value in made.items() if name not in _IGNORED and value not in ({}, "")}


def _has_media(blocks: list[dict[str, Any]]) -> bool:
    for block in blocks:
        if block["type"] in _MEDIA:
            return True
        inner = block.get("content")
        if type(inner) is list and any(type(part) is dict and part.get("type") in _MEDIA for part in inner):
            return True
    return False


def _without_marks(block: Any) -> Any:
    if type(block) is not dict:
        return block
    kept = {name: value for name, value in block.items() if name != _CACHE_MARK}
    inner = kept.get("content")
    if type(inner) is list:
        kept["content"] = [_without_marks(part) for part in inner]
    return kept
