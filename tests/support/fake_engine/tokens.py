"""The fake model's tokenizer and chat template: deterministic, byte-level, with the known traps as options.

Separate because a test's expectation (`expected_answer`) and the engine must render the same prompt. One UTF-8 byte is
one token, so text that is sent back re-tokenises to the ids that were generated; the options of `Template` switch on
the ways in which a real template breaks that (HL-01).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ROLES: Final = {"system": 256, "user": 257, "assistant": 258, "tool": 259, "developer": 260, "function": 259}
END: Final = 270
TOOLS: Final = 271
OPTIONS: Final = 272
IMAGE: Final = 273
LITERALS: Final = {"<think>": 280, "</think>": 281, "<tool_call>": 282, "</tool_call>": 283}
UNUSUAL: Final = 1000
"""Added to the id of an ASCII letter by a model that splits text in another way than the tokenizer does."""

_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in LITERALS) + ")")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_TEXT_OF = {number: text for text, number in LITERALS.items()}
# Everything besides the messages that a template can see (IS-04).
_OPTIONS = ("documents", "reasoning_effort", "chat_template_kwargs", "chat_template", "continue_final_message")


class PromptError(ValueError):
    """The request cannot be rendered; an engine answers 400."""


def encode(text: str) -> list[int]:
    """Token ids of ``text``: its UTF-8 bytes, with the few special strings as one token each."""
    ids: list[int] = []
    for part in _SPLIT.split(text):
        special = LITERALS.get(part)
        ids.extend([special] if special is not None else part.encode("utf-8", "surrogatepass"))
    return ids


def decode(tokens: Sequence[int]) -> str:
    """Text of ``tokens``; ids that stand for no text (role marks, end marks) are left out."""
    out = bytearray()
    for token in tokens:
        plain = token - UNUSUAL if token >= UNUSUAL else token
        if plain < 256:
            out.append(plain)
        elif plain in _TEXT_OF:
            out += _TEXT_OF[plain].encode()
    return out.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat becomes a prompt.

    Attributes:
        strips_reasoning: earlier assistant turns lose their thinking, as most reasoning models' templates do.
        reserialises_tools: a tool call's arguments are written in another JSON spacing than the model generated.
    """

    strips_reasoning: bool = False
    reserialises_tools: bool = False

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """Prompt ids of a chat body.

        Raises:
            PromptError: for messages that no template could render.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise PromptError("messages must be a non-empty list")
        ids: list[int] = []
        if body.get("tools") and body.get("tool_choice") != "none":
            ids += [TOOLS, *encode(json.dumps(body["tools"])), END]
        for name in _OPTIONS:
            if body.get(name):
                ids += [OPTIONS, *encode(f"{name}={json.dumps(body[name])}"), END]
        for message in messages:
            ids += self._message(message)
        ids.append(ROLES["assistant"])
        return _cut(ids, body)

    def _message(self, message: Any) -> list[int]:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise PromptError("each message must be an object with a known role")
        ids = [ROLES[message["role"]]]
        text, parts = _content(message.get("content"))
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if message["role"] == "assistant" and self.strips_reasoning:
            text = _THOUGHT.sub("", text)
        elif reasoning:
            text = f"<think>{reasoning}</think>{text}"
        ids += encode(text) + parts
        for call in message.get("tool_calls") or ():
            ids += encode(self._call(call["function"]))
        if message.get("tool_call_id"):
            ids += encode(f"[{message['tool_call_id']}]")
        return [*ids, END]

    def _call(self, function: Mapping[str, Any]) -> str:
        arguments = function["arguments"]
        if self.reserialises_tools:
            arguments = json.dumps(json.loads(arguments), separators=(",", ":"))
        return call_text(function["name"], arguments)


def call_text(name: str, arguments: str) -> str:
    """A tool call as the model writes it; ``arguments`` is JSON text and is kept as it is."""
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


def completion_prompts(body: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of a completions body: text or token ids, one or several.

    Raises:
        PromptError: when ``prompt`` is none of these.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [_cut(encode(prompt), body)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [_cut(list(prompt), body)]
        if all(isinstance(item, str) for item in prompt):
            return [_cut(encode(item), body) for item in prompt]
        if all(isinstance(item, list) and item for item in prompt):
            return [_cut(list(item), body) for item in prompt]
    raise PromptError("prompt must be text, token ids, or a list of either")


def _content(content: Any) -> tuple[str, list[int]]:
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise PromptError("content must be text or a list of parts")
    text, media = "", []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "text":
            text += part["text"]
        else:
            digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).digest()
            media += [IMAGE, *digest]
    return text, media


def _cut(ids: list[int], body: Mapping[str, Any]) -> list[int]:
    keep = body.get("truncate_prompt_tokens")
    return ids[-keep:] if isinstance(keep, int) and keep > 0 else ids
