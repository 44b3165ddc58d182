"""What a client may read of an engine's own error: an OpenAI-style body whose text tells nothing of a handle (IS-02).

Separate from `cutting`, which finds handles by the name of their field: an error's text can hold parts of one in any
form (a validation error quotes the request, a transfer error names hosts, ports and engines). Such a text is withheld
whole, since what is left of it after cutting could still tell. An engine's fault (5xx) is told in general words always.
The log has no words of either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from pd_router.core.errors import INVALID_REQUEST, UPSTREAM
from pd_wire.names import KV_PARAMS

_ERROR_TYPE: Final = re.compile(r"(?=.{1,48}\Z)(?:(?:[A-Z][a-z]+)+(?:Error|Exception)|[a-z]+(?:_[a-z]+)*_error)")
"""Names of errors as engines and APIs have them; what looks otherwise may be anything."""
_FAULT: Final = "The engine failed while it answered"
_WITHHELD: Final = "The engine refused the request; its message is withheld because it quotes internal fields"
_SAID_NOTHING: Final = "The engine refused the request and gave no reason"
_SHORTEST_PRIVATE: Final = 4
"""Shorter texts of a handle are words such as a mode, not ids."""
_FIELDS: Final = re.compile(
    r"(?:kv|ec)[_\s-]?transfer|transfer[_\s-]?params|do_remote|remote_|block_ids|engine_id|tp_size|\bpd_[a-z]",
    re.IGNORECASE,
)
_PLACES: Final = re.compile(
    r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)"  # IPv4
    r"|(?:[0-9a-f]{1,4}:){3}|::[0-9a-f]|[0-9a-f]::"  # IPv6
    r"|(?<=[a-z0-9.-]):\d{4,5}\b|tcp://|(?<=[a-z0-9.-])\.svc\b"  # host and port
    r"|[0-9a-f]{8}-[0-9a-f]{4}-|[0-9a-f]{16}|\b(?:chat)?cmpl-",  # ids of engines and of requests
    re.IGNORECASE,
)
"""Each begins with what is rare or ends soon: from no place it looks far, since a text may be as long as a prompt."""
_TRANSFER: Final = re.compile(r"nixl|handshake|side.channel", re.IGNORECASE)
_QUOTED_BODY: Final = ("input_value={", ", input_type=")
"""How a validation error quotes the body, shortened in the middle: of a handle only the end may be left."""


def harmless(text: str, private: Iterable[str] = ()) -> bool:
    """Whether a text names no field of a handle, no address, no id of an engine or request, and nothing `private`."""
    if any(tells.search(text) for tells in (_FIELDS, _PLACES, _TRANSFER)):
        return False
    return not any(word in text for word in private)


def private_texts(leg_body: bytes) -> frozenset[str]:
    """The texts (ids, hosts, hashes) in the handle that a leg was sent."""
    try:
        body = orjson.loads(leg_body)
    except orjson.JSONDecodeError:
        return frozenset()
    found: set[str] = set()
    stack = [body.get(KV_PARAMS)] if isinstance(body, dict) else []
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST_PRIVATE:
            found.add(value)
    return frozenset(found)


def told(raw: bytes, private: Iterable[str] = ()) -> bytes:
    """The body that a client gets for an engine's 4xx with the body `raw`; the same bytes where nothing has to go."""
    answer = _parse(raw)
    shown = {"error": _fields(answer, private, INVALID_REQUEST, _message_of(answer))}
    return raw if answer == shown else orjson.dumps(shown)


def told_in_stream(event: Mapping[str, Any]) -> bytes:
    """The same for the object of an error event. Only one that blames the request keeps its message."""
    failed = event.get("response")
    if event.get("error") is None and isinstance(failed, dict):
        event = failed  # a response that failed has its error inside
    inner = event.get("error")
    code = (inner if isinstance(inner, dict) else event).get("code")
    if not isinstance(code, int) or not 400 <= code < 500:
        return orjson.dumps({"error": _fields(event, (), UPSTREAM, _FAULT)})
    return orjson.dumps({"error": _fields(event, (), INVALID_REQUEST, _message_of(event))})


def loggable(raw: bytes) -> str:
    """What the log has of an engine's error: its type and code where they are ones, and its length. Never its words:
    they may hold a prompt, a key or a handle in any form, whole or in part, so that nothing could be taken out of them
    for sure."""
    answer = _parse(raw)
    inner = answer.get("error") if isinstance(answer, dict) else None
    said = inner if isinstance(inner, dict) else answer if isinstance(answer, dict) else {}
    kind, code = said.get("type"), said.get("code")
    told = [f"type {kind}"] if isinstance(kind, str) and _ERROR_TYPE.fullmatch(kind) else []
    told += [f"code {code}"] if type(code) is int and 100 <= code < 600 else []
    return ", ".join((*told, f"{len(raw)} bytes"))


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _fields(answer: Any, private: Iterable[str], default: str, message: str | None) -> dict[str, Any]:
    inner = answer.get("error") if isinstance(answer, dict) else None
    said = inner if isinstance(inner, dict) else answer if isinstance(answer, dict) else {}
    if message is None:
        message = _SAID_NOTHING
    elif not harmless(message, private):
        message = _WITHHELD
    kept = {name: said[name] for name in ("type", "param", "code") if _may_pass(said.get(name), private)}
    return {"message": message, "type": default, "param": None, "code": None, **kept}


def _may_pass(value: Any, private: Iterable[str]) -> bool:
    return type(value) is int or (type(value) is str and harmless(value, private))


def _message_of(answer: Any) -> str | None:
    """The text for people, in the shapes of OpenAI, of vLLM before it followed OpenAI, and of FastAPI."""
    if not isinstance(answer, dict):
        return None
    inner = answer.get("error")
    if isinstance(inner, dict):
        inner = inner.get("message")
    for text in (inner, answer.get("message"), answer.get("detail")):
        if isinstance(text, str) and text:
            return _without_body(text)
    details = answer.get("detail")
    if isinstance(details, list):
        return "; ".join(filter(None, map(_fault_of, details))) or None
    return None


def _without_body(text: str) -> str:
    """`text` without quoted bodies."""
    begins, ends = _QUOTED_BODY
    kept: list[str] = []
    at = 0
    while (start := text.find(begins, at)) >= 0 and (end := text.find(ends, start)) >= 0:
        kept.append(text[at:start])
        at = end + len(", ")
    return "".join((*kept, text[at:]))


def _fault_of(detail: Any) -> str | None:
    """One fault that FastAPI found: where, and what. The input that it quotes is left out."""
    if not isinstance(detail, dict) or not isinstance(detail.get("msg"), str):
        return None
    place = detail.get("loc")
    where = ".".join(str(step) for step in place if isinstance(step, str | int)) if isinstance(place, list) else ""
    return f"{where}: {detail['msg']}" if where else str(detail["msg"])
