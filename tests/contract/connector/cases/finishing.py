"""The end of a turn on D, junk parameters, and requests that end before they start."""

from __future__ import annotations

from typing import Any

PROMPT = list(range(500, 600))


def case_a_decode_turn_returns_a_proven_handle(lab: Any) -> None:
    from pd_wire import proof
    from pd_wire.handle import decoder_handle_fault

    side = lab.side("decode")
    turn = list(range(700, 800))
    handle = lab.decoder_handle(turn, side=side)
    assert handle["pd_mode"] == "Pinned"
    shown = proof.decode(handle["pd_proof"])
    assert proof.matching_blocks(shown, turn) == shown.blocks == 6
    assert shown.tokens == 99
    assert decoder_handle_fault({**handle, "do_remote_decode": True}) is None
    # The end of the lease is armed in the worker only for ids that it has seen in a batch.
    metadata = lab.metadata(side)
    assert "turn1" in metadata.reqs_to_send
    assert "turn1" in metadata.reqs_in_batch


def case_the_key_differs_per_start(lab: Any) -> None:
    keys = {lab.decoder_handle(PROMPT, side=lab.side("decode"))["pd_proof"]["key"] for _ in range(3)}
    assert len(keys) == 3


def case_only_computed_tokens_are_proven(lab: Any) -> None:
    from pd_wire import proof
    from support.vllm_lab import STOPPED, prefill_handle

    side = lab.side("decode")
    request = lab.arrive(side, "d", PROMPT, prefill_handle(100), max_tokens=30)
    lab.allocate(side, request)
    request.append_output_token_ids(list(range(12)))
    # Two steps run ahead of the device: their tokens may not be in the blocks yet.
    request.num_computed_tokens = 113
    request.num_in_flight_tokens = 2
    _receive(side, "d")
    _, params = lab.finish(side, request, STOPPED)
    assert proof.decode(params["pd_proof"]).tokens == 111


def case_no_retention_when_the_router_wants_none(lab: Any) -> None:
    from support.vllm_lab import STOPPED, prefill_handle

    side = lab.side("decode")
    request = lab.arrive(side, "d", PROMPT, prefill_handle(100, pd_retain=False), max_tokens=30)
    assert lab.allocate(side, request) == (100, True)
    _receive(side, "d")
    request.num_computed_tokens = 110
    assert lab.finish(side, request, STOPPED) == (False, None)
    metadata = lab.metadata(side)
    assert not metadata.reqs_to_send
    assert "d" in metadata.reqs_not_processed
    assert len(side.pd_ledger) == 0


def case_blocks_that_can_not_be_proven_are_not_kept(lab: Any) -> None:
    from support.vllm_lab import STOPPED, prefill_handle

    side = lab.side("decode")
    media = lab.request("media", PROMPT, prefill_handle(100), max_tokens=30)
    media.mm_features = [object()]
    short = lab.request("short", PROMPT[:9], prefill_handle(9), max_tokens=30)
    for request in (media, short):
        side.on_new_request(request)
        lab.allocate(side, request)
        _receive(side, request.request_id)
        assert lab.finish(side, request, STOPPED) == (False, None), request.request_id
    assert not lab.metadata(side).reqs_to_send


def case_junk_parameters_pin_nothing(lab: Any) -> None:
    from support.vllm_lab import STOPPED

    for number, junk in enumerate(_JUNK):
        side = lab.side("decode")
        name = f"junk{number}"
        request = lab.arrive(side, name, PROMPT, junk, max_tokens=30)
        assert lab.allocate(side, request) == (0, False), junk
        request.num_computed_tokens = 110
        assert lab.finish(side, request, STOPPED) == (False, None), junk
        metadata = lab.metadata(side)
        assert not metadata.reqs_to_send, junk
        assert not metadata.reqs_to_recv, junk


def case_stock_pins_on_junk_without_an_end(lab: Any) -> None:
    from support.vllm_lab import STOPPED

    side = lab.side("decode", stock=True)
    request = lab.arrive(side, "junk", PROMPT, {"do_remote_prefill": False, "do_remote_decode": False}, max_tokens=30)
    lab.allocate(side, request)
    request.num_computed_tokens = 110
    delayed, _ = lab.finish(side, request, STOPPED)
    metadata = lab.metadata(side)
    # Blocks are kept, and the worker ignores the deadline of an id that was in no batch (HL-09).
    assert delayed
    assert "junk" in metadata.reqs_to_send
    assert "junk" not in metadata.reqs_in_batch


def case_no_parameters_no_handle(lab: Any) -> None:
    from support.vllm_lab import STOPPED

    side = lab.side("decode")
    request = lab.arrive(side, "plain", PROMPT, None, max_tokens=30)
    assert lab.allocate(side, request) == (0, False)
    request.num_computed_tokens = 110
    assert lab.finish(side, request, STOPPED) == (False, None)


def case_every_delayed_free_has_an_end(lab: Any) -> None:
    from support.vllm_lab import NO_HANDLE, STOPPED, for_prefill, prefill_handle

    misfit = prefill_handle(400)
    for role, params in (
        ("prefill", dict(NO_HANDLE)),
        ("prefill", for_prefill(lab.decoder_handle(PROMPT))),
        ("decode", prefill_handle(100)),
        ("decode", misfit),
        ("decode", {"do_remote_prefill": True}),
    ):
        side = lab.side(role)
        request = lab.arrive(side, "r", PROMPT, params)
        lab.allocate(side, request)
        _receive(side, "r")
        request.num_computed_tokens = len(PROMPT)
        # A step passed since the allocation: what it carried is gone.
        lab.metadata(side)
        delayed, _ = lab.finish(side, request, STOPPED)
        metadata = lab.metadata(side)
        assert delayed, params
        assert "r" in metadata.reqs_to_send, params
        assert "r" in metadata.reqs_in_batch, params


def case_decode_computes_what_it_can_not_pull(lab: Any) -> None:
    from support.vllm_lab import STOPPED, prefill_handle

    broken = [
        prefill_handle(100, remote_block_ids=None),
        prefill_handle(100, remote_block_ids=[]),
        prefill_handle(100, remote_block_ids=[1, 2, 3]),
        prefill_handle(100, remote_port="5600"),
        prefill_handle(100, remote_engine_id=None),
        prefill_handle(400),
        prefill_handle(30),
        prefill_handle(100, groups=2),
    ]
    for params in broken:
        side = lab.side("decode")
        request = lab.arrive(side, "d", PROMPT, params, max_tokens=30)
        assert lab.allocate(side, request) == (0, False), params
        request.num_computed_tokens = 110
        request.append_output_token_ids(list(range(11)))
        delayed, handle = lab.finish(side, request, STOPPED)
        assert delayed, params
        assert handle["pd_proof"], params


def case_stock_asserts_or_parks_on_a_broken_prefill_handle(lab: Any) -> None:
    from support.vllm_lab import prefill_handle

    side = lab.side("decode", stock=True)
    request = lab.arrive(side, "d", PROMPT, prefill_handle(100, remote_block_ids=None), max_tokens=30)
    try:
        lab.allocate(side, request)
    except AssertionError:
        return
    raise RuntimeError("vLLM no longer asserts on a prefill handle without blocks: the guard may go")


def case_a_prefill_that_never_starts_releases_the_holder(lab: Any) -> None:
    from support.vllm_lab import ABORTED, for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", PROMPT, for_prefill(lab.decoder_handle(PROMPT)))
    assert lab.finish(side, request, ABORTED) == (False, None)
    read = lab.metadata(side).reqs_to_recv["p"]
    assert not read.local_block_ids
    assert read.remote.request_id == "turn1"
    assert len(side.pd_ledger) == 0


def case_stock_leaves_the_holder_waiting(lab: Any) -> None:
    from support.vllm_lab import ABORTED, for_prefill

    side = lab.side("prefill", stock=True)
    request = lab.arrive(side, "p", PROMPT, for_prefill(lab.decoder_handle(PROMPT)))
    lab.finish(side, request, ABORTED)
    assert not lab.metadata(side).reqs_to_recv


def case_a_decode_that_never_starts_releases_the_prefill_engine(lab: Any) -> None:
    from support.vllm_lab import ABORTED, prefill_handle

    side = lab.side("decode")
    request = lab.arrive(side, "d", PROMPT, prefill_handle(100))
    assert lab.finish(side, request, ABORTED) == (False, None)
    assert lab.metadata(side).reqs_to_recv["d"].remote.request_id == "prefill-request"


def case_an_aborted_turn_keeps_nothing(lab: Any) -> None:
    from support.vllm_lab import ABORTED, prefill_handle

    side = lab.side("decode")
    request = lab.arrive(side, "d", PROMPT, prefill_handle(100), max_tokens=30)
    lab.allocate(side, request)
    _receive(side, "d")
    assert lab.finish(side, request, ABORTED) == (False, None)
    assert len(side.pd_ledger) == 0


_JUNK: list[Any] = [
    {},
    {"do_remote_prefill": False, "do_remote_decode": False},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": "yes"},
    {"do_remote_decode": 1},
    {"anything": [1, 2, 3]},
    {"pd_retain": True},
    {"remote_block_ids": [[1]], "remote_engine_id": "x", "remote_request_id": "y"},
]


def _receive(side: Any, name: str) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    side.update_connector_output(KVConnectorOutput(finished_recving={name}))
