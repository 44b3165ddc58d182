"""What a request must never carry to an engine: the rules whose breach crashes, pins or poisons a real one.

Separate from the engine's behaviour because these are judgements about the sender. Most breaches do not make a fake
request fail, just as they do not make a real one fail; they are recorded and the test fails at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pd_wire import names
from pd_wire.handle import decoder_handle_fault, is_unpinned
from support.fake_engine.apis import LIMITS, Api
from support.fake_engine.fabric import Fabric

_IDS: Final = frozenset({"conversation_id", "prompt_cache_key", "previous_response_id"})
FOREIGN_FIELDS: Final[Mapping[Api, frozenset[str]]] = {
    "chat": _IDS,
    "completions": _IDS,
    "responses": frozenset({"conversation_id"}),
    "messages": _IDS | {"session_id", "request_id"},
}
"""Body fields that the endpoints of vLLM do not know."""

CONTENT_FIELDS: Final = frozenset(
    {
        "messages",
        "prompt",
        "input",
        "system",
        "instructions",
        "tools",
        "documents",
        "response_format",
        "structured_outputs",
        "guided_json",
        "metadata",
    }
)
"""Fields whose inside is the client's own text or schema and cannot steer a transfer."""

_FLAGS = ("do_remote_prefill", "do_remote_decode")


def parse_body(raw: bytes) -> tuple[dict[str, Any], list[str]]:
    """The body, and the names that stand twice in one object of it.

    Raises:
        ValueError: when it is no JSON object.
    """
    doubled: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                doubled.append(key)
            found[key] = value
        return found

    body = json.loads(raw, object_pairs_hook=collect)
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body, doubled


def breaches(
    role: Literal["prefill", "decode"], api: Api, body: Mapping[str, Any], doubled: list[str]
) -> Iterator[str]:
    """Rules that this body breaks by itself, whatever was issued before."""
    for key in doubled:
        yield f"field {key!r} stands twice"
    for key in FOREIGN_FIELDS[api] & body.keys():
        yield f"field {key!r} is unknown to the engine"
    yield from _smuggled(body)
    params = body.get(names.KV_PARAMS)
    if params is None:
        return
    if not isinstance(params, Mapping):
        yield f"{names.KV_PARAMS} must be an object"
        return
    flags = [flag for flag in _FLAGS if params.get(flag) is True]
    if len(flags) != 1:
        yield f"{names.KV_PARAMS} has {len(flags)} of its two flags set"
    expected = "do_remote_decode" if role == "prefill" else "do_remote_prefill"
    if flags and flags != [expected]:
        yield f"a {role} engine was sent {flags[0]}"
    if (body.get("n") or 1) > 1 or body.get("use_beam_search"):
        yield f"several choices together with {names.KV_PARAMS}"
    if role == "prefill":
        yield from _prefill_breaches(api, body)


def params_breaches(role: Literal["prefill", "decode"], params: Any, fabric: Fabric, engine: str) -> Iterator[str]:
    """Rules about where the handle came from; counts the handle as sent to ``engine``."""
    if not isinstance(params, Mapping):
        return
    filled = {
        key for key, value in params.items() if value not in (None, False) and key not in (*_FLAGS, names.RETAIN_KEY)
    }
    if not filled:
        if role == "decode":
            yield "a decode leg was sent params that name no prefill"
        return
    if role == "prefill":
        fault = decoder_handle_fault(params, require_expiry=False)
        if fault is not None:
            yield f"malformed handle: {fault}"
    fault = fabric.handle_fault(params)
    if fault is not None:
        yield f"handle {fault}"
        return
    sent_to = fabric.sent(params["remote_request_id"], engine)
    if len(sent_to) > 1 and not is_unpinned(params):
        yield f"handle used twice: {', '.join(sent_to)}"


def _prefill_breaches(api: Api, body: Mapping[str, Any]) -> Iterator[str]:
    limits = [body[key] for key in LIMITS[api] if body.get(key) is not None]
    if not limits or set(limits) != {1}:
        yield f"a prefill leg must ask for exactly one token, asked for {limits}"
    for key in ("stream", "stream_options", "logprobs", "response_format", "structured_outputs"):
        if body.get(key):
            yield f"a prefill leg must not carry {key}"
    if api == "responses" and body.get("store", True):
        yield "a prefill leg must not be stored"
    if (body.get("thinking") or {}).get("type") == "enabled":
        yield "a prefill leg must not have a thinking budget"
    for key in ("min_tokens", "stop", "stop_sequences", "text", "include"):
        if body.get(key):
            yield f"a prefill leg must not carry {key}"


def _smuggled(body: Mapping[str, Any]) -> Iterator[str]:
    for key, value in body.items():
        if key != names.KV_PARAMS and key.lower().replace("-", "_") == names.KV_PARAMS:
            yield f"field {key!r} in the body"
        if key not in CONTENT_FIELDS and key != names.KV_PARAMS:
            yield from _smuggled_below(value, key)


def _smuggled_below(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key.lower().replace("-", "_") == names.KV_PARAMS or key in _FLAGS:
                yield f"field {path}.{key} in the body"
            yield from _smuggled_below(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _smuggled_below(inner, f"{path}[{index}]")
    elif isinstance(value, str) and names.KV_PARAMS in value and path.split(".")[0] == "vllm_xargs":
        yield f"field {path} carries {names.KV_PARAMS} as text"
