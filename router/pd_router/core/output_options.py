"""Bad output options, refused before any engine works: P never sees them, and D would refuse them after the prefill.

Separate from `fields` (what is dropped from the prefill leg) because these are rules about values. Only rules that hold
for every engine are here; they are those of vLLM 0.32's request classes and of `SamplingParams.verify`. What depends on
the engine's flags or its tokenizer is left to D. Null passes everywhere: it is the same as absent, or D says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from pd_router.core.errors import bad_field
from pd_router.core.fields import Api

_LARGEST_VOCABULARY: Final = 2**19
"""An engine's limit of log-probabilities is its `--max-logprobs`, which the router doesn't know: 20, or more, or the
vocabulary. No model has one of this size."""

Check = Callable[[Any], bool]
Rule = tuple[Check, str]


def check_output(api: Api, body: Mapping[str, Any]) -> None:
    """Raise ApiError 400 that names the first field whose value no engine takes."""
    for name, (passes, allowed) in _RULES[api].items():
        value = body.get(name)
        if value is not None and not passes(value):
            raise bad_field(name, allowed)
    if body.get("stream_options") and not body.get("stream"):
        raise bad_field("stream_options", "left out unless stream is true")
    if api is Api.CHAT and body.get("top_logprobs") and not body.get("logprobs"):
        raise bad_field("top_logprobs", "left out unless logprobs is true")
    if api is Api.COMPLETIONS and body.get("max_tokens") == 0 and not body.get("echo"):
        raise bad_field("max_tokens", "an integer of at least 1, or 0 with echo")
    limit = _limit(api, body)
    if api is Api.MESSAGES and limit is None:
        raise bad_field("max_tokens", "given: an integer of at least 1")
    minimum = body.get("min_tokens")
    if limit is not None and minimum is not None and minimum > limit:
        raise bad_field("min_tokens", f"at most {limit}, the limit of output tokens")


def _limit(api: Api, body: Mapping[str, Any]) -> Any:
    if api is Api.RESPONSES:
        return body.get("max_output_tokens")
    longer = body.get("max_completion_tokens") if api is Api.CHAT else None
    return body.get("max_tokens") if longer is None else longer


def _at_least(least: int, most: float = float("inf")) -> Check:
    # 5.0 is an integer in JSON, and vLLM takes it.
    return lambda value: (
        (type(value) is int or (type(value) is float and value.is_integer())) and least <= value <= most
    )


def _is_object(value: Any) -> bool:
    return type(value) is dict


def _are_texts(value: Any) -> bool:
    return type(value) is list and all(type(text) is str and text for text in value)


def _is_stop(value: Any) -> bool:
    return (type(value) is str and value != "") or _are_texts(value)


def _are_ids(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int}


def _are_biases(value: Any) -> bool:
    return type(value) is dict and set(map(type, value.values())) <= {int, float} and all(map(_is_id, value))


def _is_id(name: str) -> bool:
    return name.strip().removeprefix("-").isdecimal()


def _is_switch(value: Any) -> bool:
    # Also 0 and 1: vLLM takes them.
    return type(value) in (bool, int) and value in (0, 1)


def _is_format(value: Any) -> bool:
    return type(value) is dict and type(value.get("type")) is str


def _is_choice(value: Any) -> bool:
    return type(value) is dict or value in ("none", "auto", "required")


def _is_anthropic_choice(value: Any) -> bool:
    return type(value) is dict and value.get("type") in ("auto", "any", "tool", "none")


_LOGPROBS: Final[Rule] = (
    _at_least(-1, _LARGEST_VOCABULARY),
    f"an integer from -1, which is all, to {_LARGEST_VOCABULARY}",
)
_TOKENS: Final[Rule] = (_at_least(1), "an integer of at least 1")
_IDS: Final[Rule] = (_are_ids, "a list of integer token ids")

_BOTH: Final[Mapping[str, Rule]] = {
    "n": _TOKENS,
    "best_of": _TOKENS,
    "min_tokens": (_at_least(0), "an integer of at least 0"),
    "stop": (_is_stop, "a string or a list of strings, none of them empty"),
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "logprob_token_ids": _IDS,
    "bad_words": (_are_texts, "a list of strings, none of them empty"),
    "logit_bias": (_are_biases, "an object of token ids and numbers"),
    "stream_options": (_is_object, "an object"),
    "stream_interval": _TOKENS,
    "structured_outputs": (_is_object, "an object"),
    "response_format": (_is_format, "an object with a type that is a string"),
    "thinking_token_budget": (_at_least(-1), "an integer of at least 0, or -1 for no limit"),
}

_RULES: Final[Mapping[Api, Mapping[str, Rule]]] = MappingProxyType(
    {
        Api.CHAT: {
            **_BOTH,
            "max_tokens": _TOKENS,
            "max_completion_tokens": _TOKENS,
            "logprobs": (_is_switch, "true, false or null"),
            "top_logprobs": _LOGPROBS,
            "tool_choice": (_is_choice, "none, auto, required or an object"),
        },
        Api.COMPLETIONS: {
            **_BOTH,
            "max_tokens": (_at_least(0), "an integer of at least 0"),
            "logprobs": _LOGPROBS,
        },
        Api.RESPONSES: {
            "max_output_tokens": _TOKENS,
            "stop": _BOTH["stop"],
            "stop_token_ids": _IDS,
            "logit_bias": _BOTH["logit_bias"],
            "top_logprobs": _LOGPROBS,
            "text": (_is_object, "an object"),
            "structured_outputs": _BOTH["structured_outputs"],
            "tool_choice": (_is_choice, "none, auto, required or an object"),
        },
        Api.MESSAGES: {
            "max_tokens": _TOKENS,
            "stop_sequences": (_are_texts, "a list of strings, none of them empty"),
            "thinking": (_is_object, "an object"),
            "output_config": (_is_object, "an object"),
            "tool_choice": (_is_anthropic_choice, "an object with a type of auto, any, tool or none"),
        },
    }
)
