"""The simulation: a small trace worked out by hand, and what must hold for any trace."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.leases import Leases
from pd_wire.lease import Lease
from pdctl.core import retention_simulation
from pdctl.core.kv_pool import Pool
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
    assert simulate([pair(0, 450)], pinned(480), 20, ENGINE).hits == 0
    assert simulate([pair(0, 449)], pinned(480), 20, ENGINE).hits == 1
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


def test_handles_without_a_timer_are_good_for_an_hour() -> None:
    engine = replace(ENGINE, seconds=4000.0)
    for mode in (UNPINNED, leased()):
        assert simulate([pair(0, 3599)], mode, 20, engine).hits == 1
        assert simulate([pair(0, 3600)], mode, 20, engine).hits == 0


def test_a_lease_over_its_share_is_of_the_leading_blocks_and_the_rest_is_as_unpinned() -> None:
    out = simulate([pair(0, 5)], leased(share=0.2), 10, ENGINE)
    assert (out.refused, out.partly) == (0, 2)
    # 2 blocks for the 5 s between the turns, and for a minute after the second.
    assert (out.held_block_s, out.reused_tokens) == (2 * 5 + 2 * 60, 40)
    out = simulate([pair(0, 5)], leased(share=0.05), 10, ENGINE)
    assert (out.refused, out.partly) == (2, 0)
    assert (out.held_block_s, out.reused_tokens) == (0, 40)


def test_a_lease_is_of_whole_blocks() -> None:
    [first] = single(0)
    out = simulate([[replace(first, prompt_tokens=25)]], leased(), 20, ENGINE)
    assert out.held_block_s == 3 * 60


def test_a_lease_is_renewed_every_third_and_no_longer_than_the_router_likes() -> None:
    def held(wait: float, hold: float) -> float:
        out = simulate([pair(0, wait, tools=True)], leased(60, 1.0, hold), 20, ENGINE)
        return out.held_block_s - 6 * 60

    assert held(wait=30, hold=600) == pytest.approx(4 * 30)
    # Renewed after 0.2 s, 20.2 s and 40.2 s, then not any more: over before the turn comes.
    assert held(wait=200, hold=50) == pytest.approx(4 * 100.2)


@pytest.mark.parametrize(("later", "stays"), [(0.1, False), (0.3, True)])
def test_an_engine_has_heard_of_tools_after_a_fifth_of_a_second(later: float, stays: bool) -> None:
    # Both want all of the cap; the second lease is due so much after the first.
    clients = [pair(0, 30, tools=True), single(later), single(5, blocks=8)]
    out = simulate(clients, leased(), 8, ENGINE)
    assert out.reused_tokens == 0, "the last turn needs the whole pool"
    clients = [pair(0, 30, tools=True), single(later), single(5, blocks=6)]
    assert simulate(clients, leased(), 10, ENGINE).reused_tokens == (40 if stays else 0)


def goes_on(*, tools: bool) -> Client:
    """Turns of 4, 5 and 5 blocks, the second 5 s after the first, by tools or not, and the third 50 s later."""
    return [
        Turn(30, 10, fresh=True),
        Turn(40, 10, wait_s=5, after_tool=tools),
        Turn(50, 1, wait_s=50),
    ]


@pytest.mark.parametrize("spoken", [False, True])
def test_a_turn_inherits_the_good_word_for_the_one_that_it_continues(spoken: bool) -> None:
    # Single turns' leases want the cap of 6 from 11 s on, and 5 blocks are in use at a time.
    passing = [single(at, blocks=5) for at in (10, 20, 30, 40)]
    out = simulate([goes_on(tools=spoken), *passing], leased(), 12, ENGINE)
    assert out.reused_tokens == (90 if spoken else 40)


@pytest.mark.parametrize(("at", "partly"), [(10, 1), (30, 2)])
def test_a_turn_that_runs_is_spoken_for_with_the_next_beat(at: float, partly: int) -> None:
    # Its lease is from 1 s on, and the cap is 6: before 21 s it gives way to one of 6 blocks, then it leaves 2 of them.
    runs = [Turn(30, 10, fresh=True), Turn(50, 600, wait_s=5)]
    out = simulate([runs, single(at, blocks=6)], leased(share=0.03), 200, ENGINE)
    # Of its own 65 blocks the cap is held in the end.
    assert (out.refused, out.partly) == (0, partly)


def test_a_right_ends_when_the_history_is_rewritten() -> None:
    first, second = pair(0, 5, tools=True)
    out = simulate([[first, replace(second, fresh=True)]], leased(), 40, ENGINE)
    # Heard of at 0.2 s, so 4 blocks hold until a minute later; 6 for a minute from the second turn on.
    assert out.held_block_s == pytest.approx(4 * 60.2 + 6 * 60)


class Heard(Pool):
    """A pool that notes when a lease of a minute is prolonged."""

    words: ClassVar[list[float]] = []

    def speak(self, mark: int, ends: float) -> None:
        self.words.append(ends - 60)
        super().speak(mark, ends)


@given(hold=st.floats(1, 700), wait=st.floats(0.5, 700), run=st.integers(1, 900))
@settings(deadline=None)
def test_leases_are_prolonged_when_the_router_would(hold: float, wait: float, run: int) -> None:
    Heard.words = []
    first, second = pair(0, wait, tools=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention_simulation, "Pool", Heard)
        simulate([[first, replace(second, reply_tokens=run)]], leased(60, 1.0, hold), 200, replace(ENGINE, seconds=5e3))
    # Where the right was over before the turn came, the router's beat depends on what else there is to say.
    end = wait + run / 10 if wait < hold else wait
    heard = [word - 1 for word in Heard.words]
    assert [word for word in heard if word < end] == pytest.approx(routers_words(hold, wait, end))


def routers_words(hold: float, begin: float, end: float) -> list[float]:
    """When the router prolongs a turn's lease of a minute: tools run, a turn goes on from `begin` to `end`."""
    leases, lease, now, words = Leases(), Lease("0" * 32, 60), 0.0, list[float]()
    leases.hold("decode", lease, hold, 60.0, now, exact=False)
    # Another conversation, for which the engine is told something with every beat.
    leases.hold("decode", Lease("1" * 32, 60), 1e6, 60.0, now, exact=False)
    runs = False
    while True:
        now = max(now, min(leases.next_at(), end if runs else begin))
        if now == end:
            return words
        if now == begin:
            runs = leases.begin("decode", lease, 60.0, now)
        for holder in leases.due(now):
            batch = leases.batch(holder, now)
            if batch is not None:
                words += [now for token, _ in batch.items if token == lease.token]
                leases.answered(holder, batch, [60] * len(batch.items), now)


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
