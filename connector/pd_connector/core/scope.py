"""What of a request may be proven, and for which scope.

Token ids are not the whole input of a block's KV: an adapter and a cache salt shape it too, and media or embeddings
replace tokens altogether. Both sides compute this from their own request, so it must not depend on anything that
differs between engines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What shapes a prompt's KV besides its token ids."""

    adapter_name: str | None = None
    adapter_id: int | None = None
    cache_salt: str | None = None
    media_items: int = 0
    has_embeddings: bool = False
    reads_no_cache: bool = False
    """The request wants every prompt token computed (prompt log-probabilities)."""


def scope_bytes(shape: Shape) -> bytes:
    """The proof's scope: empty for a plain request."""
    if shape.adapter_name is None and shape.cache_salt is None:
        return b""
    return json.dumps([shape.adapter_name, shape.adapter_id, shape.cache_salt]).encode("utf-8")


def proof_obstacle(shape: Shape) -> str | None:
    """Why the tokens of this request prove nothing about its KV, or ``None``."""
    if shape.media_items:
        return "the prompt holds media"
    if shape.has_embeddings:
        return "the prompt holds embeddings"
    return None


def pull_obstacle(shape: Shape) -> str | None:
    """Why this request must not load any KV, or ``None``."""
    if shape.reads_no_cache:
        return "the request wants every prompt token computed"
    return proof_obstacle(shape)


def proven_length(computed: int, in_flight: int, known: int) -> int:
    """Tokens whose KV is certainly in the blocks when a turn ends.

    Args:
        computed: vLLM's count, which runs ahead of the device when steps overlap.
        in_flight: how many of those belong to steps whose output is not processed yet.
        known: tokens of the prompt and the answer.
    """
    return max(0, min(computed - max(in_flight, 0), known))
