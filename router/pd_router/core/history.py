"""The conversation as a chain of digests, so that a client without any id finds its own previous turn.

Decides when two spellings of a message are the same message. The digest of a finished turn is taken over the request's
messages and the reply that the engine sent; one turn later the client echoes that reply, and clients do not echo it
alike: `model_dump()` adds nulls and empty lists, hand-made code keeps role and content only. So null, empty and absent
are one thing, and reasoning, which most clients drop, is left out of the digest and remembered beside it: a reply with
hidden tokens may be found by its text and still needs a proof before it is used (HL-01).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pd_router.core.jsontext import encode

_DOMAIN: Final = b"pd-history-1\n"
_REASONING: Final = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_PLAIN: Final = frozenset({"role", "content"})
MAX_PREFIXES: Final = 16
"""Assistant messages that are tried, newest first. A finished turn is always at the end of what its client sends next;
older ones are found only after edits, and each costs a look-up."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant message of a finished turn. `inexact`: why its text does not fix the tokens in D, or None.
    `items`: the same as items of the Responses API, where it is that API's."""

    message: Mapping[str, Any]
    inexact: str | None
    items: tuple[Any, ...] = ()


@dataclass(slots=True)
class Conversation:
    """What one pass over a request's messages found."""

    chain: Any
    """hashlib object after the last message."""
    prefixes: tuple[bytes, ...] = ()
    """Digests of the prefixes that end in an assistant message, longest first."""
    tail_bytes: int = 0
    """Of the messages after the last assistant message: what a finished turn does not hold yet."""
    media: bool = False
    inexact: str | None = None
    nested: list[Any] = field(default_factory=list)
    """Messages that hold more than a role and a text; only they can hide something below the top level."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Digest a request's messages; each must be an object with a string `role`.

    Raises:
        ValueError: a message that is nested too deeply.
    """
    chain = hashlib.sha256(_DOMAIN)
    found = Conversation(chain)
    update = chain.update
    ends: list[bytes] = []
    tail = 0
    for message in messages:
        role = message["role"]
        content = message.get("content")
        if type(content) is str and len(message) == 2:
            text = content.encode()
            update(b"%d:%b%d:%b" % (len(role), role.encode(), len(text), text))
            tail += len(text)
        else:
            found.nested.append(message)
            text = canonical(message)
            update(text)
            tail += len(text)
            if content is not None and type(content) is not str:
                _note_parts(found, role, content)
        if role == "assistant":
            ends.append(chain.digest())
            tail = 0
            if _has_reasoning(message, content):
                found.inexact = "reasoning in the history"
    found.prefixes = tuple(ends[: -MAX_PREFIXES - 1 : -1])
    found.tail_bytes = tail
    return found


def extend(chain: Any, reply: Reply) -> bytes:
    """Digest of the conversation after `reply`; `chain` is not changed."""
    after = chain.copy()
    after.update(canonical(reply.message))
    digest: bytes = after.digest()
    return digest


def canonical(message: Mapping[str, Any]) -> bytes:
    """One message as bytes: equal for equal messages however they are spelt, different otherwise."""
    role: str = message["role"]
    head = role.encode()
    content = message.get("content")
    extra: dict[str, Any] = {}
    if role == "assistant" and isinstance(content, list):
        content = _joined(content)
    if isinstance(content, str):
        text = content.encode()
    elif content:
        text = b""
        extra["content"] = content
    else:
        text = b""
    if len(message) > 2 or not message.keys() <= _PLAIN:
        for name, value in message.items():
            # Zero and false are values; null, "", [] and {} are ways to say nothing.
            if name in _PLAIN or name in _REASONING or (not value and value != 0):
                continue
            extra[name] = _calls(value) if name == "tool_calls" else value
    if not extra:
        return b"%d:%b%d:%b" % (len(head), head, len(text), text)
    rest = encode(extra, sort=True)
    return b"%d:%b%d:%b+%d:%b" % (len(head), head, len(text), text, len(rest), rest)


def make_reply(message: Mapping[str, Any], finish_reason: str | None, stop_reason: Any) -> Reply:
    """Judge a finished assistant message.

    Args:
        message: as an OpenAI client will hold it.
        finish_reason: of its choice.
        stop_reason: vLLM's; a string when a stop string ended the turn: its tokens are in D's blocks only.
    """
    return Reply(message, _inexact(message, finish_reason, stop_reason))


def _inexact(message: Mapping[str, Any], finish_reason: str | None, stop_reason: Any) -> str | None:
    content = message.get("content")
    if _has_reasoning(message, content):
        return "reasoning in the reply"
    if message.get("tool_calls") or message.get("function_call"):
        return "tool calls in the reply"
    if not isinstance(content, str) or not content:
        return "no text in the reply"
    if isinstance(stop_reason, str):
        return "ended by a stop string"
    if content != content.strip():
        return "white space at an end of the reply"
    if content.endswith("�"):
        return "cut inside a character"
    return None if finish_reason in ("stop", "length") else "unusual finish reason"


def _has_reasoning(message: Mapping[str, Any], content: Any) -> bool:
    """Also without a reasoning parser: many templates cut everything up to the closing tag out of an older message."""
    if isinstance(content, str) and "think>" in content:
        return True
    return len(message) > 2 and any(message.get(name) for name in _REASONING)


def _joined(parts: list[Any]) -> Any:
    """The text of an assistant message that a client sends back as parts, or the parts if there is more than text."""
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif (
            isinstance(part, dict) and part.get("type") in ("text", "output_text") and isinstance(part.get("text"), str)
        ):
            texts.append(part["text"])
        else:
            return parts
    return "".join(texts)


def _calls(calls: Any) -> Any:
    """Tool calls by what a template can render; a stream's `index` is not part of the message."""
    if not isinstance(calls, list):
        return calls
    return [_call(call) if isinstance(call, dict) else call for call in calls]


def _call(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    known = [
        call.get("id") or "",
        call.get("type") or "function",
        function.get("name") or "",
        function.get("arguments") or "",
    ]
    rest = {name: value for name, value in call.items() if value and name not in ("id", "type", "function", "index")}
    more = {name: value for name, value in function.items() if value and name not in ("name", "arguments")}
    return [*known, rest, more] if rest or more else known


def _note_parts(found: Conversation, role: str, content: Any) -> None:
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None and isinstance(part, dict) and part.keys() == {"text"}:
            continue
        if kind == "thinking":
            found.inexact = "reasoning in the history"
        elif kind not in _TEXT_PARTS:
            found.media = True
    if role == "assistant" and found.inexact is None:
        found.inexact = "assistant content in parts"
