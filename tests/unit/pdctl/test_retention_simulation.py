"""The simulation: a small trace worked out by hand, and what must hold for any trace."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.core.kv_trace import Client, Turn
from pdctl.core.retention_modes import COMPARED, UNPINNED, Mode, leased, pinned
from pdctl.core.retention_simulation import Engine, simulate, unhindered_end, working_set_blocks

ENGINE = Engine(seconds=1000.0, block_tokens=10, decode_tokens_per_s=10.0, min_read_tokens=10)


def single(at: float, blocks: int = 4) -> Client:
    """One turn that nobody continues; its answer takes a second."""
    return [Turn(blocks * 10 - 10, 10, not_before_s=at, fresh=True)]


def pair(at: float, wait: float, *, tools: bool = False) -> Client:
    """Two turns of 4 and 6 blocks, of which the second can read 4."""
    return [Turn(30, 10, not_before_s=at, fresh=True), Turn(50, 10, wait_s=wait, after_tool=tools)]


def test_a_turn_reads_back_what_the_one_before_left() -> None:
    for mode in COMPARED:
        out = simulate([pair(0, 5)], mode, 20, ENGINE)
        assert (out.arrived, out.finished, out.continued, out.hits) == (2, 2, 1, 1)
        assert (out.reusable_tokens, out.reused_tokens) == (40, 40)
        assert out.waits_s == [0.0, 0.0]


def test_pinned_holds_until_the_read_and_then_until_the_timer() -> None:
    out = simulate([pair(0, 5)], pinned(480), 20, ENGINE)
    # 4 blocks for the 5 s between the turns, then 6 blocks for a TTL.
    assert out.held_block_s == 4 * 5 + 6 * 480
    assert out.held_block_s_per_token == (4 * 5 + 6 * 480) / 40


def test_a_handle_that_the_router_has_forgotten_is_not_read_and_still_costs() -> None:
    out = simulate([pair(0, 455)], pinned(480), 20, ENGINE)
    assert (out.hits, out.reused_tokens) == (0, 0)
    assert simulate([pair(0, 450)], pinned(480), 20, ENGINE).hits == 1
    # Its own blocks are still there when it starts, so they are pinned for 455 s and then run with it.
    assert out.held_block_s == 4 * 455 + 6 * 480


def test_a_new_conversation_leaves_the_old_ones_blocks_to_their_timer() -> None:
    first, second = pair(0, 5)
    out = simulate([[first, replace(second, fresh=True)]], pinned(60), 20, ENGINE)
    assert (out.continued, out.reused_tokens) == (0, 0)
    assert out.held_block_s == 4 * 60 + 6 * 60


def test_pinned_makes_the_next_turn_wait_for_the_timer() -> None:
    out = simulate([single(0), single(10), single(20)], pinned(60), 8, ENGINE)
    # The third fits when the first one's 4 blocks come free: answer of 1 s, timer of 60 s.
    assert out.waits_s == [0.0, 0.0, 41.0]
    assert out.waited == 1
    assert out.wait_p99_s == 41.0


def test_unpinned_gives_what_nobody_has_read_and_the_end_of_a_conversation_goes_first() -> None:
    # 8 blocks: the pair's 4, then 6 of a single turn: 4 empty ones and the last 2 of the pair's.
    out = simulate([pair(0, 100), single(10, blocks=6)], UNPINNED, 8, ENGINE)
    assert out.waits_s == [0.0, 0.0, 0.0]
    assert (out.hits, out.reused_tokens) == (1, 20)
    assert out.held_block_s == 0


def test_a_lease_outlives_passing_turns_while_its_tools_run() -> None:
    passing = [single(at) for at in range(30, 100, 10)]
    busy = [pair(0, 100, tools=True), *passing]
    assert simulate(busy, UNPINNED, 10, ENGINE).reused_tokens == 0
    assert simulate(busy, leased(), 10, ENGINE).reused_tokens == 40
    idle = [pair(0, 100, tools=False), *passing]
    # Nobody spoke for it, so it gave way to a later turn's lease.
    assert simulate(idle, leased(), 10, ENGINE).reused_tokens == 0


def test_a_lease_over_its_share_is_refused_and_the_turn_is_as_unpinned() -> None:
    out = simulate([pair(0, 5)], leased(share=0.2), 10, ENGINE)
    assert out.refused == 2
    assert (out.held_block_s, out.reused_tokens) == (0, 40)


def test_a_lease_is_renewed_every_third_and_no_longer_than_the_router_likes() -> None:
    def held(wait: float, hold: float) -> float:
        mode = leased(60, 1.0, hold)
        out = simulate([[*pair(0, wait, tools=True)][:2]], mode, 20, ENGINE)
        return out.held_block_s - 6 * 60

    assert held(wait=30, hold=600) == 4 * 30
    # Renewed at 20 s and 40 s, then not any more: over at 100 s, before the turn comes.
    assert held(wait=200, hold=50) == 4 * 100


def test_fewer_tokens_than_the_engine_reads_are_computed() -> None:
    engine = replace(ENGINE, min_read_tokens=50)
    out = simulate([pair(0, 5)], UNPINNED, 20, engine)
    assert (out.continued, out.hits, out.reused_tokens) == (0, 0, 0)
    # Of 40 tokens 20 are intact (as above), which is too little.
    partly = [pair(0, 100), single(10, blocks=6)]
    out = simulate(partly, UNPINNED, 8, replace(ENGINE, min_read_tokens=30))
    assert (out.continued, out.hits, out.reused_tokens) == (1, 0, 0)


def test_turns_in_the_queue_at_the_end_count_with_what_they_have_waited() -> None:
    out = simulate([single(0), single(990)], pinned(2000), 4, ENGINE)
    assert out.waits_s == [0.0, 10.0]
    assert (out.arrived, out.finished) == (2, 1)


def test_a_turn_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="largest turn needs 6 blocks; the pool has 5"):
        simulate([pair(0, 5)], UNPINNED, 5, ENGINE)


def test_the_working_set_is_what_waits_or_runs() -> None:
    # 4 blocks for 1 + 99 s, 6 blocks for the answer of the second turn.
    assert working_set_blocks([pair(0, 99)], ENGINE) == pytest.approx((4 * 100 + 6 * 1) / 1000)
    assert unhindered_end([pair(0, 99), single(7)], 10.0) == 101.0


@given(conversations=st.integers(1, 60), blocks=st.integers(1, 9), room=st.integers(0, 100))
@settings(deadline=None)
def test_pinned_admits_pool_by_blocks_per_conversation_in_a_ttl(conversations: int, blocks: int, room: int) -> None:
    pool = blocks + room
    clients = [single(0.0, blocks) for _ in range(conversations)]
    engine = replace(ENGINE, seconds=480.0)
    out = simulate(clients, pinned(480), pool, engine)
    assert out.finished == min(conversations, pool // blocks)
    assert simulate(clients, UNPINNED, pool, replace(engine, seconds=480.0)).finished == conversations


@st.composite
def traces(draw: st.DrawFn) -> list[Client]:
    """A few clients with short histories that grow, shrink, or start anew."""
    clients = []
    for _ in range(draw(st.integers(1, 5))):
        turns: list[Turn] = []
        for _ in range(draw(st.integers(1, 6))):
            grown = turns[-1].tokens + draw(st.integers(1, 60)) if turns else draw(st.integers(1, 60))
            prompt = draw(st.sampled_from([grown, min(grown, 25)])) if grown > 1 else grown
            turns.append(
                Turn(
                    min(prompt, 180),
                    draw(st.integers(1, 60)),
                    wait_s=draw(st.floats(0, 90)),
                    not_before_s=draw(st.floats(0, 100)) if not turns else 0.0,
                    after_tool=draw(st.booleans()),
                    fresh=not turns or draw(st.booleans()),
                )
            )
        clients.append(turns)
    return clients


POOLS = st.integers(24, 60)
MODES = st.sampled_from([*COMPARED, pinned(25), leased(5, 0.3, 40), leased(30, 1.0, 0)])


@given(traces(), MODES, POOLS)
@settings(deadline=None)
def test_sums_agree_and_a_run_is_the_same_every_time(clients: list[Client], mode: Mode, pool: int) -> None:
    out = simulate(clients, mode, pool, ENGINE)
    assert out == simulate(clients, mode, pool, ENGINE)
    assert 0 <= out.reused_tokens <= out.reusable_tokens
    assert 0 <= out.hits <= out.continued <= out.arrived
    assert out.finished <= out.arrived == len(out.waits_s)
    assert all(wait >= 0 for wait in out.waits_s)
    assert 0 <= out.held_share <= mode.share
    # Nothing is held for ever, so every queue ends.
    assert simulate(clients, mode, pool, replace(ENGINE, seconds=1e6)).finished == sum(map(len, clients))


@given(traces(), st.sampled_from([UNPINNED, leased(), leased(5, 0.3, 40), leased(60, 1.0, 600)]), POOLS)
@settings(deadline=None)
def test_nobody_waits_for_blocks_that_are_kept_for_others(clients: list[Client], mode: Mode, pool: int) -> None:
    assert simulate(clients, mode, pool, ENGINE).waits_s == waits_without_retention(clients, pool)


def waits_without_retention(clients: list[Client], pool: int) -> list[float]:
    """First come, first served into a pool that forgets at once: only running turns take room."""
    events = [(turns[0].not_before_s + turns[0].wait_s, at, at, 0) for at, turns in enumerate(clients)]
    heapq.heapify(events)
    counted, used, queue, waits = len(events), 0, [], []
    while events and events[0][0] <= ENGINE.seconds:
        now, _, client, step = heapq.heappop(events)
        turns = clients[client]
        if step % 2:
            used -= ENGINE.blocks(turns[step // 2].tokens)
            if step // 2 + 1 < len(turns):
                following = turns[step // 2 + 1]
                counted += 1
                heapq.heappush(events, (max(now + following.wait_s, following.not_before_s), counted, client, step + 1))
        else:
            queue.append((client, step, now))
        while queue and used + ENGINE.blocks(clients[queue[0][0]][queue[0][1] // 2].tokens) <= pool:
            first, turn_step, since = queue.pop(0)
            turn = clients[first][turn_step // 2]
            used += ENGINE.blocks(turn.tokens)
            waits.append(now - since)
            counted += 1
            end = now + turn.reply_tokens / ENGINE.decode_tokens_per_s
            heapq.heappush(events, (end, counted, first, turn_step + 1))
    return waits + [ENGINE.seconds - since for _, _, since in queue]
