"""What the fake model says: a text that names the hash of the KV it was computed from.

Separate from the engine so that a test can say what the right answer is (`expected_answer`) without an engine: wrong KV
then shows as a wrong answer, never only as a log line.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from support.fake_engine.tokens import END, LITERALS, UNUSUAL, call_text, decode, encode

WORDS: Final = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron",
    "iris", "juniper", "kelp", "lotus", "maple", "nectar", "opal", "pine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The shape of an answer; the hash in it always comes from the KV.

    Attributes:
        words: filler words after the hash.
        tail: text appended as it is (emoji, CJK, something huge).
        reasoning: thinking in front of the answer: none, parsed into the ``reasoning`` field, or inline in the content.
        calls_tool: call the first offered tool instead of answering, unless a tool's result came last.
        unusual_ids: generate ids that differ from what the tokenizer makes of the same text.
    """

    words: int = 4
    tail: str = ""
    reasoning: Literal["none", "field", "inline"] = "none"
    calls_tool: bool = False
    unusual_ids: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. ``tokens`` are the generated ids, the end mark included unless the limit cut it off."""

    content: str
    reasoning: str | None
    tool: tuple[str, str] | None
    tokens: tuple[int, ...]
    stopped: bool


@dataclass(slots=True)
class BlockContent:
    """What a KV block holds: the ids of its positions, and what was in front of it when they were computed."""

    context: bytes
    tokens: list[int]


def root_context(model: str) -> bytes:
    """Context of the first block: the KV of one adapter is not the KV of another."""
    return hashlib.blake2b(model.encode(), digest_size=8).digest()


def next_context(content: BlockContent) -> bytes:
    """Context of the block after a full block; depends on everything in front of it, as attention does."""
    return hashlib.blake2b(content.context + _packed(content.tokens), digest_size=8).digest()


def compute_blocks(tokens: Sequence[int], block_tokens: int, context: bytes) -> list[BlockContent]:
    """The KV of ``tokens`` computed from scratch after ``context``."""
    blocks = []
    for start in range(0, len(tokens), block_tokens):
        block = BlockContent(context, list(tokens[start : start + block_tokens]))
        context = next_context(block)
        blocks.append(block)
    return blocks


def kv_hash(contents: Iterable[BlockContent], length: int) -> str:
    """Hash of the KV of the first ``length`` positions, as 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        held = content.tokens[:length]
        digest.update(content.context + _packed(held))
        length -= len(held)
        if length <= 0:
            break
    return digest.hexdigest()


def make_answer(kv: str, style: AnswerStyle, body: Mapping[str, Any], choice: int, limit: int | None) -> Answer:
    """What the model generates from KV with the hash ``kv``; ``limit`` is in tokens."""
    text = _speech(kv, style, choice)
    name = _tool_name(style, body)
    if name is not None:
        call = call_text(name, json.dumps({"kv": kv, "unit": "celsius"}))
        tokens = [*encode(call), END]
    else:
        thought = f"<think>weighing {kv[:6]}</think>" if style.reasoning != "none" else ""
        tokens = [*encode(thought + text), END]
    if style.unusual_ids:
        tokens = [UNUSUAL + token if 97 <= token <= 122 else token for token in tokens]
    stopped = limit is None or len(tokens) <= limit
    return _parse(tokens if stopped else tokens[:limit], style, stopped)


def expected_answer(
    prompt: Sequence[int],
    *,
    model: str,
    style: AnswerStyle | None = None,
    body: Mapping[str, Any] | None = None,
    choice: int = 0,
    limit: int | None = None,
    block_tokens: int = 16,
) -> Answer:
    """The right answer to ``prompt``: computed in full, with nothing taken from any other engine."""
    kv = kv_hash(compute_blocks(prompt, block_tokens, root_context(model)), len(prompt))
    return make_answer(kv, style or AnswerStyle(), body or {}, choice, limit)


def _speech(kv: str, style: AnswerStyle, choice: int) -> str:
    numbers = hashlib.blake2b(f"{kv}/{choice}".encode(), digest_size=64).digest()
    words = " ".join(WORDS[number % len(WORDS)] for number in (numbers * (style.words // 64 + 1))[: style.words])
    return f"kv={kv} choice={choice} {words}{style.tail}"


def _tool_name(style: AnswerStyle, body: Mapping[str, Any]) -> str | None:
    tools = body.get("tools")
    if not style.calls_tool or not tools or body.get("tool_choice") == "none":
        return None
    if body["messages"][-1]["role"] == "tool":
        return None
    return str(tools[0]["function"]["name"])


def _parse(tokens: Sequence[int], style: AnswerStyle, stopped: bool) -> Answer:
    """Split generated ids into reasoning, tool call and content, as an engine's parsers do."""
    ids = tuple(tokens)
    close = LITERALS["</tool_call>"]
    if ids and ids[0] == LITERALS["<tool_call>"] and close in ids:
        call = json.loads(decode(ids[1 : ids.index(close)]))
        return Answer("", None, (call["name"], json.dumps(call["arguments"])), ids, stopped)
    reasoning = None
    spoken = ids
    if style.reasoning == "field":
        shut = LITERALS["</think>"]
        cut = ids.index(shut) if shut in ids else len(ids)
        reasoning, spoken = decode(ids[1:cut]), ids[cut + 1 :]
    return Answer(decode(spoken), reasoning, None, ids, stopped)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()
