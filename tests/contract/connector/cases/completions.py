"""EL-03 on vLLM's real scheduler: an aborted request whose two transfers complete in any order ends no engine."""

from __future__ import annotations

from typing import Any

TURN = list(range(1000, 1100))
NEXT = [*TURN, *range(3000, 3060)]


def case_a_pull_runs_through_the_real_scheduler(lab: Any) -> None:
    scheduler, request = _pulling(lab)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    lab.step(scheduler, received={"p"})
    scheduled, outputs = lab.step(scheduler)
    assert scheduled.num_scheduled_tokens == {"p": len(NEXT) - 96}
    (answer,) = outputs[0].outputs
    assert answer.kv_transfer_params["pd_report"]["pulled_tokens"] == 96
    assert answer.kv_transfer_params["do_remote_prefill"] is True
    # The decode engine reads, and the blocks go.
    assert "p" in scheduler.requests
    lab.step(scheduler, sent={"p"})
    assert not scheduler.requests
    assert _free(scheduler)


def case_aborted_then_received_then_sent(lab: Any) -> None:
    scheduler, _ = _pulling(lab, abort=True)
    lab.step(scheduler, received={"p"})
    assert not scheduler.requests
    lab.step(scheduler, sent={"p"})
    assert _free(scheduler)


def case_aborted_then_sent_then_received(lab: Any) -> None:
    scheduler, _ = _pulling(lab, abort=True)
    lab.step(scheduler, sent={"p"})
    # The read still writes into these blocks: a send must not free them.
    assert "p" in scheduler.requests
    assert not _free(scheduler)
    lab.step(scheduler, received={"p"})
    assert not scheduler.requests
    assert _free(scheduler)


def case_aborted_then_both_at_once(lab: Any) -> None:
    scheduler, _ = _pulling(lab, abort=True)
    lab.step(scheduler, received={"p"}, sent={"p"})
    assert not scheduler.requests
    assert _free(scheduler)


def case_a_receive_nobody_waits_for_keeps_the_blocks(lab: Any) -> None:
    scheduler, _ = _pulling(lab)
    lab.step(scheduler, received={"p"})
    lab.step(scheduler)
    assert "p" in scheduler.requests
    # A second report of the same read must not free what the decode engine has yet to read.
    lab.step(scheduler, received={"p"})
    assert "p" in scheduler.requests
    lab.step(scheduler, sent={"p"})
    assert not scheduler.requests


def case_unknown_completions_are_dropped(lab: Any) -> None:
    scheduler, _ = _pulling(lab)
    lab.step(scheduler, received={"ghost"}, sent={"spirit", "p"})
    assert "p" in scheduler.requests


def case_stock_asserts_on_both_at_once(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for steps in ([{"received": {"p"}, "sent": {"p"}}], [{"sent": {"p"}}, {"received": {"p"}}]):
        scheduler = lab.scheduler("prefill", stock=True)
        request = lab.request("p", NEXT, for_prefill(lab.decoder_handle(TURN)))
        scheduler.add_request(request)
        lab.step(scheduler)
        scheduler.finish_requests("p", _aborted())
        try:
            for step in steps:
                lab.step(scheduler, **step)
        except AssertionError:
            continue
        raise RuntimeError(f"vLLM no longer asserts on {steps}: the guard may go")


def case_a_failed_read_is_recomputed(lab: Any) -> None:
    scheduler, request = _pulling(lab, kv_load_failure_policy="recompute")
    invalid = set(scheduler.kv_cache_manager.get_block_ids("p")[0])
    lab.step(scheduler, received={"p"}, invalid_block_ids=invalid)
    scheduled, outputs = lab.step(scheduler)
    assert scheduled.num_scheduled_tokens == {"p": len(NEXT)}
    (answer,) = outputs[0].outputs
    report = answer.kv_transfer_params["pd_report"]
    assert (report["pulled_tokens"], report["reason"]) == (0, "the read failed")
    assert request.is_finished()


def case_stock_waits_for_ever_after_a_failed_read(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    scheduler = lab.scheduler("prefill", stock=True, kv_load_failure_policy="recompute")
    scheduler.add_request(lab.request("p", NEXT, for_prefill(lab.decoder_handle(TURN))))
    lab.step(scheduler)
    invalid = set(scheduler.kv_cache_manager.get_block_ids("p")[0])
    lab.step(scheduler, received={"p"}, invalid_block_ids=invalid)
    for _ in range(3):
        scheduled, _ = lab.step(scheduler)
        assert not scheduled.num_scheduled_tokens
        assert "p" not in scheduled.kv_connector_metadata.reqs_to_recv


def case_a_failed_read_ends_the_request_by_default(lab: Any) -> None:
    scheduler, request = _pulling(lab)
    invalid = set(scheduler.kv_cache_manager.get_block_ids("p")[0])
    lab.step(scheduler, received={"p"}, invalid_block_ids=invalid)
    assert request.status.name == "FINISHED_ERROR"
    assert not scheduler.requests
    assert _free(scheduler)
    assert len(scheduler.connector.connector_scheduler.pd_ledger) == 0


def case_a_decode_turn_is_retained_until_it_is_read(lab: Any) -> None:
    from support.vllm_lab import prefill_handle

    scheduler = lab.scheduler("decode")
    scheduler.add_request(lab.request("d", TURN, prefill_handle(len(TURN)), max_tokens=3))
    lab.step(scheduler)
    lab.step(scheduler, received={"d"})
    outputs = {}
    for _ in range(3):
        _, outputs = lab.step(scheduler)
    (answer,) = outputs[0].outputs
    assert answer.kv_transfer_params["do_remote_decode"] is True
    assert answer.kv_transfer_params["pd_proof"]
    assert "d" in scheduler.requests
    lab.step(scheduler, sent={"d"})
    assert not scheduler.requests
    assert _free(scheduler)


def case_a_decode_turn_without_follow_up_frees_at_once(lab: Any) -> None:
    from support.vllm_lab import prefill_handle

    scheduler = lab.scheduler("decode")
    scheduler.add_request(lab.request("d", TURN, prefill_handle(len(TURN), pd_retain=False), max_tokens=3))
    lab.step(scheduler)
    lab.step(scheduler, received={"d"})
    outputs = {}
    for _ in range(3):
        _, outputs = lab.step(scheduler)
    (answer,) = outputs[0].outputs
    assert answer.kv_transfer_params is None
    lab.step(scheduler)
    assert not scheduler.requests
    assert _free(scheduler)


def case_a_thousand_junk_requests_leave_no_block_behind(lab: Any) -> None:
    scheduler = lab.scheduler("decode")
    for number in range(1000):
        name = f"junk{number}"
        scheduler.add_request(lab.request(name, TURN, {"do_remote_prefill": False, "note": number}, max_tokens=1))
        lab.step(scheduler)
    lab.step(scheduler)
    assert not scheduler.requests
    assert _free(scheduler)


def _pulling(lab: Any, *, abort: bool = False, **config: Any) -> tuple[Any, Any]:
    """A prefill request that waits for its read, aborted by its client when ``abort`` says so."""
    from support.vllm_lab import for_prefill

    scheduler = lab.scheduler("prefill", **config)
    request = lab.request("p", NEXT, for_prefill(lab.decoder_handle(TURN)))
    scheduler.add_request(request)
    scheduled, _ = lab.step(scheduler)
    assert "p" in scheduled.kv_connector_metadata.reqs_to_recv
    if abort:
        scheduler.finish_requests("p", _aborted())
    return scheduler, request


def _free(scheduler: Any) -> bool:
    """Whether every block is back: the pool keeps one for itself."""
    from support.vllm_lab import BLOCKS

    return bool(scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1)


def _aborted() -> Any:
    from support.vllm_lab import ABORTED

    return ABORTED
