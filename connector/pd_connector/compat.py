"""Every difference between the vLLM versions that the plugin supports.

The rest of the plugin asks here and names no version. What can be seen on the installed code (an argument, a method) is
looked up there rather than listed by version, so that a patch release can't make the table wrong.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OLDEST: Final = (0, 29)
NEWEST: Final = (0, 33)
HANDLE_IN_STREAM_SINCE: Final = (0, 33)
"""From here on vLLM's own API server puts the handle into streamed chat and completion answers."""

SCHEDULER_HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "build_connector_meta": ("scheduler_output",),
    "set_xfer_handshake_metadata": ("metadata",),
    "_get_remote_prefill_token_count": ("num_prompt_tokens",),
    "_stop_heartbeat": ("req_id",),
}
"""Methods of vLLM's pull scheduler that the plugin overrides or calls, with the arguments it relies on."""

SCHEDULER_STATE: Final = (
    "_reqs_need_recv",
    "_reqs_in_batch",
    "_reqs_not_processed",
    "_reqs_need_send",
    "_is_hma_required",
    "_nixl_handshake_listener_t",
    "block_size",
    "is_bidirectional_kv_xfer_enabled",
    "kv_cache_config",
    "use_host_buffer",
    "vllm_config",
)
"""Attributes of the pull scheduler that the plugin reads or writes."""


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """One generator of the API server that yields server-sent events."""

    module: str
    owner: str
    method: str
    source: str
    """Its argument that yields the engine's outputs; for a converter, the chunks of a chat."""
    converts_chat: bool = False
    """It makes events of the Messages API from a chat's chunks, and no release passes the handle on there."""


STREAM_TARGETS: Final = (
    StreamTarget(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat",
        "chat_completion_stream_generator",
        "result_generator",
    ),
    StreamTarget(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion",
        "completion_stream_generator",
        "result_generator",
    ),
    StreamTarget(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages",
        "message_stream_converter",
        "generator",
        converts_chat=True,
    ),
)


class UnsupportedVllm(ImportError):
    """The installed vLLM is not one that the plugin was tested with; it must not run on a guess."""


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number of a vLLM version such as ``0.32.0`` or ``0.33.1rc1+cu130``.

    Raises:
        UnsupportedVllm: when there are none to read.
    """
    match = re.match(r"(\d+)\.(\d+)(?!\d)", text)
    if match is None:
        raise UnsupportedVllm(f"vLLM version {text!r} can't be read: install a release from {_range()}")
    return int(match[1]), int(match[2])


def require_supported(text: str) -> tuple[int, int]:
    """The version, when it is supported.

    Raises:
        UnsupportedVllm: naming the version found and those that may be used.
    """
    version = parse_version(text)
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedVllm(
            f"vLLM {text} is not supported by this plugin: use {_range()}, or a plugin that knows this version"
        )
    return version


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def installed_version() -> str:
    """vLLM's own version text. Some builds have no distribution metadata, so the module is asked."""
    import vllm

    return str(vllm.__version__)


def handle_in_stream(version: tuple[int, int]) -> bool:
    """Whether vLLM's API server itself puts the handle into streamed chat and completion answers."""
    return version >= HANDLE_IN_STREAM_SINCE


def stream_targets(version: tuple[int, int]) -> list[StreamTarget]:
    """The generators of this version that leave the handle out."""
    native = handle_in_stream(version)
    return [target for target in STREAM_TARGETS if target.converts_chat or not native]


def hook_faults(scheduler: type, hooks: Mapping[str, Sequence[str]] = SCHEDULER_HOOKS) -> list[str]:
    """What of vLLM's pull scheduler class is not as the plugin expects it."""
    faults = []
    for name, wanted in hooks.items():
        method = inspect.getattr_static(scheduler, name, None)
        if method is None:
            faults.append(f"{scheduler.__name__}.{name} does not exist")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != tuple(wanted):
            faults.append(f"{scheduler.__name__}.{name} takes {', '.join(found)} instead of {', '.join(wanted)}")
    return faults


def state_faults(scheduler: Any) -> list[str]:
    """Attributes that the plugin needs and this scheduler object lacks."""
    return [
        f"{type(scheduler).__name__}.{name} does not exist" for name in SCHEDULER_STATE if not hasattr(scheduler, name)
    ]


def release_notice(request: Any, metadata: type) -> tuple[Any, ...]:
    """An entry of ``_reqs_need_recv`` that reads nothing and tells the holder to free its blocks.

    Args:
        request: vLLM's request; its parameters name the holder.
        metadata: vLLM's `NixlConnectorMetadata`, whose method shows how many items an entry has here.
    """
    taken = inspect.signature(metadata.add_new_req_to_recv).parameters  # type: ignore[attr-defined]
    entry: tuple[Any, ...] = (request, [], ())
    # Later versions say whether the scheduler waits for the read; it never does for a notice.
    return (*entry, False) if "awaiting_kvs" in taken else entry


def tokens_in_flight(request: Any) -> int:
    """Tokens that vLLM counts as computed although their step has not ended."""
    return int(getattr(request, "num_in_flight_tokens", 0))


def reads_no_cache(request: Any) -> bool:
    """Whether the request wants every prompt token computed."""
    return bool(request.get_skip_reading_prefix_cache())


def unpinned_obstacle() -> str | None:
    """Why this vLLM can't leave a finished turn's blocks in the pool, or ``None``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.v1.core.block_pool import BlockPool

    if not hasattr(BlockPool, "unpin_blocks") or not hasattr(NixlPullConnectorWorker, "get_transfer_results"):
        return "this vLLM can't watch blocks that nobody keeps; 0.32 and later can"
    return None
