"""Is this object a usable handle? One answer for the router (before it sends) and the connector (before it reads).

vLLM tests that the keys are present, not that the values make sense, and asserts inside the worker step when block
lists do not fit: a malformed handle takes the engine down (HL-24). The check is shape only, down to numbers that no
engine can have (a billion tokens in eight blocks, one block at eight places); whether the tokens match is
the proof's business, and whether the handle is still alive is the holder's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_wire import lease, moment, names

MAX_BLOCK_ID: Final = (1 << 31) - 1
MAX_PORT: Final = 65535
MAX_PARALLEL_SIZE: Final = 4096
MAX_CLOCK: Final = 1e12
MAX_BLOCK_TOKENS: Final = 4096
"""Tokens in a block of full attention; vLLM's are 8 to 256, and some thousands beside state layers."""
MAX_STATE_TOKENS: Final = 1 << 22
"""Tokens behind one block of a window or a state: no model has a longer context."""
_NULL_BLOCK: Final = 0
_REQUIRED: Final = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
)
_ADDRESS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
# The host ends up in a socket address; the port is appended by the reader.
_HOST: Final = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
_SIZES: Final = ("tp_size", "dcp_size", "pp_size")
_RANK: Final = re.compile(r"_dp([0-9]{1,4})$")


def decoder_handle_fault(value: Any, *, require_expiry: bool = True) -> str | None:
    """Why ``value`` may not be sent to a prefill engine as a handle, or ``None`` when it may.

    Args:
        value: what the decode engine returned under ``kv_transfer_params``.
        require_expiry: a handle without ``remote_blocks_expiry_time`` is read even after the blocks were given to
            someone else, so it is refused unless the caller knows better (engine-contract E6) or the reader will ask
            the holder, as with unpinned blocks.

    Returns:
        A short sentence that names the field, or ``None``. Never raises.
    """
    fault = _shape_fault(value, "do_remote_decode", "a decode engine's handle")
    if fault:
        return fault
    expiry = value.get("remote_blocks_expiry_time")
    if is_unpinned(value):
        if moment.parse(value.get(names.MOMENT_KEY)) is None:
            return f"{names.MOMENT_KEY} must be an epoch and a count"
        if value.get(names.LEASE_KEY) is not None and lease.parse(value[names.LEASE_KEY]) is None:
            return f"{names.LEASE_KEY} must be a token and whole seconds up to {lease.MAX_SECONDS}"
    elif require_expiry and not _is_number(expiry):
        return "remote_blocks_expiry_time must be a number"
    if expiry is not None and not (_is_number(expiry) and -MAX_CLOCK < expiry < MAX_CLOCK):
        # NaN and infinity never lie in the past, so the reader would take the blocks as alive for ever.
        return "remote_blocks_expiry_time must be a time in seconds"
    return None


def prefill_handle_fault(value: Any) -> str | None:
    """Why ``value`` may not be read by a decode engine as a prefill engine's handle, or ``None`` when it may.

    Returns:
        A short sentence that names the field, or ``None``. Never raises.
    """
    return _shape_fault(value, "do_remote_prefill", "a prefill engine's handle")


def address_fault(value: Mapping[str, Any]) -> str | None:
    """Why the holder that ``value`` names can't be reached, or ``None``. It is enough for a release notice."""
    missing = [key for key in _ADDRESS if value.get(key) is None]
    if missing:
        return f"{missing[0]} is missing"
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        if not isinstance(value[key], str) or not value[key] or len(value[key]) > 1024:
            return f"{key} must be a non-empty string"
    if not _HOST.fullmatch(value["remote_host"]):
        return "remote_host must be a host name or an address"
    port = value["remote_port"]
    if not _is_int(port) or not 1 <= port <= MAX_PORT:
        return f"remote_port must be an integer from 1 to {MAX_PORT}"
    for key in _SIZES:
        size = value.get(key, 1)
        if not _is_int(size) or not 1 <= size <= MAX_PARALLEL_SIZE:
            return f"{key} must be an integer from 1 to {MAX_PARALLEL_SIZE}"
    generation = value.get("remote_registration_generation", 0)
    if not _is_int(generation) or generation < 0:
        return "remote_registration_generation must be an integer from 0"
    return None


def is_unpinned(value: Mapping[str, Any]) -> bool:
    """Whether the holder may hand this handle's blocks to others, at once or when a lease ends.

    Such a handle is not spent by being sent and has no end that anybody could know: every reader asks the holder.
    """
    return value.get(names.MODE_KEY) in (names.MODE_UNPINNED, names.MODE_LEASED)


def group_count(value: Mapping[str, Any]) -> int:
    """Number of KV cache groups in a handle that passed the check."""
    return len(value["remote_block_ids"])


def data_parallel_rank(value: Mapping[str, Any]) -> int | None:
    """The data-parallel rank that a handle names, or ``None`` where its engine has one rank.

    The one thing that tells ranks apart besides their port: vLLM appends it to the engine id of each.
    """
    found = _RANK.search(str(value.get("remote_engine_id")))
    return int(found[1]) if found else None


def _shape_fault(value: Any, flag: str, whose: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"handle must be an object, got {type(value).__name__}"
    missing = [key for key in _REQUIRED if value.get(key) is None]
    if missing:
        return f"{missing[0]} is missing"
    if value.get(flag) is not True:
        return f"{flag} must be true in {whose}"
    if value.get("do_remote_prefill") and value.get("do_remote_decode"):
        # vLLM looks at the flags in an order of its own and would read as the other role.
        return f"only {flag} may be true in {whose}"
    fault = address_fault(value)
    if fault:
        return fault
    tokens = value["remote_num_tokens"]
    if not _is_int(tokens) or not 1 <= tokens <= MAX_BLOCK_ID:
        return "remote_num_tokens must be a positive integer"
    return _block_fault(value["remote_block_ids"], tokens)


def _block_fault(groups: Any, tokens: int) -> str | None:
    if not isinstance(groups, list | tuple) or not groups:
        return "remote_block_ids must be a list of lists of block numbers"
    for group in groups:
        if not isinstance(group, list | tuple):
            return "remote_block_ids must be a list of lists of block numbers"
        # Types as a set and the extremes: a third of the cost of a test per block, and handles have thousands.
        if group and (set(map(type, group)) != {int} or min(group) < 0 or max(group) > MAX_BLOCK_ID):
            return f"remote_block_ids must hold integers from 0 to {MAX_BLOCK_ID}"
    longest = max(len(group) for group in groups)
    if longest == 0:
        return "remote_block_ids is empty"
    if longest > tokens:
        return "remote_block_ids holds more blocks than remote_num_tokens has tokens"
    # Blocks of full attention stand one behind the other. Where there are several groups, or one block, the longest may
    # be a window or a state, which has few blocks however long the text is.
    most = MAX_BLOCK_TOKENS if len(groups) == 1 and longest > 1 else MAX_STATE_TOKENS
    if tokens > longest * most:
        return f"remote_num_tokens is more than {most} for each of the blocks"
    if any(_names_twice(group) for group in groups):
        return "remote_block_ids holds a block twice"
    return None


def _names_twice(group: Sequence[int]) -> bool:
    """Whether a block stands there twice. 0 may: it is vLLM's placeholder for what left a window, or is no state."""
    different = len(set(group))
    if different == len(group):
        return False
    holes = group.count(_NULL_BLOCK)
    return holes == len(group) or different != len(group) - holes + (holes > 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
