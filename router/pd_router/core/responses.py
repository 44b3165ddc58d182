"""The Responses API's items in the terms of a chat, and the chain of items behind a `previous_response_id`.

Separate from `history` because a turn of this API is a run of items (thoughts, a message, calls), of which a chat makes
one message. An engine could only continue a response that it keeps itself, without telling prefill of it; so the items
are put in its place here, and both legs see one whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pd_router.core import history
from pd_router.core.errors import INVALID_REQUEST, ApiError, bad_field

Recall = Callable[[str], list[Any] | None]
"""The items of the conversation up to and with a response; None when it is not kept."""

PREVIOUS: Final = "previous_response_id"
_INPUT: Final = "a string or a list of items that are objects"
_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS: Final = frozenset({"function_call_output", "custom_tool_call_output"})
_OWN_TOOLS: Final = frozenset({"function", "custom", "namespace"})
"""Tools that the client runs. Others are run by the engine, in several rounds with the params of the first."""


def check_items(body: dict[str, Any]) -> list[Any]:
    """The request's input as items. Raises ApiError 400."""
    given = body.get("input")
    if type(given) is str:
        return [{"type": "message", "role": "user", "content": given}]
    if type(given) is not list or not all(type(item) is dict for item in given):
        raise bad_field("input", _INPUT)
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if type(kind) is not str:
            raise bad_field(f"input[{index}].type", "a string")
        if kind == "message" and type(item.get("role")) is not str:
            raise bad_field(f"input[{index}].role", "a string")
    return given


def check_options(body: Mapping[str, Any]) -> None:
    """Refuse what no engine behind a router can do. Raises ApiError 400."""
    if body.get("background"):
        raise bad_field("background", "false or left out: no response is kept to be fetched later")
    if body.get("conversation") is not None:
        raise bad_field("conversation", "left out: send the items, or previous_response_id")


def continue_from(body: dict[str, Any], items: list[Any], recall: Recall | None) -> list[Any]:
    """Put the items behind `previous_response_id` into the body. Returns all items.

    Raises:
        ApiError: 400 of a wrong type, 404 when the response is not kept.
    """
    previous = body.get("previous_response_id")
    if previous is None:
        return items
    if type(previous) is not str:
        raise bad_field("previous_response_id", "a string or null")
    before = recall(previous) if recall is not None else None
    if before is None:
        text = (
            "previous_response_id names no response that is kept for this caller: it was stored with store false, too "
            "long ago, or by another router. Send all items as input instead"
        )
        raise ApiError(404, text, INVALID_REQUEST, "previous_response_not_found", "previous_response_id")
    whole = [*before, *items]
    body["input"] = whole
    return whole


def run_by_engine(body: Mapping[str, Any]) -> bool:
    """Whether a tool is offered that the engine runs itself. Raises ApiError 400."""
    tools = body.get("tools")
    if tools is None:
        return False
    if type(tools) is not list or not all(type(tool) is dict for tool in tools):
        raise bad_field("tools", "a list of objects")
    return any(tool.get("type") not in _OWN_TOOLS for tool in tools)


def conversation(items: list[Any]) -> history.Conversation:
    """Digest checked items.

    Raises:
        ValueError: nested too deeply.
    """
    found = history.read_messages(chat_messages(items))
    found.inexact = "items that the engine converts"
    return found


def chat_messages(items: list[Any]) -> list[dict[str, Any]]:
    """The messages that a run of items stands for; thoughts, text and calls in a row are one message."""
    made: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            _assistant(made)["reasoning"] = True
        elif kind in _CALLS:
            _assistant(made).setdefault("tool_calls", []).append(tool_call(item))
        elif kind in _OUTPUTS:
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "message":
            made.append({"role": kind, "item": {name: value for name, value in item.items() if name != "id"}})
        elif item["role"] == "assistant":
            last = _assistant(made)
            if last["content"]:
                made.append({"role": "assistant", "content": ""})
                last = made[-1]
            last["content"] = _content(item.get("content"))
        else:
            made.append({"role": item["role"], "content": _content(item.get("content"))})
    return made


def tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call item as a tool call."""
    text = item.get("arguments") if item.get("type") == "function_call" else item.get("input")
    return {
        "id": item.get("call_id"),
        "type": item.get("type"),
        "function": {"name": item.get("name"), "arguments": text, "namespace": item.get("namespace")},
    }


def _assistant(made: list[dict[str, Any]]) -> dict[str, Any]:
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _content(content: Any) -> Any:
    """One text, however it is wrapped, or the parts."""
    if type(content) is not list:
        return content
    texts = [part.get("text") for part in content if type(part) is dict and part.get("type") in _TEXTS]
    return texts[0] if len(content) == 1 and len(texts) == 1 and type(texts[0]) is str else content


_TEXTS: Final = frozenset({"input_text", "output_text", "text"})
