"""What an engine on a CPU does for its neighbours."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock


def case_the_computing_thread_stays_on_its_cores(lab: Any) -> None:
    from pd_connector.shell import cpu

    assert _moves_of_a_new_worker(lab, cpu.on_own_cores()) == []
    # Only while a connector is made.
    assert _moves_of_a_new_worker(lab, nullcontext()) != []


def case_the_connector_is_made_on_its_cores(lab: Any) -> None:
    from vllm.platforms import current_platform

    from pd_connector.shell.facade import NixlPullConnector

    seen: list[Any] = []
    real = NixlPullConnector.__init__

    def observed(*arguments: Any) -> None:
        seen.append(current_platform.discover_numa_topology())
        real(*arguments)

    with mock.patch.object(NixlPullConnector, "__init__", observed):
        lab.connector(lab.config(role="decode"))
    assert seen == [[]]


def case_stock_worker_moves_to_the_last_core(lab: Any) -> None:
    moves = _moves_of_a_new_worker(lab, nullcontext())
    assert moves == [[max(os.sched_getaffinity(0))]]


def _moves_of_a_new_worker(lab: Any, surroundings: AbstractContextManager[None]) -> list[Any]:
    """Cores to which vLLM's worker moves the thread that makes it; its agent is made up."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    moves: list[Any] = []
    made_up = {
        "NixlWrapper": mock.MagicMock(),
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_current_attn_backends": mock.Mock(side_effect=_Enough),
    }
    config = lab.config(role="decode")
    with (
        mock.patch.multiple(base_worker, **made_up),
        mock.patch.object(os, "sched_setaffinity", lambda _, cores: moves.append(list(cores))),
        surroundings,
    ):
        try:
            NixlPullConnectorWorker(config, config.kv_transfer_config.engine_id, lab.cache())
        except _Enough:
            return moves
    raise AssertionError("vLLM's worker was made without asking for what comes after its cores")


class _Enough(Exception):
    """The worker is past the place where it moves."""
