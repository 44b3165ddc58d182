"""P and a decode engine's handle: what may be pulled, and that nothing vLLM repeats changes the answer."""

from __future__ import annotations

from typing import Any

TURN = list(range(1000, 1000 + 100))
"""Tokens of the turn that D holds: 99 computed, 6 whole blocks of 16."""
NEXT = [*TURN, *range(3000, 3060)]


def case_whole_blocks_of_a_continuation_are_pulled(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    side = lab.side("prefill")
    handle = lab.decoder_handle(TURN)
    assert handle["remote_num_tokens"] == 99
    request = lab.arrive(side, "p", NEXT, for_prefill(handle))
    assert lab.allocate(side, request) == (6 * BLOCK, True)
    read = lab.metadata(side).reqs_to_recv["p"]
    assert [list(group) for group in read.remote.block_ids] == [handle["remote_block_ids"][0][:6]]
    assert [len(group) for group in read.local_block_ids] == [6]
    assert read.remote.request_id == "turn1"
    assert read.remote.blocks_expiry_time == handle["remote_blocks_expiry_time"]


def case_asking_again_changes_nothing(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    before = dict(request.kv_transfer_params)
    answers = [side.get_num_new_matched_tokens(request, 0) for _ in range(3)]
    assert answers == [(96, True)] * 3
    assert request.kv_transfer_params == before
    assert not lab.metadata(side).reqs_to_recv


def case_local_hit_shortens_the_pull_from_the_left(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    side = lab.side("prefill")
    handle = lab.decoder_handle(TURN)
    request = lab.arrive(side, "p", NEXT, for_prefill(handle))
    assert lab.allocate(side, request, local_tokens=2 * BLOCK) == (4 * BLOCK, True)
    read = lab.metadata(side).reqs_to_recv["p"]
    # The worker aligns the lists at their ends, so four local blocks take blocks 2 to 5.
    assert [len(group) for group in read.local_block_ids] == [4]
    assert list(read.remote.block_ids[0]) == handle["remote_block_ids"][0][:6]


def case_a_shorter_prompt_cuts_the_handle_at_its_end(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    side = lab.side("prefill")
    handle = lab.decoder_handle(TURN)
    request = lab.arrive(side, "p", TURN[:70], for_prefill(handle))
    assert lab.allocate(side, request) == (4 * BLOCK, True)
    read = lab.metadata(side).reqs_to_recv["p"]
    assert [list(group) for group in read.remote.block_ids] == [handle["remote_block_ids"][0][:4]]


def case_stock_maps_a_shorter_prompt_to_the_wrong_blocks(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", stock=True)
    handle = lab.decoder_handle(TURN)
    request = lab.arrive(side, "p", TURN[:64], for_prefill(handle))
    assert lab.allocate(side, request) == (64, True)
    read = lab.metadata(side).reqs_to_recv["p"]
    # Four local blocks and seven remote ones, aligned at their ends: HL-02.
    assert len(read.local_block_ids[0]) == 4
    assert len(read.remote.block_ids[0]) == 7


def case_an_edit_keeps_the_blocks_before_it(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    side = lab.side("prefill")
    edited = list(NEXT)
    edited[50] += 1
    request = lab.arrive(side, "p", edited, for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request) == (3 * BLOCK, True)
    report = _report(lab, side, request, pulled=3 * BLOCK)
    assert (report["verdict"], report["proven_tokens"], report["pulled_tokens"]) == ("trimmed", 48, 48)


def case_another_conversation_is_not_read_but_the_holder_is_told(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", [*range(160)], for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request) == (0, False)
    _only_notifies(lab, side, "p", "turn1")
    report = _report(lab, side, request)
    assert (report["verdict"], report["proven_tokens"], report["pulled_tokens"]) == ("unproven", 0, 0)


def case_stock_reads_another_conversation(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", stock=True)
    request = lab.arrive(side, "p", [*range(160)], for_prefill(lab.decoder_handle(TURN)))
    assert side.get_num_new_matched_tokens(request, 0) == (99, True)


def case_below_the_threshold_the_holder_is_told(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", extra={"kv_recompute_threshold": 97})
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request) == (0, False)
    _only_notifies(lab, side, "p", "turn1")
    report = _report(lab, side, request)
    assert (report["verdict"], report["pulled_tokens"], report["proven_tokens"]) == ("proven", 0, 96)


def case_everything_local_tells_the_holder(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request, local_tokens=96) == (0, False)
    _only_notifies(lab, side, "p", "turn1")
    report = _report(lab, side, request)
    assert (report["local_tokens"], report["pulled_tokens"]) == (96, 0)


def case_a_handle_without_proof_is_not_read(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for change in ({"pd_proof": None}, {"pd_proof": {"v": 9}}, {"pd_mode": None}, {"pd_mode": "Kept"}):
        side = lab.side("prefill")
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN), **change))
        assert lab.allocate(side, request) == (0, False), change
        _only_notifies(lab, side, "p", "turn1")
        assert _report(lab, side, request)["verdict"] == "unproven"


def case_a_used_handle_is_not_read_again(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    handle = lab.decoder_handle(TURN)
    first = lab.arrive(side, "p", NEXT, for_prefill(handle))
    lab.allocate(side, first)
    lab.metadata(side)
    second = lab.arrive(side, "again", NEXT, for_prefill(handle))
    assert lab.allocate(side, second) == (0, False)
    # The first use released the blocks; a second notice would be for a request that D no longer knows.
    assert not lab.metadata(side).reqs_to_recv
    assert _report(lab, side, second)["verdict"] == "unproven"


def case_scope_is_part_of_the_proof(lab: Any) -> None:
    from vllm.lora.request import LoRARequest

    from support.vllm_lab import for_prefill

    salted = {"cache_salt": "tenant-a"}
    adapted = {"lora_request": LoRARequest("legal", 1, "/adapters/legal")}
    for there, here, count in (
        ({}, salted, 0),
        (salted, {}, 0),
        (salted, salted, 96),
        (salted, {"cache_salt": "tenant-b"}, 0),
        ({}, adapted, 0),
        (adapted, adapted, 96),
        (adapted, {"lora_request": LoRARequest("medical", 1, "/adapters/legal")}, 0),
    ):
        side = lab.side("prefill")
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN, **there)), **here)
        assert side.get_num_new_matched_tokens(request, 0)[0] == count, (there, here)


def case_prompt_logprobs_read_nothing(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)), prompt_logprobs=1)
    assert lab.allocate(side, request) == (0, False)
    _only_notifies(lab, side, "p", "turn1")


def case_media_and_embeddings_prove_nothing(lab: Any) -> None:
    import torch

    from support.vllm_lab import for_prefill

    handle = lab.decoder_handle(TURN)
    side = lab.side("prefill")
    request = lab.request("p", NEXT, for_prefill(handle))
    request.mm_features = [object()]
    side.on_new_request(request)
    assert lab.allocate(side, request) == (0, False)
    assert _report(lab, side, request)["reason"] == "the prompt holds media"
    side = lab.side("prefill")
    request = lab.request("p", NEXT, for_prefill(lab.decoder_handle(TURN)), prompt_embeds=torch.zeros(len(NEXT), 4))
    side.on_new_request(request)
    assert lab.allocate(side, request) == (0, False)


def case_another_block_size_is_not_read(lab: Any) -> None:
    from pd_wire import proof
    from support.vllm_lab import for_prefill

    handle = lab.decoder_handle(TURN)
    handle["pd_proof"] = proof.encode(proof.prove(TURN, 32, bytes(16)))
    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, for_prefill(handle))
    assert lab.allocate(side, request) == (0, False)
    _only_notifies(lab, side, "p", "turn1")


def case_two_groups_are_all_or_nothing(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    decode = lab.side("decode", groups=2)
    handle = lab.decoder_handle(TURN, side=decode)
    assert len(handle["remote_block_ids"]) == 2
    side = lab.side("prefill", groups=2)
    request = lab.arrive(side, "p", NEXT, for_prefill(handle))
    assert side.get_num_new_matched_tokens(request, 0) == (99, True)
    one_short = list(NEXT)
    one_short[98] += 1
    for number, prompt in enumerate((one_short, TURN[:99], TURN[:64])):
        handle = lab.decoder_handle(TURN, side=decode, name=f"other{number}")
        request = lab.arrive(side, f"p{number}", prompt, for_prefill(handle))
        assert lab.allocate(side, request) == (0, False), number
        assert lab.metadata(side).reqs_to_recv[f"p{number}"].local_block_ids == []


def case_a_processed_request_never_matches_again(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request) == (96, True)
    # The read failed and the policy is recompute, or the request was preempted: it starts from nothing.
    request.num_computed_tokens = 0
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    lab.metadata(side)
    assert lab.allocate(side, request) == (0, False)
    assert not lab.metadata(side).reqs_to_recv


def case_stock_offers_a_processed_request_again(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    side = lab.side("prefill", stock=True)
    request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    assert lab.allocate(side, request) == (99, True)
    request.num_computed_tokens = 0
    lab.metadata(side)
    # It offers tokens and queues no read for them: the request waits for ever (HL-07).
    assert lab.allocate(side, request) == (99, True)
    assert not lab.metadata(side).reqs_to_recv


def case_an_engine_that_can_not_pull_says_so(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for setup in ({"extra": {"bidirectional_kv_xfer": False}}, {"host_buffer": True}):
        side = lab.side("prefill", **setup)
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
        assert lab.allocate(side, request) == (0, False), setup
        assert side._reqs_need_recv["p"][0] is request
        assert _report(lab, side, request)["verdict"] == "unproven"


def case_stock_parks_a_request_that_can_not_pull(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for setup in ({"extra": {"bidirectional_kv_xfer": False}}, {"host_buffer": True}):
        side = lab.side("prefill", stock=True, **setup)
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
        assert lab.allocate(side, request) == (99, True), setup
        # Nothing is queued for the tokens that it waits for (HL-08).
        assert "p" not in side._reqs_need_recv


def case_the_report_counts_what_was_loaded(lab: Any) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from support.vllm_lab import for_prefill

    for loaded, expected in ((96, 96), (32, 32), (0, 0)):
        side = lab.side("prefill")
        request = lab.arrive(side, "p", NEXT, for_prefill(lab.decoder_handle(TURN)))
        lab.allocate(side, request)
        # vLLM cuts the count to the valid prefix before it reports the read as over.
        request.num_computed_tokens = loaded
        side.update_connector_output(KVConnectorOutput(finished_recving={"p"}))
        report = _report(lab, side, request)
        assert report["pulled_tokens"] == expected
        assert (report["reason"] == "the read failed") == (loaded == 0)


def case_no_handle_no_report(lab: Any) -> None:
    from support.vllm_lab import NO_HANDLE

    side = lab.side("prefill")
    request = lab.arrive(side, "p", NEXT, dict(NO_HANDLE))
    assert lab.allocate(side, request) == (0, False)
    request.num_computed_tokens = len(NEXT)
    delayed, params = lab.finish(side, request)
    assert delayed
    assert params["do_remote_prefill"] is True
    assert not [key for key in params if key.startswith("pd_")]


def _only_notifies(lab: Any, side: Any, name: str, holder_request: str) -> None:
    metadata = lab.metadata(side)
    read = metadata.reqs_to_recv[name]
    assert not read.local_block_ids
    assert not getattr(read, "awaiting_kvs", False)
    assert read.remote.request_id == holder_request
    assert (read.remote.host, read.remote.port) == (side.side_channel_host, side.side_channel_port)


def _report(lab: Any, side: Any, request: Any, pulled: int = 0) -> Any:
    from vllm.v1.outputs import KVConnectorOutput

    if pulled:
        side.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
    request.num_computed_tokens = request.num_tokens
    _, params = lab.finish(side, request)
    return params["pd_report"]
