"""What a careless engine, or something in front of it, may say of a handle outside of the handle's own field (IS-02).

Separate from `cutting`, which takes the handle out of answers that are as vLLM writes them, byte by byte. Here are the
answers that are not: the field in another spelling, a handle's fields without it, errors in other shapes. Such an
answer is parsed and written anew; what is looked at and is ordinary stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from pd_router.core.jsontext import decode_exactly, encode
from pd_router.core.refusals import harmless
from pd_router.core.sanitize import is_forbidden
from pd_wire.names import KV_PARAMS

_SPELT: Final = re.compile(
    rb'"[kKeE][vVcC][-_ ]?[tT][rR][aA][nN][sS][fF][eE][rR][-_ ]?[pP][aA][rR][aA][mM][sS]"(?!\s*:\s*null\b)'
)
"""What is null tells nothing: vLLM writes `ec_transfer_params` so."""
_FIELDS: Final = frozenset(
    {
        *("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"),
        *("remote_num_tokens", "remote_blocks_expiry_time", "do_remote_prefill", "do_remote_decode"),
    }
)
"""Of a handle. Deeper in an answer they may be a client's own words: a tool may have a parameter `remote_host`."""
_NAMED_ERROR: Final = re.compile(rb"(?:^|[\r\n])event:[ ]?error[ \t]*[\r\n]", re.IGNORECASE)
_LINE_ID: Final = re.compile(rb"(?:id|retry)(?:: ?[A-Za-z0-9_-]{0,32})?[\r\n]*")
_KINDS: Final = ("response.", "message_", "content_block_", "ping")


@dataclass(frozen=True, slots=True)
class Shape:
    """How an API's events look where nothing is wrong: `begins`, so many line ends, and one of `marks` in them."""

    begins: bytes
    newlines: int
    marks: tuple[bytes, ...]

    def fits(self, event: bytes) -> bool:
        """Whether bytes are one such event."""
        return (
            event.startswith(self.begins)
            and event.count(b"\n") == self.newlines
            and any(mark in event for mark in self.marks)
        )


def hints(data: bytes) -> bool:
    """Whether there may be a handle's field in the open, or the params in another spelling."""
    if b'"remote_' in data or b'"do_remote_' in data:
        return True
    return (b"ransfer" in data or b"RANSFER" in data) and _SPELT.search(data) is not None


def scrub(text: bytes) -> bytes | None:
    """JSON without what tells of a handle; the same bytes where there is nothing, None where it can't be read."""
    if not hints(text):
        return text
    try:
        answer = decode_exactly(text)
        return encode(answer) if _drop_spelt(answer) | _drop_fields(answer) else text
    except ValueError:
        return None


def is_odd_error(event: bytes, answer: Any) -> bool:
    """Whether an event is an error in a shape that no API has: FastAPI's `detail`, a `message` alone, an SSE event of
    that name, or what is no event of any API and tells of places."""
    if _NAMED_ERROR.search(event):
        return True
    if not isinstance(answer, dict) or "choices" in answer:
        return False
    kind = answer.get("type")
    if isinstance(kind, str) and kind.startswith(_KINDS):
        return False
    said = isinstance(answer.get("detail"), str | list) or isinstance(answer.get("message"), str)
    # Words may speak of the params; that a value names a place is another matter.
    return said or not harmless(event.replace(KV_PARAMS.encode(), b"").decode("utf-8", "replace"))


def keeps_line(line: bytes) -> bool:
    """Whether a line of an event that is no data may pass: no id but a short one, and nothing that tells."""
    if line.startswith((b"id", b"retry")):
        return _LINE_ID.fullmatch(line) is not None
    return harmless(line.decode("utf-8", "replace")) and not hints(line)


def _drop_spelt(value: Any) -> bool:
    """Remove the params at any depth, in any spelling."""
    stack, dropped = [value], False
    while stack:
        item = stack.pop()
        if type(item) is dict:
            for name in [name for name, inner in item.items() if inner is not None and is_forbidden(name)]:
                del item[name]
                dropped = True
            stack.extend(item.values())
        elif type(item) is list:
            stack.extend(item)
    return dropped


def _drop_fields(answer: Any) -> bool:
    """Remove a handle's fields where an engine would write them: at the top, in a response, in a choice or what it
    says. A client's own words are strings there."""
    if not isinstance(answer, dict):
        return False
    choices = answer.get("choices")
    places = [answer, answer.get("response"), answer.get("delta")]
    for choice in choices if isinstance(choices, list) else ():
        places += [choice, choice.get("delta"), choice.get("message")] if isinstance(choice, dict) else []
    dropped = False
    for place in places:
        if isinstance(place, dict):
            for name in _FIELDS & place.keys():
                del place[name]
                dropped = True
    return dropped
