"""One client request, opened once: what it asks for, what may be linked to it, and the bodies of its two legs.

Separate from routing because everything here follows from the bytes alone. Two rules shape the code. A body is parsed
and written again rather than edited in place, so that an engine reads exactly what was checked (duplicate keys, odd
escapes and spellings cannot mean one thing here and another there). And both legs are built from the sanitised
original, never one from the other, so that nothing done for the prefill can reach the client's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pd_router.core import anthropic, errors, facts, fields, output_options, sanitize
from pd_router.core.cutting import Handle
from pd_router.core.errors import ApiError
from pd_router.core.fields import Api
from pd_router.core.history import Reply, extend
from pd_router.core.jsontext import RawJson, decode_exactly, encode, lost_integers
from pd_router.core.responses import Recall
from pd_wire.names import KV_PARAMS, REPORT_KEY, RETAIN_KEY

__all__ = ["FIRST_PREFILL", "Api", "Prepared", "prepare"]

FIRST_PREFILL: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill leg carries when there is no handle to read from."""

BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed the checks. Immutable; `prefill_body` and `decode_body` build new bytes each time."""

    api: Api
    model: str
    stream: bool
    ids: tuple[tuple[str, str], ...]
    """(name of the field or header, value) of every conversation id, most trusted first."""
    two_legs: bool
    """False: decode engine alone and no `kv_transfer_params` at all."""
    link_fault: str | None
    """Why no handle may be looked up or kept for this turn, or None."""
    inexact: str | None
    """Why the history alone does not prove that the prompt extends a stored turn; a handle with a proof still may."""
    scope: bytes
    """Digest of everything besides the messages that shapes the prompt."""
    history: tuple[bytes, ...]
    """Digests of prefixes that may be a stored turn, longest first. Empty for completions: see `facts.read_prompt`."""
    prompt_tokens_estimate: int
    new_tokens_estimate: int
    """Of what comes after the last assistant message; the whole prompt for completions."""
    items: tuple[Any, ...] | None
    """For responses: what this turn adds, which the next may name by the answer's id. None: it is not to be kept."""
    _body: Mapping[str, Any]
    _chain: Any
    _kept: frozenset[str]

    def prefill_body(self, handle: Mapping[str, Any] | RawJson | None) -> bytes:
        """The prefill leg: one token, not streamed, nothing that constrains or parses output; the same prompt.

        Args:
            handle: sent as it is, unknown keys included; None asks for a prefill without a read.
        """
        dropped = fields.PREFILL_DROPPED
        kept = self._kept
        whole = anthropic.prompt_side(self._body) if self.api is Api.MESSAGES else self._body
        body = {name: value for name, value in whole.items() if name not in dropped or name in kept}
        choice = body.get("tool_choice")
        if choice is not None and not _is_free(choice) and "tool_choice" not in kept:
            # A forced call cannot be parsed from one token. Left out, it reads as "auto", which renders the same tools;
            # "none" stays, because some engines leave the tools out of the prompt then.
            del body["tool_choice"]
        body.update(fields.PREFILL_FORCED[self.api])
        body[KV_PARAMS] = FIRST_PREFILL if handle is None else handle
        return _encode(body)

    def decode_body(self, params: Mapping[str, Any] | None, retain: bool = True) -> bytes:
        """The decode leg: the client's body, plus P's params.

        Args:
            params: what the prefill leg answered; None leaves the field out altogether, which alone is safe: an object
                without a task pins blocks that nothing frees (HL-09).
            retain: False tells our connector to free the blocks at the end of the turn.
        """
        if params is None:
            return _encode(self._body)
        sent = _encode(_for_decode(params, retain))
        if isinstance(params, Handle) and lost_integers(sent):
            sent = _encode(_for_decode(decode_exactly(params.raw), retain))
        return _encode({**self._body, KV_PARAMS: RawJson(sent)})

    def prompt_digest(self) -> bytes | None:
        """Digest of all messages as sent; None for completions."""
        if self._chain is None:
            return None
        digest: bytes = self._chain.digest()
        return digest

    def history_with(self, reply: Reply) -> bytes | None:
        """Digest under which this turn can be found once `reply` is part of the history; None for completions."""
        return None if self._chain is None else extend(self._chain, reply)


def prepare(
    api: Api,
    raw: bytes,
    headers: Mapping[str, str],
    known_models: frozenset[str],
    rendered: frozenset[str] = frozenset(),
    recall: Recall | None = None,
) -> Prepared:
    """Check and open one request.

    Args:
        api: which API the path belongs to.
        raw: the body.
        headers: lower-case names.
        known_models: names that the engines serve; empty means not known yet, then any name passes.
        rendered: those of `fields.RENDERED_BY_SOME` that this deployment's renderer writes into the prompt.
        recall: gives the items behind a `previous_response_id` of this caller; None when none are kept.

    Raises:
        ApiError: 400 or 404, naming the field and what is allowed.
    """
    body = _parse(raw)
    try:
        return _prepare(api, body, len(raw), headers, known_models, rendered, recall)
    except _IntegersLost:
        return _prepare_exactly(api, raw, headers, known_models, rendered, recall)
    except ValueError as error:
        raise errors.malformed(str(error)) from error


class _IntegersLost(Exception):
    """An integer beyond 64 bits may have been read as a float."""


def _prepare_exactly(
    api: Api,
    raw: bytes,
    headers: Mapping[str, str],
    known_models: frozenset[str],
    rendered: frozenset[str],
    recall: Recall | None,
) -> Prepared:
    try:
        return _prepare(api, decode_exactly(raw), len(raw), headers, known_models, rendered, recall, exact=True)
    except ValueError as error:
        raise errors.malformed(str(error)) from error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise errors.malformed(str(error)) from error
    if type(body) is not dict:
        raise ApiError(400, "The body must be a JSON object", errors.INVALID_REQUEST, "malformed_json")
    return body


def _prepare(
    api: Api,
    body: dict[str, Any],
    size: int,
    headers: Mapping[str, str],
    known_models: frozenset[str],
    rendered: frozenset[str],
    recall: Recall | None,
    exact: bool = False,
) -> Prepared:
    sanitize.strip_body(body, fields.PROMPT[api])
    if api in fields.OWN_ANSWER_ID:
        body.pop("request_id", None)
    model = facts.read_model(body, known_models)
    prompt = facts.open_prompt(api, body, recall)
    ids = facts.read_ids(body, headers, fields.UNKNOWN_IDS[api])
    alone = facts.decode_alone(api, body, prompt)
    output_options.check_output(api, body)
    fault = alone or facts.link_fault(body, prompt)
    scope, readable = facts.read_scope(api, body, model, rendered)
    if not exact and (prompt.lossy or lost_integers(readable)):
        raise _IntegersLost
    talk = prompt.conversation
    inexact = facts.inexact_option(body) if talk is not None else "completions are linked by id only"
    linked = talk if fault is None else None
    if prompt.continues:
        size = len(encode(body["input"]))  # with the items of earlier turns, which were not in the bytes
    tokens = prompt.tokens or size // BYTES_PER_TOKEN
    return Prepared(
        api,
        model,
        facts.read_flag(body, "stream"),
        ids,
        alone is None,
        fault,
        inexact or (talk.inexact if talk is not None else None),
        scope,
        linked.prefixes if linked is not None else (),
        tokens,
        talk.tail_bytes // BYTES_PER_TOKEN if talk is not None else tokens,
        tuple(prompt.items) if prompt.items is not None and body.get("store") is not False else None,
        body,
        linked.chain if linked is not None else None,
        rendered,
    )


def _is_free(choice: Any) -> bool:
    """Whether a tool choice forces no call."""
    kind = choice.get("type") if type(choice) is dict else choice
    return kind in ("auto", "none")


def _for_decode(params: Mapping[str, Any], retain: bool) -> dict[str, Any]:
    sent = {name: value for name, value in params.items() if name != REPORT_KEY}
    if not retain:
        sent[RETAIN_KEY] = False
    return sent


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return encode(body)
    except ValueError as error:
        raise errors.malformed(str(error)) from error
