"""Malformed handles: whatever a JSON hop did to one, no hook raises and the worker sees nothing that it asserts on."""

from __future__ import annotations

import copy
from typing import Any

TURN = list(range(1000, 1100))
NEXT = [*TURN, *range(3000, 3060)]
NUMBERS: list[Any] = [-1, 0, 1.5, True, 1 << 40, float("nan"), float("inf")]
BAD_VALUES: list[Any] = [*NUMBERS, None, "", "7", [], {}, [1, 2], [[]], [["a"]]]
READ_REGARDLESS = (
    "do_remote_prefill",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
)
"""Fields of which another value may be as good as the genuine one: an address, a time, a flag that says no."""


def case_every_field_may_be_anything(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    genuine = for_prefill(lab.decoder_handle(TURN))
    side = lab.side("prefill")
    changes = [(field, value) for field in genuine for value in (*BAD_VALUES, "gone") if value is not genuine[field]]
    for number, (field, value) in enumerate(changes):
        handle = copy.deepcopy(genuine)
        handle["remote_request_id"] = f"turn-{number}"
        if value == "gone":
            del handle[field]
        else:
            handle[field] = value
        _survives(lab, side, f"p{number}", handle, (field, value))


def case_block_lists_may_be_anything(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    genuine = for_prefill(lab.decoder_handle(TURN))
    ids = genuine["remote_block_ids"][0]
    side = lab.side("prefill")
    for number, blocks in enumerate(
        (
            ids,
            [ids, ids],
            [ids[:3]],
            [[*ids, 9]],
            [[-1, *ids[1:]]],
            [[1 << 31, *ids[1:]]],
            [[str(i) for i in ids]],
            [[]],
        )
    ):
        handle = {**genuine, "remote_request_id": f"turn-{number}", "remote_block_ids": blocks}
        request = lab.arrive(side, f"p{number}", NEXT, handle)
        assert lab.allocate(side, request) == (0, False), blocks
        assert request.kv_transfer_params["remote_block_ids"] == []
        request.num_computed_tokens = len(NEXT)
        _, params = lab.finish(side, request)
        assert params["pd_report"]["verdict"] == "malformed", blocks
        assert lab.metadata(side).reqs_to_recv[f"p{number}"].local_block_ids == []


def case_a_handle_without_a_deadline_is_malformed(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for value in (None, float("nan"), float("inf"), "soon"):
        side = lab.side("prefill")
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN), remote_blocks_expiry_time=value))
        assert lab.allocate(side, request) == (0, False), value


def case_stock_reads_without_a_deadline(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", stock=True)
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN), remote_blocks_expiry_time=None))
    assert side.get_num_new_matched_tokens(request, 0) == (99, True)


def case_stock_hands_a_flattened_list_to_the_worker(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", stock=True)
    handle = lab.decoder_handle(TURN)
    request = lab.arrive(side, "p", NEXT, for_prefill(handle, remote_block_ids=handle["remote_block_ids"][0]))
    lab.allocate(side, request)
    # The worker compares the number of groups with an assertion (HL-24).
    assert len(lab.metadata(side).reqs_to_recv["p"].remote.block_ids) == 7


def _survives(lab: Any, side: Any, name: str, handle: dict[str, Any], what: tuple[str, Any]) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    field, _ = what
    request = lab.arrive(side, name, NEXT, handle)
    count, is_async = lab.allocate(side, request)
    read = lab.metadata(side).reqs_to_recv.get(name)
    if is_async:
        assert field in READ_REGARDLESS or not field.startswith(("remote_", "pd_", "do_")), what
        assert count == 96, what
        assert [len(group) for group in read.remote.block_ids] == [6], what
        expiry = read.remote.blocks_expiry_time
        assert isinstance(expiry, float | int), what
        assert -1e12 < expiry < 1e12, what
        side.update_connector_output(KVConnectorOutput(finished_recving={name}))
    elif read is not None:
        assert not read.local_block_ids, what
    if read is not None:
        # What the worker builds an address, a socket and a loop from.
        assert isinstance(read.remote.engine_id, str), what
        assert isinstance(read.remote.host, str), what
        assert 1 <= read.remote.port <= 65535, what
        assert isinstance(read.tp_size, int), what
    request.num_computed_tokens = len(NEXT)
    lab.finish(side, request)
