"""What the fields of one request say: which model, which ids, one leg or two, linkable or not, which scope.

Separate from `request` (which ties the answers together and builds bodies) so that each question is one function over a
parsed body. The router interprets few fields and is strict about those: a value that vLLM would coerce ("n": "2") and
the router would read differently must not pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_router.core import anthropic, history, responses
from pd_router.core.errors import bad_field, unknown_model
from pd_router.core.fields import NOT_IN_PROMPT, PROMPT, RENDERED_BY_SOME, SCOPE_DEFAULTS, Api
from pd_router.core.jsontext import encode
from pd_router.core.sanitize import strip_deep
from pd_wire.names import ID_FIELDS, ID_HEADERS

_ROLES: Final = "a list of objects, each with a role that is a string"
_CONTENT: Final = "a string, a list of parts, or null"
_PROMPT: Final = "a string, a list of strings, a list of integer token ids, or a list of such lists"
_UNSET: Final = object()
_PERSONS: Final[Mapping[Api, bytes]] = {
    Api.CHAT: b"chat",
    Api.COMPLETIONS: b"completions",
    Api.RESPONSES: b"responses",
    Api.MESSAGES: b"messages",
}
_MAY_HOLD_INTEGERS: Final = frozenset({dict, list, float})
_MOVES_THE_PROMPT: Final = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "continue_final_message",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the prompt itself says. `conversation` is None for completions; `tokens` is 0 when unknown; `lossy`: an
    integer beyond 64 bits may have been read as a float; `items`: those that a turn of the Responses API adds;
    `continues`: earlier ones were put before them."""

    conversation: history.Conversation | None
    tokens: int = 0
    several: bool = False
    lossy: bool = False
    items: list[Any] | None = None
    continues: bool = False


def read_model(body: Mapping[str, Any], known: frozenset[str]) -> str:
    """The model asked for, or the only one there is. Raises ApiError 400 or 404."""
    model = body.get("model")
    if model is None:
        if len(known) == 1:
            return next(iter(known))
        raise bad_field("model", "given" if not known else "one of: " + ", ".join(sorted(known)[:20]))
    if type(model) is not str:
        raise bad_field("model", "a string")
    if known and model not in known:
        raise unknown_model(model, known)
    return model


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean that may be null. Raises ApiError 400."""
    value = body.get(name)
    if value is None or value is False:
        return False
    if value is True:
        return True
    raise bad_field(name, "true, false or null")


def read_count(body: Mapping[str, Any], name: str) -> int | None:
    """An integer that may be null. Raises ApiError 400."""
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    raise bad_field(name, "an integer or null")


def read_ids(body: dict[str, Any], headers: Mapping[str, str], unknown: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """The conversation ids, and remove from `body` those that the engine does not know. Raises ApiError 400."""
    found: list[tuple[str, str]] = []
    for name in ID_FIELDS:
        if name not in body:
            continue
        value = body.pop(name) if name in unknown else body[name]
        if type(value) is int:
            value = str(value)
        if type(value) is str:
            if value:
                found.append((name, value))
        elif value is not None:
            raise bad_field(name, "a string or null")
    for name in ID_HEADERS:
        value = headers.get(name)
        if value:
            found.append((name, value if value.isascii() else _as_sent(value)))
    return tuple(found)


def id_text(raw: bytes) -> str:
    """The bytes of an id outside JSON, in a header or a path, as text: UTF-8, or Latin-1 where they are none. So an id
    is the same one wherever a client names it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _as_sent(value: str) -> str:
    """The same of a header's value, which was read as Latin-1."""
    try:
        return id_text(value.encode("latin-1"))
    except UnicodeEncodeError:
        return value


def open_prompt(api: Api, body: dict[str, Any], recall: responses.Recall | None) -> Prompt:
    """Check and digest the prompt of any API; forbidden keys in it are removed.

    Raises:
        ApiError: 400 or 404.
        ValueError: nested too deeply.
    """
    match api:
        case Api.CHAT:
            return read_messages(body)
        case Api.COMPLETIONS:
            return read_prompt(body)
        case Api.RESPONSES:
            responses.check_options(body)
            given = responses.check_items(body)
            lossy = strip_deep(given)
            whole = responses.continue_from(body, given, recall)
            return Prompt(responses.conversation(whole), lossy=lossy, items=given, continues=whole is not given)
        case Api.MESSAGES:
            messages = anthropic.check_messages(body.get("messages"))
            lossy = strip_deep(messages)
            return Prompt(anthropic.conversation(messages), lossy=lossy)


def read_messages(body: Mapping[str, Any]) -> Prompt:
    """Check and digest chat messages; forbidden keys below them are removed. Raises ApiError 400, ValueError."""
    messages = body.get("messages")
    if type(messages) is not list or not messages:
        raise bad_field("messages", _ROLES)
    lossy = False
    for index, message in enumerate(messages):
        if type(message) is not dict or type(message.get("role")) is not str:
            raise bad_field(f"messages[{index}]", "an object with a role that is a string")
        content = message.get("content")
        if type(content) is not str:
            if content is not None and type(content) is not list:
                raise bad_field(f"messages[{index}].content", _CONTENT)
            lossy |= strip_deep(message)
        elif len(message) > 2:
            lossy |= strip_deep(message)
    return Prompt(history.read_messages(messages), lossy=lossy)


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    """Classify a completions prompt. Raises ApiError 400.

    Completions are linked by id only, never by history. The text of a prompt and its completion does not say how the
    joint was tokenised, so it could never be exact; and finding the longest stored prefix of a text of unknown length
    needs an index over lengths, for an API whose multi-turn users (benchmarks, agents with own templates) have ids.
    """
    prompt = body.get("prompt")
    if prompt is None or type(prompt) is str:
        return Prompt(None)
    if type(prompt) is not list:
        raise bad_field("prompt", _PROMPT)
    if not prompt:
        return Prompt(None)
    # Every element is looked at: an object among them would carry fields of its own to the engines.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return Prompt(None, len(prompt))
    if kinds == {str}:
        return Prompt(None, several=len(prompt) > 1)
    if kinds == {list} and all(set(map(type, one)) <= {int} for one in prompt):
        return Prompt(None, len(prompt[0]), several=len(prompt) > 1)
    raise bad_field("prompt", _PROMPT)


def decode_alone(api: Api, body: Mapping[str, Any], prompt: Prompt) -> str | None:
    """Why one engine must do the whole turn, or None (HL-19). Raises ApiError 400.

    Several sequences share one params object and only one child's blocks would ever be released; prompt
    log-probabilities and echo need the prompt computed where the answer is made.
    """
    if api is Api.MESSAGES:
        return None
    if api is Api.RESPONSES:
        return _responses_alone(body)
    if (read_count(body, "n") or 1) != 1:
        return "n > 1"
    if (read_count(body, "best_of") or 1) != 1:
        return "best_of > 1"
    if read_flag(body, "use_beam_search"):
        return "beam search"
    if prompt.several:
        return "several prompts"
    if read_flag(body, "echo"):
        return "echo"
    if read_count(body, "prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    if (read_count(body, "truncate_prompt_tokens") or 0) < 0:
        # "As long as the model allows" depends on the output limit, which differs between the legs.
        return "truncation to the model's limit"
    return None


def _responses_alone(body: Mapping[str, Any]) -> str | None:
    if responses.run_by_engine(body):
        return "tools that the engine runs"
    if body.get("previous_input_messages"):
        return "previous_input_messages"
    if body.get("truncation") not in (None, "disabled"):
        return "truncation to the model's limit"
    return None


def link_fault(body: Mapping[str, Any], prompt: Prompt) -> str | None:
    """Why this turn, though it may take two legs, can neither use a handle nor leave one. Raises ApiError 400."""
    if prompt.conversation is not None and prompt.conversation.media:
        # Pictures share placeholder tokens: equal tokens are no proof of equal KV.
        return "media"
    if read_count(body, "truncate_prompt_tokens") is not None:
        return "truncate_prompt_tokens"
    return None


def inexact_option(body: Mapping[str, Any]) -> str | None:
    """The option under which equal messages do not mean that the new prompt extends the old one, or None.

    Templates are free to put tools and documents before the last question, to leave out an empty thinking block that
    the generation prompt had, or to render anything at all; and reasoning that no client saw is in D's blocks.
    """
    for name in _MOVES_THE_PROMPT:
        if body.get(name):
            return name
    for name in RENDERED_BY_SOME:
        # Not part of the scope (see there), so two turns that differ in it meet; only a proof can tell them apart then.
        if body.get(name) is not None and body[name] != SCOPE_DEFAULTS[Api.CHAT].get(name):
            return name
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    if body.get("include_reasoning") is False:
        return "include_reasoning"
    return None


def says_none(choice: Any) -> bool:
    """Whether a tool choice, of OpenAI's or of Anthropic's API, is that of no tool."""
    return bool(choice == "none" or (type(choice) is dict and choice.get("type") == "none"))


def read_scope(api: Api, body: Mapping[str, Any], model: str, rendered: frozenset[str]) -> tuple[bytes, bytes]:
    """Digest of what besides the prompt field shapes the prompt, and the text in which lost integers would show.

    Raises:
        ApiError: 400, a system prompt of a wrong type.
        ValueError: nested too deeply.
    """
    prompt_field = PROMPT[api]
    defaults = SCOPE_DEFAULTS[api]
    shaping: dict[str, Any] = {}
    others: list[Any] = []
    for name, value in (anthropic.scope_side(body) if api is Api.MESSAGES else body).items():
        if name == prompt_field or value is None:
            continue
        if name in NOT_IN_PROMPT or (name in RENDERED_BY_SOME - rendered and not says_none(value)):
            if type(value) in _MAY_HOLD_INTEGERS:
                others.append(value)
        elif defaults.get(name, _UNSET) != value:
            shaping[name] = value
    shaping["model"] = model
    encoded = encode(shaping, sort=True)
    digest = hashlib.blake2b(encoded, digest_size=16, person=_PERSONS[api]).digest()
    return digest, encoded + encode(others) if others else encoded
