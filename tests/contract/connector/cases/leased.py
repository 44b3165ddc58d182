"""Blocks that are kept for a while: until a lease ends, and never when the engine's own requests need them."""

from __future__ import annotations

import threading
from typing import Any

from support.vllm_turns import TURN, WHOLE, idle, intact, is_free, pool_of, retention, supported, turn

LEASED = {"extra": {"pd_retention": "Leased"}}
CAP = 200
"""Half of the lab's blocks."""


def case_a_turn_is_kept_until_its_lease_ends(lab: Any) -> None:
    if not supported():
        return
    from pd_wire import lease
    from pd_wire.handle import decoder_handle_fault

    scheduler = _decode(lab)
    handle = turn(lab, scheduler)
    assert (handle["pd_mode"], handle["remote_blocks_expiry_time"]) == ("Leased", None)
    assert lease.parse(handle["pd_lease"]).seconds == 60
    assert decoder_handle_fault(handle) is None
    idle(lab, scheduler)
    assert not is_free(scheduler)
    assert pool_of(scheduler).get_num_free_blocks() == pool_of(scheduler).num_gpu_blocks - 1 - WHOLE
    assert not scheduler.has_requests(), "an idle engine takes no steps for a lease"
    assert _set(scheduler, handle, 0) == 0
    assert scheduler.has_requests(), "the next step frees the blocks"
    lab.step(scheduler)
    assert is_free(scheduler)
    assert not scheduler.has_requests()
    # Given back as with Unpinned: readable until somebody gets them.
    assert intact(scheduler, handle) == WHOLE
    pool = pool_of(scheduler)
    pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    assert intact(scheduler, handle) == 2


def case_a_lease_runs_out_unless_it_is_prolonged(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", extra={"pd_retention": "Leased", "pd_lease_seconds": 10})
    clock = _clock(scheduler)
    first, second = turn(lab, scheduler, name="first"), turn(lab, scheduler, [*TURN[1:], 7], name="second")
    clock.now += 9
    assert _set(scheduler, second, 100) == 100
    idle(lab, scheduler)
    assert (_leases(scheduler), _leased_blocks(scheduler)) == (2, 2 * WHOLE)
    clock.now += 1
    assert scheduler.has_requests()
    idle(lab, scheduler)
    assert _leases(scheduler) == 1
    assert _set(scheduler, first, 100) == 0, "it is over"
    clock.now += 98
    idle(lab, scheduler)
    assert _set(scheduler, second, 3) == 3, "a router may shorten it"
    clock.now += 3
    idle(lab, scheduler)
    assert is_free(scheduler)


def case_a_waiting_request_gets_the_blocks_of_the_least_valuable_leases(lab: Any) -> None:
    if not supported():
        return
    for helped in (True, False):
        scheduler = _decode(lab)
        handles = _turns(lab, scheduler, 4)
        _set(scheduler, handles[0], 100)
        pool = pool_of(scheduler)
        others = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
        if not helped:
            retention(scheduler).make_room = lambda *_: None
        request = _add(lab, scheduler, "new", 9 * 16)
        lab.step(scheduler)
        # Nine blocks, and one for its next step: three are free, and each lease gives six. What is not taken is intact.
        assert request.status.name == ("WAITING_FOR_REMOTE_KVS" if helped else "WAITING")
        assert [intact(scheduler, handle) for handle in handles] == ([6, 0, 6, 6] if helped else [6, 6, 6, 6])
        assert [_set(scheduler, handle, 60) for handle in handles] == ([60, 0, 0, 60] if helped else [60] * 4)
        pool.free_blocks(others)


def case_a_request_that_would_wait_all_the_same_ends_no_lease(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    _turns(lab, scheduler, 2)
    pool = pool_of(scheduler)
    others = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    request = _add(lab, scheduler, "large", 16 * 16)
    idle(lab, scheduler)
    assert (request.status.name, _leases(scheduler)) == ("WAITING", 2)
    pool.free_blocks(others[:1])
    lab.step(scheduler)
    assert (request.status.name, _leases(scheduler)) == ("WAITING_FOR_REMOTE_KVS", 0)


def case_running_requests_are_never_preempted_for_a_lease(lab: Any) -> None:
    if not supported():
        return
    for helped in (True, False):
        scheduler = _decode(lab)
        _turns(lab, scheduler, 5)
        if not helped:
            retention(scheduler)._reclaim = lambda *_: None
        running = [_add(lab, scheduler, f"r{number}", 40, params=None, max_tokens=300) for number in range(4)]
        lab.step(scheduler)
        pool = pool_of(scheduler)
        pool.get_new_blocks(max(0, pool.get_num_free_blocks() - 4))
        for _ in range(100):
            lab.step(scheduler)
        assert (max(one.num_preemptions for one in running) == 0) is helped
        assert (_leases(scheduler) < 5) is helped


def case_a_wrong_reckoning_preempts_nobody(lab: Any) -> None:
    if not supported():
        return
    for helped in (True, False):
        scheduler = _decode(lab)
        _turns(lab, scheduler, 5)
        retention(scheduler)._measure = lambda *_: 0
        if not helped:
            retention(scheduler).relieve = lambda: False
        running = [_add(lab, scheduler, f"r{number}", 40, params=None, max_tokens=300) for number in range(4)]
        lab.step(scheduler)
        pool = pool_of(scheduler)
        pool.get_new_blocks(pool.get_num_free_blocks())
        for _ in range(100):
            lab.step(scheduler)
        assert (max(one.num_preemptions for one in running) == 0) is helped


def case_a_prompt_that_is_computed_in_parts_is_not_held_up(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    scheduler.max_num_scheduled_tokens = 64
    _turns(lab, scheduler, 5)
    request = _add(lab, scheduler, "long", 40 * 16, params=None, max_tokens=20)
    pool = pool_of(scheduler)
    pool.get_new_blocks(pool.get_num_free_blocks() - 15)
    for _ in range(28):
        lab.step(scheduler)
    assert (request.num_preemptions, request.is_finished()) == (0, True)


def case_requests_never_feel_leases(lab: Any) -> None:
    """The same random requests on a small pool, with leases and with nothing kept: every step is planned alike."""
    if not supported():
        return
    preempted = waited = reclaimed = 0
    for seed in range(20):
        free, leased = _Run(lab, seed, retain=False), _Run(lab, seed, retain=True)
        assert _parts_at(free, leased) is None, seed
        preempted += free.preemptions
        waited += free.waited
        reclaimed += leased.scheduler.connector.connector_scheduler.counts()["leases_reclaimed"]
    assert preempted > 20
    assert waited > 1000
    assert reclaimed > 200
    for hook in ("make_room", "_measure"):
        parted = 0
        for seed in range(6):
            leased = _Run(lab, seed, retain=True)
            setattr(retention(leased.scheduler), hook, lambda *_: 0)
            parted += _parts_at(_Run(lab, seed, retain=False), leased) is not None
        assert parted, f"{hook} is of no use"


def case_the_own_prefix_is_found_under_a_lease_and_costs_nobody_elses(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", prefix_caching=True, **LEASED)
    hashed = lab.hashed()
    turn(lab, scheduler, name="mine", more=hashed)
    others = [
        turn(lab, scheduler, range(5000 + 200 * number, 5100 + 200 * number), name=f"other{number}", more=hashed)
        for number in range(3)
    ]
    pool = pool_of(scheduler)
    pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    # Eight blocks, six of which are there: two are needed, and one that vLLM may want besides.
    request = _add(lab, scheduler, "next", 8 * 16, tokens=[*TURN, *range(3000, 3028)], **hashed)
    lab.step(scheduler)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert _leases(scheduler) == 4
    assert [intact(scheduler, handle) for handle in others] == [6, 6, 6]
    # The next one finds everything in use: leases end, and its own blocks stay in the cache while it takes them.
    again = _add(lab, scheduler, "again", 12 * 16, tokens=[*TURN, *range(4000, 4092)], **hashed)
    lab.step(scheduler)
    assert again.status.name == "WAITING_FOR_REMOTE_KVS"
    assert _leases(scheduler) < 4


def case_beyond_the_cap_a_turn_is_held_in_part_and_then_not_at_all(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    kept = _turns(lab, scheduler, CAP // WHOLE)
    for handle in kept:
        assert _set(scheduler, handle, 100) == 100
    if CAP % WHOLE:
        part = turn(lab, scheduler, range(9000, 9100), name="in part")
        idle(lab, scheduler)
        assert (intact(scheduler, part), _leased_blocks(scheduler)) == (WHOLE, CAP)
        assert _set(scheduler, part, 100) == 100
    refused = turn(lab, scheduler, range(9200, 9300), name="refused")
    assert (refused["pd_mode"], "pd_lease" in refused) == ("Leased", False)
    idle(lab, scheduler)
    assert intact(scheduler, refused) == WHOLE
    assert _leased_blocks(scheduler) == CAP
    assert _set(scheduler, kept[3], 0) == 0
    assert "pd_lease" in turn(lab, scheduler, range(9200, 9300), name="later")


def case_beyond_the_cap_a_turn_takes_the_place_of_others_although_not_all_of_it_fits(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", extra={"pd_retention": "Leased", "pd_lease_share": 0.0251})
    held = turn(lab, scheduler, name="held")
    assert _set(scheduler, held, 100) == 100
    single = turn(lab, scheduler, range(5000, 5100), name="single")
    assert _leased_blocks(scheduler) == 10
    new = turn(lab, scheduler, range(7000, 7100), name="new")
    idle(lab, scheduler)
    assert [_set(scheduler, handle, 60) for handle in (held, single, new)] == [60, 0, 60]
    assert (_leases(scheduler), _leased_blocks(scheduler)) == (2, 10)
    counts = scheduler.connector.connector_scheduler.counts()
    assert (counts["leases_displaced"], counts["leases_refused"]) == (1, 0)


def case_what_is_prolonged_while_another_turn_ends_has_not_given_way_to_it(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", extra={"pd_retention": "Leased", "pd_lease_share": (2 * WHOLE - 1) / 400})
    first = turn(lab, scheduler, name="first")
    leases = retention(scheduler)._leases
    choose, answers, told = leases._longest, [], threading.Event()

    def prolong() -> None:
        answers.append(_set(scheduler, first, 600))
        told.set()

    def chosen(*arguments: Any) -> Any:
        threading.Thread(target=prolong).start()
        told.wait(0.2)  # the side channel's thread comes in the middle, if it may
        return choose(*arguments)

    leases._longest = chosen
    assert "pd_lease" in turn(lab, scheduler, [*TURN[1:], 7], name="second")
    assert told.wait(30)
    assert answers == [0], "whoever asked is told that it is gone"
    assert _leases(scheduler) == 1


def case_blocks_that_another_lease_holds_are_not_given_back(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", prefix_caching=True, **LEASED)
    hashed = lab.hashed()
    first = turn(lab, scheduler, name="first", more=hashed)
    second = turn(lab, scheduler, [*TURN, *range(3000, 3028)], name="second", more=hashed)
    assert second["remote_block_ids"][0][:WHOLE] == first["remote_block_ids"][0][:WHOLE]
    assert _set(scheduler, first, 0) == 0
    idle(lab, scheduler)
    assert (_leases(scheduler), _leased_blocks(scheduler), _given_back(scheduler)) == (1, WHOLE + 1, 0)
    assert _set(scheduler, second, 0) == 0
    idle(lab, scheduler)
    assert (_leases(scheduler), _given_back(scheduler)) == (0, WHOLE + 1)
    turn(lab, scheduler, name="again", more=hashed)
    assert (_leased_blocks(scheduler), _given_back(scheduler)) == (WHOLE, 1)


def case_what_a_short_engine_gives_back_at_once_is_counted(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    retention(scheduler)._is_short = lambda: True
    turn(lab, scheduler)
    idle(lab, scheduler)
    assert is_free(scheduler)
    assert _given_back(scheduler) == WHOLE


def _observed(scheduler: Any) -> Any:
    """The registry that gets what each step of a scheduler tells, as in vLLM's front end."""
    metrics, registry = _metrics(scheduler.connector, scheduler.vllm_config)
    made = scheduler.make_stats

    def seen(*arguments: Any, **more: Any) -> Any:
        stats = made(*arguments, **more)
        if stats.kv_connector_stats:
            metrics.observe(stats.kv_connector_stats)
        return stats

    scheduler.make_stats = seen
    return registry


def case_an_idle_engine_tells_its_numbers_at_the_start_and_after_a_reset(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", log_stats=True, **LEASED)
    registry = _observed(scheduler)

    def told(name: str) -> Any:
        """As vLLM's core does: steps while there is something to do."""
        for _ in range(3):
            if scheduler.has_requests():
                lab.step(scheduler)
        assert not scheduler.has_requests()
        return registry.get_sample_value(name, {"engine": "0"})

    assert told("vllm:pd_lease_cap_blocks") == CAP
    for reset in (scheduler.reset_prefix_cache, scheduler.connector.reset_cache):
        turn(lab, scheduler)
        assert told("vllm:pd_leases") == 1
        reset()
        assert told("vllm:pd_leases") == 0


def case_ten_times_the_cap_of_single_turns_holds_nobody_up(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    mine = turn(lab, scheduler, name="mine")
    assert _set(scheduler, mine, 600) == 600
    for number in range(10 * CAP // WHOLE):
        # Each is answered within its three steps, or `turn` raises.
        assert turn(lab, scheduler, range(100 * number, 100 * number + 100), name=f"t{number}")["pd_lease"]
        assert _leased_blocks(scheduler) <= CAP
    assert _set(scheduler, mine, 600) == 600
    assert intact(scheduler, mine) == WHOLE
    assert scheduler.connector.connector_scheduler.counts()["leases_reclaimed"] == 0


def case_leases_give_way_to_a_reset(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    handle = turn(lab, scheduler)
    assert scheduler.reset_prefix_cache()
    assert is_free(scheduler)
    assert (intact(scheduler, handle), _set(scheduler, handle, 60)) == (0, 0)
    again = turn(lab, scheduler)
    scheduler.connector.reset_cache()
    assert is_free(scheduler)
    assert (intact(scheduler, again), _set(scheduler, again, 60)) == (0, 0)


def case_what_can_not_be_left_in_the_pool_is_not_leased(lab: Any) -> None:
    side = lab.side("decode", groups=2, **LEASED)
    side.bind_block_pool(object())
    handle = lab.decoder_handle(TURN, side=side)
    assert (handle["pd_mode"], "pd_lease" in handle, "pd_fallback" in handle) == ("Pinned", False, True)
    assert side.counts() == {"pinned_blocks": 2 * 7}


def case_a_turn_that_nobody_will_continue_is_not_kept(lab: Any) -> None:
    if not supported():
        return
    scheduler = _decode(lab)
    assert turn(lab, scheduler, pd_retain=False) is None
    idle(lab, scheduler)
    assert is_free(scheduler)


def case_the_numbers_reach_the_metrics(lab: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    if not supported():
        return
    scheduler = lab.scheduler("decode", log_stats=True, **LEASED)
    connector = type(scheduler.connector)
    metrics, registry = _metrics(scheduler.connector, scheduler.vllm_config)
    made = scheduler.make_stats
    log = connector.build_kv_connector_stats()
    steps = []

    def seen(*arguments: Any, **more: Any) -> Any:
        """What vLLM sends to where `/metrics` is served, and what is done with it there."""
        stats = made(*arguments, **more)
        steps.append(stats.kv_connector_stats)
        if stats.kv_connector_stats:
            metrics.observe(stats.kv_connector_stats)
            log.aggregate(connector.build_kv_connector_stats(stats.kv_connector_stats))
        return stats

    scheduler.make_stats = seen
    handles = _turns(lab, scheduler, 2)
    _set(scheduler, handles[0], 0)
    worker = NixlKVConnectorStats()
    worker.record_kv_expired_req()
    lab.step(scheduler, kv_connector_stats=worker)
    lab.step(scheduler)
    assert steps[-1] is None, "nothing has changed"
    turn(lab, scheduler, range(50, 150), name="more")
    assert log.reduce()
    labels = {"engine": "0"}
    for name, expected in (
        ("vllm:pd_leases", 2),
        ("vllm:pd_leased_blocks", 2 * WHOLE),
        ("vllm:pd_lease_cap_blocks", CAP),
        ("vllm:pd_readable_blocks", WHOLE),
        ("vllm:pd_leases_granted_total", 3),
        ("vllm:pd_leases_refused_total", 0),
        ("vllm:pd_leases_reclaimed_total", 0),
        ("vllm:nixl_num_kv_expired_reqs_total", 1),
    ):
        assert registry.get_sample_value(name, labels) == expected, name


def case_pinned_turns_are_told_on_each_release(lab: Any) -> None:
    scheduler = lab.scheduler("decode", log_stats=True)
    registry = _observed(scheduler)
    turn(lab, scheduler)
    lab.step(scheduler)
    assert registry.get_sample_value("vllm:pd_pinned_blocks", {"engine": "0"}) == 7
    lab.step(scheduler, sent={"turn"})
    lab.step(scheduler)
    assert registry.get_sample_value("vllm:pd_pinned_blocks", {"engine": "0"}) == 0
    assert is_free(scheduler)


def case_on_prefill_the_metrics_are_vllms(lab: Any) -> None:
    config = lab.config(role="prefill")
    connector = lab.connector(config)
    metrics, registry = _metrics(connector, config)
    metrics.observe(type(connector).build_kv_connector_stats().data)
    assert connector.get_kv_connector_stats() is None
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert names
    assert not [name for name in names if name.startswith("vllm:pd_")]


# --- parts ------------------------------------------------------------------------------------------


def _decode(lab: Any) -> Any:
    return lab.scheduler("decode", **LEASED)


def _turns(lab: Any, scheduler: Any, number: int) -> list[Any]:
    """Turns of different conversations."""
    made = []
    for place in range(number):
        tokens = range(100 + 200 * place, 200 + 200 * place)
        made.append(turn(lab, scheduler, tokens, name=f"turn{place}"))
    return made


def _add(
    lab: Any, scheduler: Any, name: str, length: int, *, tokens: Any = None, max_tokens: int = 5, **more: Any
) -> Any:
    """A request; unless told otherwise, its prompt comes from P."""
    from support.vllm_lab import prefill_handle

    params = more.pop("params", prefill_handle(length))
    prompt = list(tokens or range(20_000, 20_000 + length))
    request = lab.request(name, prompt, params, max_tokens=max_tokens, **more)
    scheduler.add_request(request)
    return request


def _set(scheduler: Any, handle: dict[str, Any], seconds: int) -> int:
    """Set the end of a handle's lease by the message that the API server sends; returns what the engine answers."""
    from pd_connector.core.lease_message import NewEnd, decode_answer, encode
    from pd_wire import lease

    batch = [NewEnd(lease.parse(handle["pd_lease"]).token, seconds)]
    (left,) = decode_answer(retention(scheduler).answer(encode(batch)), 1).left
    return left


def _leases(scheduler: Any) -> int:
    return int(scheduler.connector.connector_scheduler.counts()["leases"])


def _given_back(scheduler: Any) -> int:
    return int(scheduler.connector.connector_scheduler.counts()["readable_blocks"])


def _leased_blocks(scheduler: Any) -> int:
    return int(scheduler.connector.connector_scheduler.counts()["leased_blocks"])


def _parts_at(one: Any, other: Any) -> int | None:
    """The step in which two runs are planned differently."""
    return next((step for step in range(250) if one.step() != other.step()), None)


class _Run:
    """Random requests on one scheduler: prompts from P and prompts to be computed here, in parts, with long answers."""

    def __init__(self, lab: Any, seed: int, retain: bool) -> None:
        import random
        from dataclasses import replace

        self.lab, self.draw, self.retain = lab, random.Random(seed), retain
        self.router = random.Random(seed + 1000)
        extra = {"pd_retention": "Leased", "pd_lease_share": 0.9}
        self.scheduler = lab.scheduler("decode", extra=extra)
        self.scheduler.max_num_scheduled_tokens = 96
        kept = retention(self.scheduler)
        kept._clock, kept._needs = lambda: 0.0, replace(kept._needs, step_tokens=96)
        pool = pool_of(self.scheduler)
        pool.get_new_blocks(pool.get_num_free_blocks() - self.draw.randrange(40, 70))
        self.rate = self.draw.uniform(0.05, 0.2)
        self.requests: list[Any] = []
        self.tokens: list[str] = []
        self.waited = 0

    @property
    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests)

    def step(self) -> Any:
        """Arrivals, a step, and what the router says; returns what was planned, and who is in which state."""
        from pd_wire import lease
        from support.vllm_lab import prefill_handle

        if self.draw.random() < self.rate:
            length, answer = self.draw.randrange(5, 300), self.draw.randrange(1, 60)
            params = prefill_handle(length, pd_retain=self.retain) if self.draw.random() < 0.8 else None
            made = _add(self.lab, self.scheduler, f"r{len(self.requests)}", length, params=params, max_tokens=answer)
            self.requests.append(made)
        loading = [one.request_id for one in self.requests if one.status.name == "WAITING_FOR_REMOTE_KVS"]
        received = {name for name in loading if self.draw.random() < 0.5}
        received -= self.scheduler.finished_recving_kv_req_ids
        scheduled, outputs = self.lab.step(self.scheduler, received=received)
        for one in (one for output in outputs.values() for one in output.outputs):
            if one.kv_transfer_params and "pd_lease" in one.kv_transfer_params:
                self.tokens.append(lease.parse(one.kv_transfer_params["pd_lease"]).token)
        if self.tokens and self.router.random() < 0.3:
            seconds = self.router.choice((0, 60, 600))
            retention(self.scheduler)._leases.set_end(self.router.choice(self.tokens[-5:]), 0.0, seconds)
        states = [one.status.name for one in self.requests]
        self.waited += states.count("WAITING")
        return scheduled.num_scheduled_tokens, states, self.preemptions


class _clock:
    """A clock of the retention's own that stands still."""

    def __init__(self, scheduler: Any) -> None:
        self.now = 1000.0
        retention(scheduler)._clock = lambda: self.now


def _metrics(connector: Any, config: Any) -> tuple[Any, Any]:
    """What the process that serves `/metrics` makes for this connector, and the registry with them."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    def registered(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    kinds = {kind: registered(kind) for kind in (Counter, Gauge, Histogram)}
    return type(connector).build_prom_metrics(config, kinds, ["engine"], {0: ["0"]}), registry
