"""What each request field means to the router, one table per API.

Separate from the code that applies it because a vLLM upgrade changes this page and nothing else. Checked against the
request classes and the renderers of vLLM 0.32. A field that no table names is treated as one that shapes the prompt: an
unknown field then costs a missed reuse at worst, never a wrong one. Fields of which a part shapes the prompt
(`thinking`, `output_config`) are taken apart in `anthropic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from pd_wire import names


class Api(StrEnum):
    """The APIs whose requests the router opens: OpenAI's three for text, and Anthropic's Messages."""

    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


STRIPPED: Final = frozenset({"kvtransferparams", "ectransferparams"})
"""Never taken from a client, in any spelling: both steer an engine's connections to a host of the sender's choice."""

CARRIERS: Final = ("extra_body", "vllm_xargs", "extra_args", "sampling_params")
"""Objects inside a body that engines or client libraries unpack into the request itself."""

KNOWN_IDS: Final[Mapping[Api, frozenset[str]]] = MappingProxyType(
    {
        Api.CHAT: frozenset({"session_id"}),
        Api.COMPLETIONS: frozenset({"session_id"}),
        Api.RESPONSES: frozenset({"session_id", "prompt_cache_key"}),
        Api.MESSAGES: frozenset(),
    }
)
"""Conversation id fields that vLLM has itself and may see. `previous_response_id` is among those of its Responses API;
the router puts the items that it stands for in its place, since no engine has them all. `conversation_id` exists
nowhere."""

UNKNOWN_IDS: Final[Mapping[Api, frozenset[str]]] = MappingProxyType(
    {api: frozenset(names.ID_FIELDS) - known for api, known in KNOWN_IDS.items()}
)

PROMPT: Final[Mapping[Api, str]] = MappingProxyType(
    {Api.CHAT: "messages", Api.COMPLETIONS: "prompt", Api.RESPONSES: "input", Api.MESSAGES: "messages"}
)

OWN_ANSWER_ID: Final = frozenset({Api.RESPONSES, Api.MESSAGES})
"""APIs whose `request_id` is taken from no client: an answer's id names it later, so a client must not choose it."""

_SAMPLING: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "length_penalty",
        "watermarking",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "ignore_eos",
        "priority",
        "include_reasoning",
        "parallel_tool_calls",
        "routed_experts_prompt_start",
        "early_stopping",
        "max_tool_calls",
    }
)
"""Shape the output only and do no harm on a one-token prefill; kept there so that P refuses bad values early."""

_OUTPUT: Final = frozenset(
    {
        "stream",
        "stream_options",
        "stream_interval",
        "n",
        "best_of",
        "use_beam_search",
        "min_tokens",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "include_stop_str_in_output",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "repetition_detection",
        "thinking_token_budget",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "include",
        "text",
        "enable_response_messages",
        "mm_payload",
        "return_mm_kwargs",
    }
)
"""Shape, limit, constrain or parse the output: wrong or useless on a prefill of one token (RP-08, RP-09)."""

_BOOKKEEPING: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id"),
        *("prompt_cache_options", "prompt_cache_retention", names.KV_PARAMS, *names.ID_FIELDS),
    }
)

RENDERED_BY_SOME: Final = frozenset({"response_format", "tool_choice"})
"""Kimi K3's renderer writes both into the prompt, Cohere's the first; most write neither, and agents change both from
turn to turn. They are part of the scope, and kept on the prefill leg, only where a deployment says that its renderer
uses them; elsewhere a turn that sets one needs a proof. A `tool_choice` of none is always part of it, as it may hide
the tools."""

PREFILL_DROPPED: Final = _OUTPUT | {"response_format"}
NOT_IN_PROMPT: Final = _SAMPLING | _OUTPUT | _BOOKKEEPING

PREFILL_FORCED: Final[Mapping[Api, Mapping[str, Any]]] = MappingProxyType(
    {
        # vLLM prefers max_completion_tokens where both are given; older releases know only max_tokens.
        Api.CHAT: MappingProxyType({"max_tokens": 1, "max_completion_tokens": 1, "stream": False}),
        Api.COMPLETIONS: MappingProxyType({"max_tokens": 1, "stream": False}),
        # An engine that keeps responses would keep this one, too, and never forget it.
        Api.RESPONSES: MappingProxyType({"max_output_tokens": 1, "stream": False, "store": False}),
        Api.MESSAGES: MappingProxyType({"max_tokens": 1, "stream": False}),
    }
)

SCOPE_DEFAULTS: Final[Mapping[Api, Mapping[str, Any]]] = MappingProxyType(
    {
        Api.CHAT: MappingProxyType(
            {
                "tool_choice": "auto",
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
            }
        ),
        Api.COMPLETIONS: MappingProxyType({"add_special_tokens": True}),
        Api.RESPONSES: MappingProxyType({"tool_choice": "auto", "truncation": "disabled", "tools": []}),
        Api.MESSAGES: MappingProxyType({"tool_choice": {"type": "auto"}}),
    }
)
"""Saying a default aloud is the same as leaving it out, so it gives the same scope."""
