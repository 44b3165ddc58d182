"""Putting the handle into one chunk of a streamed answer.

vLLM 0.33 sends the handle on the chunk that has the finish reason; older versions drop it. A chunk is edited as text at
its end, because parsing and writing it again would change what the API server chose to send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pd_wire import names

# Inside a JSON string the quote before the colon is escaped, so this can't be generated text.
_FINISHED: Final = '"finish_reason":"'
_END: Final = "}\n\n"


def with_handle(chunk: str, handle: Mapping[str, Any]) -> str | None:
    """The chunk with the handle added, or ``None`` when this is not the chunk that carries it.

    Args:
        chunk: one server-sent event as the API server yields it.
        handle: JSON-serialisable parameters.
    """
    if _FINISHED not in chunk or not chunk.startswith("data: {") or not chunk.endswith(_END):
        return None
    text = json.dumps(handle, separators=(",", ":"), ensure_ascii=False)
    return f'{chunk[: -len(_END)]},"{names.KV_PARAMS}":{text}{_END}'
