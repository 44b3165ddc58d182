"""The guards, tried on the installed vLLM's scheduler class: no model, no device, no network.

A part of the self-test. It is small on purpose: one try per guard, on plain stand-ins for vLLM's configuration,
requests and blocks. The contract tests of the repository go through the same hooks in depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

from pd_connector.core.verdicts import Check
from pd_connector.shell.scheduler import PDPullScheduler
from pd_wire import names, proof
from pd_wire.report import Verdict

_BLOCK: Final = 16
_TURN: Final = tuple(range(1000, 1100))
_NEXT: Final = (*_TURN, *range(2000, 2064))


class _Off:
    """A configuration of which only the named values are set: every feature that vLLM asks about is off."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Request(_Off):
    """What the hooks read of a request."""

    def __init__(self, request_id: str, tokens: Sequence[int], params: Any, status: Any = None) -> None:
        super().__init__(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            kv_transfer_params=params,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            status=status,
        )

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


def try_guards() -> Iterator[Check]:
    """One check per guard; a guard that raises is a failed check, not the end of the self-test."""
    for name, attempt in _ATTEMPTS.items():
        try:
            fault = attempt()
        except Exception as error:  # noqa: BLE001 - whatever moved in vLLM shows here, as any kind of error
            fault = f"{type(error).__name__}: {error}"
        yield Check(name, "holds", f"{fault}: do not use this vLLM release with the plugin" if fault else None)


def _scheduler(*, bidirectional: bool = True) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    extra = {"bidirectional_kv_xfer": bidirectional, "kv_recompute_threshold": 0}
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = _Off(
        parallel_config=_Off(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=_Off(block_size=_BLOCK),
        scheduler_config=_Off(disable_hybrid_kv_cache_manager=True),
        kv_transfer_config=_Off(
            kv_buffer_device="cpu", get_from_extra_config=lambda key, default: extra.get(key, default)
        ),
    )
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    side = PDPullScheduler(config, "selftest", cache)
    # On a GPU the made-up buffer device would mean a host buffer, which is another case.
    side.use_host_buffer = False
    side._engine = _engine_of(side)
    return side


def _engine_of(side: Any) -> Any:
    from pd_connector.core.admission import Engine

    return Engine(_BLOCK, 1, side._pull_obstacle(), None)


def _handle(tokens: Sequence[int] = _TURN, **changes: Any) -> dict[str, Any]:
    shown = proof.prove(list(tokens[:-1]), _BLOCK, bytes(proof.KEY_BYTES))
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(-(-(len(tokens) - 1) // _BLOCK)))],
        "remote_engine_id": "holder",
        "remote_request_id": "turn",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": len(tokens) - 1,
        "remote_blocks_expiry_time": 1e9,
        names.PROOF_KEY: proof.encode(shown),
        names.MODE_KEY: names.MODE_PINNED,
        **changes,
    }


def _blocks() -> Any:
    return SimpleNamespace(blocks=((),), get_unhashed_block_ids_all_groups=lambda: ([1, 2, 3, 4, 5, 6],))


def _offer(side: Any, params: Any, tokens: Sequence[int] = _NEXT) -> tuple[Any, tuple[int, bool]]:
    request = _Request("selftest", tokens, params)
    side.on_new_request(request)
    match = side.get_num_new_matched_tokens(request, 0)
    side.update_state_after_alloc(request, _blocks(), match[0])
    return request, match


def _try_continuation() -> str | None:
    side = _scheduler()
    _, match = _offer(side, _handle())
    if match != (96, True):
        return f"a proven continuation matched {match} instead of 96 tokens"
    read = _queued(side)
    return None if read is not None and read.local_block_ids else "a proven continuation queued no read"


def _try_foreign() -> str | None:
    side = _scheduler()
    _, match = _offer(side, _handle(), range(len(_NEXT)))
    if match != (0, False):
        return f"another conversation's handle matched {match}"
    return _only_notice(side)


def _try_malformed() -> str | None:
    side = _scheduler()
    request, match = _offer(side, _handle(remote_block_ids=[1, 2, 3]))
    if match != (0, False):
        return f"a malformed handle matched {match}"
    entry = side.pd_ledger.get(request.request_id)
    if entry is None or entry.admission.verdict is not Verdict.MALFORMED:
        return "a malformed handle was not called malformed"
    return _only_notice(side)


def _queued(side: Any) -> Any:
    """What the worker would get for the request in the next step."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return side.build_connector_meta(SchedulerOutput.make_empty()).reqs_to_recv.get("selftest")


def _only_notice(side: Any) -> str | None:
    read = _queued(side)
    if read is None:
        return "the holder of an unused handle gets no notice"
    return "a handle that is not used is read all the same" if read.local_block_ids else None


def _try_processed_once() -> str | None:
    side = _scheduler()
    request, _ = _offer(side, _handle())
    match = side.get_num_new_matched_tokens(request, 0)
    return None if match == (0, False) else f"a request that was processed matched again: {match}"


def _try_flag_off() -> str | None:
    _, match = _offer(_scheduler(bidirectional=False), _handle())
    return None if match == (0, False) else f"an engine with the flag off matched {match}"


def _try_junk() -> str | None:
    from vllm.v1.request import RequestStatus

    side = _scheduler()
    request, _ = _offer(side, {"do_remote_prefill": False, "do_remote_decode": False})
    request.num_computed_tokens, request.status = 100, RequestStatus.FINISHED_STOPPED
    delayed, _ = side.request_finished(request, ([1, 2, 3, 4, 5, 6, 7],))
    return "junk parameters keep blocks for ever" if delayed else None


def _try_completions() -> str | None:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    side = _scheduler()
    request, _ = _offer(side, _handle())
    request.status = RequestStatus.FINISHED_ABORTED
    side.request_finished(request, ([1, 2, 3, 4, 5, 6],))
    output = KVConnectorOutput(finished_recving={"selftest"}, finished_sending={"selftest"})
    side.update_connector_output(output)
    if output.finished_recving != {"selftest"} or output.finished_sending:
        return "completions of an aborted request reach vLLM's scheduler, which ends the engine"
    return None


_ATTEMPTS: Final[dict[str, Callable[[], str | None]]] = {
    "proven continuation is pulled": _try_continuation,
    "foreign handle is not read": _try_foreign,
    "malformed handle is not read (HL-24)": _try_malformed,
    "no second match (HL-07)": _try_processed_once,
    "flag off matches nothing (HL-08)": _try_flag_off,
    "junk pins nothing (HL-09)": _try_junk,
    "abort with both completions (EL-03)": _try_completions,
}
