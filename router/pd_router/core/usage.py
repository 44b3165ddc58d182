"""How many prompt tokens were reused, told to the client as P knows it (BM-01).

Separate from the other cutting because this changes a number instead of removing a name. D reads the whole prompt from
P and counts it as cached; what saved work is what P had or read back. From 0.32 on vLLM's P tells D; for older
releases it is done here. A count that the answer does not have is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pd_router.core.cutting import Span, read_value, skip_space, splice
from pd_router.core.fields import Api
from pd_router.core.jsontext import encode

USAGE: Final = b'"usage"'
TOLD_TO_DECODE: Final = "remote_prefill_cached_tokens"
"""In P's params where vLLM itself lets D tell the right count, so that no read of a stream is searched for one."""
_BACKSLASH: Final = 0x5C
_COLON: Final = 0x3A

Correct = Callable[[bytes], bytes]
"""Takes an answer or whole events of one, gives them with the right counts."""


def corrector(api: Api, reused: int | None) -> Correct:
    """Make what corrects the answers of `api`.

    Args:
        reused: tokens of the prompt that P did not compute; None when P did not say.
    """
    correct = _CORRECT[api]

    def corrected(text: bytes) -> bytes:
        spans: list[Span] = []
        values: list[bytes] = []
        at = text.find(USAGE)
        while at >= 0:
            after = skip_space(text, at + len(USAGE))
            if (not at or text[at - 1] != _BACKSLASH) and after < len(text) and text[after] == _COLON:
                start = skip_space(text, after + 1)
                read = read_value(text, start) if text[start : start + 1] == b"{" else None
                changed = correct(read[0], reused) if read is not None else None
                if read is not None and changed is not None:
                    spans.append((start, read[1]))
                    values.append(encode(changed))
            at = text.find(USAGE, at + 1)
        return splice(text, spans, values) if spans else text

    return corrected


def reused_tokens(cached: int | None, local: int | None, pulled: int | None) -> int | None:
    """P's count: its usage, which has both; else its connector's report. None when there is neither."""
    if cached is not None:
        return cached
    return None if local is None or pulled is None else local + pulled


def _openai(usage: Mapping[str, Any], reused: int | None) -> dict[str, Any] | None:
    return _details(usage, "prompt_tokens", "prompt_tokens_details", reused)


def _responses(usage: Mapping[str, Any], reused: int | None) -> dict[str, Any] | None:
    # Clients take the count for an integer that is always there.
    made = _details(usage, "input_tokens", "input_tokens_details", reused or 0)
    details = made["input_tokens_details"] if made is not None else {}
    if made is not None and type(details.get("cached_tokens_per_turn")) is list:
        made["input_tokens_details"] = {**details, "cached_tokens_per_turn": [details["cached_tokens"]]}
    return made


def _details(usage: Mapping[str, Any], total: str, name: str, reused: int | None) -> dict[str, Any] | None:
    details, tokens = usage.get(name), usage.get(total)
    if type(details) is not dict or type(details.get("cached_tokens")) is not int or type(tokens) is not int:
        return None
    right = min(reused, tokens) if reused is not None else None
    return None if details["cached_tokens"] == right else {**usage, name: {**details, "cached_tokens": right}}


def _messages(usage: Mapping[str, Any], reused: int | None) -> dict[str, Any] | None:
    read, rest = usage.get("cache_read_input_tokens"), usage.get("input_tokens")
    if type(read) is not int or type(rest) is not int:
        return None
    right = min(reused or 0, read + rest)
    if right == read:
        return None
    # The API counts what was read apart from the other input.
    return {
        **usage,
        "input_tokens": read + rest - right,
        "cache_read_input_tokens": right if reused is not None else None,
    }


_CORRECT: Final[Mapping[Api, Callable[[Mapping[str, Any], int | None], dict[str, Any] | None]]] = {
    Api.CHAT: _openai,
    Api.COMPLETIONS: _openai,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
}
