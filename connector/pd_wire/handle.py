"""Is this object a usable D handle? One answer for the router (before it sends) and the connector (before it reads).

vLLM tests that the keys are present, not that the values make sense, and asserts inside the worker step when block
lists do not fit: a malformed handle takes the engine down (HL-24). The check is shape only; whether the tokens match is
the proof's business, and whether the handle is still alive is the holder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MAX_BLOCK_ID: Final = (1 << 31) - 1
MAX_PORT: Final = 65535
_REQUIRED: Final = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
)


def decoder_handle_fault(value: Any, *, require_expiry: bool = True) -> str | None:
    """Why ``value`` may not be sent to a prefill engine as a handle, or ``None`` when it may.

    Args:
        value: what the decode engine returned under ``kv_transfer_params``.
        require_expiry: a handle without ``remote_blocks_expiry_time`` is read even after the blocks were given to
            someone else, so it is refused unless the caller knows better (engine-contract E6).

    Returns:
        A short sentence that names the field, or ``None``. Never raises.
    """
    if not isinstance(value, Mapping):
        return f"handle must be an object, got {type(value).__name__}"
    missing = [key for key in _REQUIRED if value.get(key) is None]
    if missing:
        return f"{missing[0]} is missing"
    if value.get("do_remote_decode") is not True:
        return "do_remote_decode must be true in a decode engine's handle"
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        if not isinstance(value[key], str) or not value[key] or len(value[key]) > 1024:
            return f"{key} must be a non-empty string"
    port = value["remote_port"]
    if not _is_int(port) or not 1 <= port <= MAX_PORT:
        return f"remote_port must be an integer from 1 to {MAX_PORT}"
    tokens = value["remote_num_tokens"]
    if not _is_int(tokens) or tokens < 1:
        return "remote_num_tokens must be a positive integer"
    if require_expiry and not _is_number(value.get("remote_blocks_expiry_time")):
        return "remote_blocks_expiry_time must be a number"
    return _block_fault(value["remote_block_ids"], tokens)


def group_count(value: Mapping[str, Any]) -> int:
    """Number of KV cache groups in a handle that passed the check."""
    return len(value["remote_block_ids"])


def _block_fault(groups: Any, tokens: int) -> str | None:
    if not isinstance(groups, list | tuple) or not groups:
        return "remote_block_ids must be a list of lists of block numbers"
    for group in groups:
        if not isinstance(group, list | tuple):
            return "remote_block_ids must be a list of lists of block numbers"
        if not all(_is_int(block) and 0 <= block <= MAX_BLOCK_ID for block in group):
            return f"remote_block_ids must hold integers from 0 to {MAX_BLOCK_ID}"
    longest = max(len(group) for group in groups)
    if longest == 0:
        return "remote_block_ids is empty"
    if longest > tokens:
        return "remote_block_ids holds more blocks than remote_num_tokens has tokens"
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
