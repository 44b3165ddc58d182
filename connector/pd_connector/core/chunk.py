"""Putting the handle into one chunk of a streamed answer, or into one event of a streamed message.

vLLM 0.33 sends the handle on the chunk that has the finish reason; older versions drop it. A streamed message is made
from such chunks, and every version drops it there; it goes into the event that has the stop reason. Both are edited as
text at their end, because parsing and writing them again would change what the API server chose to send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pd_wire import names

# Inside a JSON string the quote before the colon is escaped, so this can't be generated text.
_FINISHED: Final = '"finish_reason":"'
_START: Final = "data: {"
_STOPPED: Final = "event: message_delta\n" + _START
_END: Final = "}\n\n"
_KEY: Final = f'"{names.KV_PARAMS}":'


def with_handle(chunk: str, handle: Mapping[str, Any]) -> str | None:
    """The chunk with the handle added, or ``None`` when this is not the chunk that carries it.

    Args:
        chunk: one server-sent event as the API server yields it.
        handle: JSON-serialisable parameters.
    """
    if _FINISHED not in chunk or not chunk.startswith(_START) or not chunk.endswith(_END):
        return None
    return _added(chunk, handle)


def message_with_handle(event: str, handle: Mapping[str, Any]) -> str | None:
    """The event with the handle added, or ``None`` when this is not the event that carries it.

    Args:
        event: one server-sent event of a streamed message.
        handle: JSON-serialisable parameters.
    """
    if not event.startswith(_STOPPED) or not event.endswith(_END):
        return None
    return _added(event, handle)


def handle_of(chunk: str) -> dict[str, Any] | None:
    """The handle that a chunk of a chat carries, if it does.

    Args:
        chunk: one server-sent event as the API server yields it.
    """
    if _KEY not in chunk or not chunk.startswith(_START):
        return None
    handle = json.loads(chunk.removeprefix("data: ")).get(names.KV_PARAMS)
    return handle if isinstance(handle, dict) else None


def _added(event: str, handle: Mapping[str, Any]) -> str:
    text = json.dumps(handle, separators=(",", ":"), ensure_ascii=False)
    return f"{event[: -len(_END)]},{_KEY}{text}{_END}"
