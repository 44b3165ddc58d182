"""Blocks that nobody keeps: given back at the end of a turn, still readable, and never read as something else.

On a release without the means for it the mode falls back to Pinned, and handles of the mode are not read.
"""

from __future__ import annotations

from typing import Any

from support.vllm_turns import TURN, SideChannel, idle, intact, is_free, pool_of, supported, turn

NEXT = [*TURN, *range(3000, 3060)]
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
UNPINNED = {"extra": {"pd_retention": "Unpinned"}}


def case_the_pool_is_free_after_a_turn_and_the_handle_says_when_it_ended(lab: Any) -> None:
    scheduler, handle = _turn(lab)
    if not supported():
        assert handle["pd_mode"] == "Pinned"
        assert handle["remote_blocks_expiry_time"] is not None
        return
    from pd_wire import moment
    from pd_wire.handle import decoder_handle_fault

    assert handle["pd_mode"] == "Unpinned"
    assert moment.parse(handle["pd_moment"]).count == 0
    assert handle["remote_blocks_expiry_time"] is None
    assert decoder_handle_fault(handle) is None
    assert not scheduler.requests
    idle(lab, scheduler)
    assert is_free(scheduler)
    assert not scheduler.connector.has_pending_push_work()


def case_the_worker_is_told_to_forget_the_turn(lab: Any) -> None:
    scheduler, handle = _turn(lab)
    if supported():
        metadata = scheduler.schedule().kv_connector_metadata
        assert not metadata.reqs_to_send
        assert "turn" in metadata.reqs_not_processed
        assert handle["remote_request_id"].startswith("pd-unpinned-")


def case_blocks_stay_intact_until_the_pool_hands_them_out(lab: Any) -> None:
    scheduler, handle = _turn(lab)
    if not supported():
        return
    idle(lab, scheduler)
    assert intact(scheduler, handle) == 6
    # The rest of the pool is taken first, the turn's last block before its first one.
    pool = scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks() - 6)
    assert intact(scheduler, handle) == 6
    for left in (5, 4, 3, 2, 1, 0):
        others += pool.get_new_blocks(1)
        assert intact(scheduler, handle) == left
    # Given back and never written again, they are still somebody else's.
    pool.free_blocks(others)
    assert intact(scheduler, handle) == 0


def case_blocks_that_wait_for_a_step_preempt_nobody(lab: Any) -> None:
    from support.vllm_lab import prefill_handle

    if not supported():
        return
    preempted = {"nothing kept": 0, "kept": 0, "kept, and vLLM not told": 0}
    for kind in preempted:
        for length in range(17, 33):
            scheduler = lab.scheduler("decode", **UNPINNED)
            pool = pool_of(scheduler)
            pool.get_new_blocks(pool.get_num_free_blocks() - 8)
            if kind == "kept, and vLLM not told":
                scheduler.connector.connector_scheduler.relieve = lambda: False
            # Ends with six whole blocks and none that is not kept, while the other one needs a third.
            params = prefill_handle(93, pd_retain=kind != "nothing kept")
            scheduler.add_request(lab.request("ends", TURN[:93], params, max_tokens=4))
            stays = lab.request("stays", range(length), None, max_tokens=40)
            scheduler.add_request(stays)
            for _ in range(12):
                lab.step(scheduler, received={"ends"} & _loading(scheduler))
            preempted[kind] += stays.num_preemptions
    assert preempted["nothing kept"] == preempted["kept"] < preempted["kept, and vLLM not told"]


def case_a_reset_cache_ends_every_handle(lab: Any) -> None:
    scheduler, handle = _turn(lab)
    if not supported():
        return
    idle(lab, scheduler)
    assert scheduler.reset_prefix_cache()
    assert intact(scheduler, handle) == 0
    _, again = _turn(lab, scheduler)
    idle(lab, scheduler)
    assert intact(scheduler, again) == 6
    scheduler.connector.reset_cache()
    assert intact(scheduler, again) == 0


def case_another_engine_or_epoch_has_nothing(lab: Any) -> None:
    scheduler, handle = _turn(lab)
    if not supported():
        return
    idle(lab, scheduler)
    assert intact(scheduler, {**handle, "remote_engine_id": "another"}) == 0
    epoch, count = handle["pd_moment"].split("-")
    other = ("0" if epoch[0] != "0" else "1") + epoch[1:]
    assert intact(scheduler, {**handle, "pd_moment": f"{other}-{count}"}) == 0
    beyond = {**handle, "remote_block_ids": [[*handle["remote_block_ids"][0][:2], 1 << 20, 3]]}
    assert intact(scheduler, beyond) == 2


def case_what_is_not_retained_has_no_moment(lab: Any) -> None:
    scheduler, handle = _turn(lab, pd_retain=False)
    assert handle is None
    idle(lab, scheduler)
    assert is_free(scheduler)


def case_several_groups_fall_back(lab: Any) -> None:
    from pd_wire.names import MODE_PINNED

    side = lab.side("decode", groups=2, **UNPINNED)
    side.bind_block_pool(object())
    handle = lab.decoder_handle(TURN, side=side)
    assert handle["pd_mode"] == MODE_PINNED
    assert "pd_fallback" not in lab.decoder_handle(TURN)
    assert ("groups" in handle["pd_fallback"]) or not supported()


def case_p_waits_for_the_answer_and_reads_what_is_intact(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    if not supported():
        return
    scheduler, handle = _turn(lab)
    idle(lab, scheduler)
    with SideChannel(scheduler) as holder:
        side = lab.side("prefill", **RECOMPUTE)
        for readers in (1, 2, 3):
            request = lab.arrive(side, f"p{readers}", NEXT, for_prefill({**handle, **holder}))
            assert _allocate(lab, side, request) == (6 * BLOCK, True), readers
        pool = scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 4)
        request = lab.arrive(side, "q", NEXT, for_prefill({**handle, **holder}))
        assert _allocate(lab, side, request) == (4 * BLOCK, True)
        meta = lab.metadata(side).reqs_to_recv["q"]
        assert list(meta.remote.block_ids[0]) == handle["remote_block_ids"][0][:4]
        assert list(meta.pd_check.question.blocks) == handle["remote_block_ids"][0][:4]
        report = _report(lab, side, request, pulled=4 * BLOCK)
        assert (report["gone_tokens"], report["wasted_tokens"], report["pulled_tokens"]) == (32, 0, 64)
        pool.free_blocks(taken)


def case_p_computes_itself_when_nothing_is_left_or_nobody_answers(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    if not supported():
        return
    scheduler, handle = _turn(lab)
    idle(lab, scheduler)
    side = lab.side("prefill", **RECOMPUTE)
    with SideChannel(scheduler) as holder:
        scheduler.connector.reset_cache()
        request = lab.arrive(side, "gone", NEXT, for_prefill({**handle, **holder}))
        assert _allocate(lab, side, request) == (0, False)
        report = _report(lab, side, request, pulled=0)
        assert (report["gone_tokens"], report["verdict"]) == (96, "proven")
    request = lab.arrive(side, "alone", NEXT, for_prefill({**handle, **holder}))
    assert _allocate(lab, side, request) == (0, False)
    # Nobody keeps anything, so there is nobody to be told.
    assert not lab.metadata(side).reqs_to_recv


def case_p_that_cannot_ask_does_not_read(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    handle = {**lab.decoder_handle(TURN), "pd_mode": "Unpinned", "pd_moment": "0123456789abcdef-0"}
    side = lab.side("prefill", kv_load_failure_policy="fail")
    request = lab.arrive(side, "p", NEXT, for_prefill(handle))
    assert lab.allocate(side, request) == (0, False)
    assert "kv_load_failure_policy" in _report(lab, side, request, pulled=0)["reason"]


def case_a_handle_without_a_moment_is_malformed(lab: Any) -> None:
    from support.vllm_lab import for_prefill

    for value in (None, "", 7, "x-0", "0123456789abcdef-", "0123456789ABCDEF-0", "0123456789abcdef-" + "f" * 17):
        handle = {**lab.decoder_handle(TURN), "pd_mode": "Unpinned", "pd_moment": value}
        side = lab.side("prefill", **RECOMPUTE)
        request = lab.arrive(side, "p", NEXT, for_prefill(handle))
        assert lab.allocate(side, request) == (0, False), value
        report = _report(lab, side, request, pulled=0)
        assert report["verdict"] == "malformed", (value, report)


def case_overwritten_while_read_is_computed_again_through_the_real_scheduler(lab: Any) -> None:
    from support.vllm_lab import BLOCK, for_prefill

    if not supported():
        return
    for good in (4, 0):
        scheduler, handle = _turn(lab)
        idle(lab, scheduler)
        with SideChannel(scheduler) as holder:
            reader = lab.scheduler("prefill", **RECOMPUTE)
            request = lab.request("p", NEXT, for_prefill({**handle, **holder}))
            reader.add_request(request)
            while request.status.name != "WAITING_FOR_REMOTE_KVS":
                lab.step(reader)
        own = reader.kv_cache_manager.get_block_ids("p")[0]
        lab.step(reader, received={"p"}, invalid_block_ids=set(own[good:6]))
        scheduled, outputs = lab.step(reader)
        assert scheduled.num_scheduled_tokens == {"p": len(NEXT) - good * BLOCK}
        (answer,) = outputs[0].outputs
        report = answer.kv_transfer_params["pd_report"]
        assert (report["pulled_tokens"], report["wasted_tokens"]) == (good * BLOCK, (6 - good) * BLOCK)
        assert report["reason"] == "the holder reused blocks while they were read"


def case_the_worker_holds_a_read_back_until_the_holder_has_answered(lab: Any) -> None:
    if not supported():
        return
    for good, expected in ((6, set()), (4, {54, 55}), (2, {52, 53, 54, 55}), (0, {52, 53, 54, 55})):
        worker = _worker(local=[52, 53, 54, 55], asked=6)
        assert worker._pop_done_transfers({"p": []}) == (set(), set())
        worker.pd_asker.answer.set_result(good)
        assert worker._pop_done_transfers({}) == ({"p"}, set())
        bad = set() if worker._invalid_block_ids.empty() else worker._invalid_block_ids.get()
        assert bad == expected, good


def case_a_failed_read_is_not_judged(lab: Any) -> None:
    if not supported():
        return
    worker = _worker(local=[52], asked=1)
    worker._recv_failures.add("p")
    assert worker._pop_done_transfers({"p": []}) == ({"p"}, set())
    assert not worker.pd_asked


def case_notices_of_unpinned_reads_are_not_shown_to_vllm(lab: Any) -> None:
    from types import SimpleNamespace

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    from pd_connector.core.notices import marked
    from pd_connector.shell.worker import PDPullWorker, adopt

    class Idle(PDPullWorker):
        def __del__(self) -> None:
            pass

    worker = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
    arrived = {"a": [marked("one").encode() + b":1", b"two:1", b"HB:three"], "b": [marked("four").encode() + b":2"]}
    worker.nixl_wrapper = SimpleNamespace(get_new_notifs=lambda: arrived)
    adopt(worker)
    assert isinstance(worker, PDPullWorker)
    assert worker.nixl_wrapper.get_new_notifs() == {"a": [b"two:1", b"HB:three"]}
    worker.__class__ = Idle  # the real one lets go of its agent when it is collected


# --- parts ------------------------------------------------------------------------------------------


def _turn(lab: Any, scheduler: Any = None, **router: Any) -> tuple[Any, Any]:
    """One turn on a decode engine's real scheduler; returns it and the handle."""
    scheduler = scheduler or lab.scheduler("decode", **UNPINNED)
    return scheduler, turn(lab, scheduler, **router)


def _loading(scheduler: Any) -> set[str]:
    """Requests whose read has not been reported."""
    waiting = {name for name, one in scheduler.requests.items() if one.status.name == "WAITING_FOR_REMOTE_KVS"}
    return waiting - scheduler.finished_recving_kv_req_ids


def _until(reached: Any) -> None:
    import time

    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _allocate(lab: Any, side: Any, request: Any) -> tuple[int, bool]:
    """Ask as often as vLLM would, then allocate."""
    _until(lambda: side.get_num_new_matched_tokens(request, 0)[0] is not None)
    answer: tuple[int, bool] = lab.allocate(side, request)
    return answer


def _report(lab: Any, side: Any, request: Any, pulled: int) -> dict[str, Any]:
    from vllm.v1.outputs import KVConnectorOutput

    if pulled:
        request.num_computed_tokens = pulled
        side.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
    request.num_computed_tokens = request.num_tokens
    _, params = lab.finish(side, request)
    report: dict[str, Any] = params["pd_report"]
    return report


def _worker(local: list[int], asked: int) -> Any:
    """Our worker with one finished read, without NIXL; `pd_asker.answer` is the holder's."""
    import queue
    from concurrent.futures import Future
    from types import SimpleNamespace

    from pd_connector.shell.asking import Asked, Patience
    from pd_connector.shell.worker import PDPullWorker

    class Idle(PDPullWorker):
        def __init__(self) -> None:
            pass

        def __del__(self) -> None:
            pass

    class Holder:
        answer: Any = Future()

        def __init__(self) -> None:
            self.answer = Future()

        def ask(self, host: str, port: int, question: Any) -> Any:
            return Asked(self.answer)

    worker = Idle()
    question = SimpleNamespace(blocks=list(range(asked)))
    meta = SimpleNamespace(local_block_ids=[local], pd_check=SimpleNamespace(host="h", port=1, question=question))
    worker._recving_metadata = {"p": meta}
    worker._recv_failures = set()
    worker._invalid_block_ids = queue.Queue()
    worker.pd_asker, worker.pd_asked, worker.pd_patience = Holder(), {}, Patience()
    return worker
