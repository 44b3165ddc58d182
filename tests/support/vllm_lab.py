"""A bench for vLLM's scheduler code without a model: real schedulers, requests and blocks, a made-up configuration.

Imported only by `vllm_worker`, inside a process that has one vLLM release on its path. Everything that differs between
releases in how these objects are built is here, so that the cases read the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
BLOCKS = 400
STOPPED = RequestStatus.FINISHED_STOPPED
CAPPED = RequestStatus.FINISHED_LENGTH_CAPPED
ABORTED = RequestStatus.FINISHED_ABORTED
NO_HANDLE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Lab:
    """Builders. Every object is fresh; a case shares nothing with another."""

    version: str = vllm.__version__

    # --- configuration ---------------------------------------------------------------------------

    def config(
        self,
        *,
        role: str,
        stock: bool = False,
        extra: dict[str, Any] | None = None,
        prefix_caching: bool = False,
        **transfer: Any,
    ) -> Any:
        """A real `VllmConfig` with a made-up model."""
        ours = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector.connector"}
        settings = {
            **({"kv_connector": "NixlConnector"} if stock else ours),
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 32, **(extra or {})},
            **transfer,
        }
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching)
        cache.num_gpu_blocks = BLOCKS
        config = VllmConfig(
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=4096, is_encoder_decoder=False
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**settings),
            parallel_config=ParallelConfig(),
        )
        config.model_config = _Model()
        return config

    def cache(self, groups: int = 1) -> Any:
        """A KV cache of one full-attention group, and a sliding-window group when there are two."""
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
        specs = [FullAttentionSpec(**shape), SlidingWindowSpec(sliding_window=4 * BLOCK, **shape)][:groups]
        return KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)],
        )

    # --- schedulers ------------------------------------------------------------------------------

    def side(self, role: str, *, stock: bool = False, groups: int = 1, host_buffer: bool = False, **config: Any) -> Any:
        """The scheduler side of a connector, ours or vLLM's own, without a scheduler around it."""
        settings = self.config(role=role, stock=stock, **config)
        settings.scheduler_config.disable_hybrid_kv_cache_manager = groups == 1
        with self.device("cuda" if host_buffer else "cpu"):
            return self.scheduler_class(stock)(settings, settings.kv_transfer_config.engine_id, self.cache(groups))

    def scheduler_class(self, stock: bool) -> Any:
        if stock:
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

            return NixlPullConnectorScheduler
        from pd_connector.shell.scheduler import PDPullScheduler

        return PDPullScheduler

    def connector(self, config: Any) -> Any:
        """The connector's scheduler half, as vLLM makes it."""
        from pd_connector.connector import PDConnector

        return PDConnector(config, KVConnectorRole.SCHEDULER, self.cache())

    def scheduler(self, role: str, *, stock: bool = False, log_stats: bool = False, **config: Any) -> Any:
        """vLLM's real scheduler around the connector."""
        return Scheduler(
            vllm_config=self.config(role=role, stock=stock, **config),
            kv_cache_config=self.cache(),
            structured_output_manager=_NoGrammars(),
            block_size=BLOCK,
            log_stats=log_stats,
        )

    @contextmanager
    def device(self, device_type: str) -> Iterator[None]:
        """Let the connector believe that it runs on this kind of device."""
        real = base_scheduler.current_platform
        base_scheduler.current_platform = SimpleNamespace(device_type=device_type)
        try:
            yield
        finally:
            base_scheduler.current_platform = real

    # --- requests and blocks ---------------------------------------------------------------------

    def request(self, name: str, tokens: Sequence[int], params: Any, *, max_tokens: int = 1, **more: Any) -> Any:
        """A real request; ``params`` is what the router sent under ``kv_transfer_params``."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            extra_args={"kv_transfer_params": params},
            prompt_logprobs=more.pop("prompt_logprobs", None),
        )
        return Request(name, list(tokens), sampling, None, **more)

    def hashed(self) -> dict[str, Any]:
        """Arguments of a request that the prefix cache shall know."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        return {"block_hasher": get_request_block_hasher(BLOCK, sha256)}

    def arrive(self, side: Any, name: str, tokens: Sequence[int], params: Any, **more: Any) -> Any:
        """A request that the scheduler has announced to the connector."""
        request = self.request(name, tokens, params, **more)
        side.on_new_request(request)
        return request

    def allocate(self, side: Any, request: Any, local_tokens: int = 0, first_block: int = 1) -> tuple[int, bool]:
        """Ask for a match and allocate, as the scheduler does; returns the match."""
        count, is_async = side.get_num_new_matched_tokens(request, local_tokens)
        total = local_tokens + count if is_async else request.num_tokens
        groups = len(side.kv_cache_config.kv_cache_groups)
        side.update_state_after_alloc(request, self.blocks(total, local_tokens, first_block, groups), count)
        if is_async:
            request.num_computed_tokens = local_tokens + count
        return count, is_async

    def blocks(self, tokens: int, local_tokens: int = 0, first: int = 1, groups: int = 1) -> Any:
        """Blocks as the scheduler hands them over: those of a local hit carry a hash."""

        def row() -> list[Any]:
            made = [KVCacheBlock(block_id=first + number) for number in range(-(-tokens // BLOCK))]
            for block in made[: local_tokens // BLOCK]:
                block._block_hash = b"hash"
            return made

        return KVCacheBlocks(tuple(row() for _ in range(groups)))

    def finish(self, side: Any, request: Any, status: Any = CAPPED, first_block: int = 1) -> tuple[bool, Any]:
        """End a request whose blocks are numbered from ``first_block``; returns (delayed, what the router sees)."""
        request.status = status
        groups = len(side.kv_cache_config.kv_cache_groups)
        count = -(-request.num_computed_tokens // BLOCK)
        ids = tuple(list(range(first_block, first_block + count)) for _ in range(groups))
        delayed, params = side.request_finished(request, ids)
        return delayed, json.loads(json.dumps(params))

    def metadata(self, side: Any) -> Any:
        """What the worker gets in the next step."""
        return side.build_connector_meta(SchedulerOutput.make_empty())

    def decoder_handle(self, tokens: Sequence[int], *, side: Any = None, name: str = "turn1", **more: Any) -> Any:
        """A genuine handle: a decode engine finishes a turn over ``tokens`` (the last one was just sampled)."""
        side = side or self.side("decode")
        handle = prefill_handle(len(tokens) - 8, groups=len(side.kv_cache_config.transfer_groups))
        request = self.arrive(side, name, tokens[:-8], handle, max_tokens=8, **more)
        self.allocate(side, request)
        side.update_connector_output(KVConnectorOutput(finished_recving={name}))
        request.append_output_token_ids(list(tokens[-8:]))
        request.num_computed_tokens = len(tokens) - 1
        delayed, params = self.finish(side, request, STOPPED)
        assert delayed == (params is not None)
        return params

    # --- steps of the real scheduler -------------------------------------------------------------

    def step(self, scheduler: Any, *, received: Any = None, sent: Any = None, **more: Any) -> tuple[Any, Any]:
        """Schedule one step and hand back a made-up model output; returns (scheduled, outputs)."""
        scheduled = scheduler.schedule()
        order = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={name: number for number, name in enumerate(order)},
            sampled_token_ids=[[7] for _ in order],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(received) if received else None,
                finished_sending=set(sent) if sent else None,
                **more,
            ),
        )
        return scheduled, scheduler.update_from_output(scheduled, output)


def prefill_handle(tokens: int, *, groups: int = 1, first_block: int = 50, **changes: Any) -> dict[str, Any]:
    """What a prefill engine answers after computing ``tokens`` tokens."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(first_block, first_block - (-tokens // BLOCK))) for _ in range(groups)],
        "remote_engine_id": "prefill-engine",
        "remote_request_id": "prefill-request",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        **changes,
    }


def for_prefill(handle: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A decode engine's handle as the router sends it with the next turn."""
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False, **changes}


class _NoGrammars:
    """Stands in for the structured-output manager: every token is accepted."""

    def accept_tokens(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def should_advance(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def grammar_bitmask(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Model:
    """A model of which only the numbers count: every feature that vLLM asks about is off."""

    skip_tokenizer_init = True
    enforce_eager = True
    runner_type = "generate"
    max_model_len = 4096
    dtype = torch.bfloat16
    multimodal_config = None

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False
