"""Blocks that decode does not keep, on real engines: nothing is held, everything that is read is right.

The log-probability of P's token tells whether its prompt was read right: two computations of one prompt agree within
`TOLERANCE`, and the control shows that overwritten blocks do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.by_hand import Prefilled, decode, prefill, prompt, turn
from support.engine_pair import TOLERANCE, Pair, Pairs, racing_deployment
from support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

BLOCK = 32
POOL = 61
"""Blocks of the decode engine, one of which vLLM keeps for itself."""
TURN = 640
NEXT = TURN + 60
WHOLE = TURN // BLOCK
RACED_READS = 300
READERS = 6
"""At a time, of one handle."""


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder by which the engines are told how to race."""
    return tmp_path_factory.mktemp("race")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(pairs: Pairs, race: Path) -> Pair:
    """A pair whose decode engine has room for three conversations."""
    return await pairs.use(racing_deployment(BLOCK, POOL), "unpinned", racing=race)


@pytest.fixture(autouse=True)
def calm(race: Path) -> Iterator[None]:
    """No test leaves a race to the next one."""
    yield
    for name in ("delay", "unchecked", "pinned"):
        (race / name).unlink(missing_ok=True)


async def usage(pair: Pair) -> float:
    """Share of decode's blocks that are in use."""
    async with pair.session.get(f"{pair.deployment.urls.decode[0]}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")).split()[-1])


async def churn(pair: Pair, number: int, blocks: int) -> None:
    """A request that P knows nothing of takes blocks on decode and gives them back."""
    await decode(pair, prompt(number, blocks * BLOCK - 8), None, answer_tokens=2)


async def test_decode_holds_nothing_after_a_turn_and_the_handle_is_read_three_times(pair: Pair) -> None:
    tokens = prompt(1, TURN)
    handle = await turn(pair, tokens)
    assert handle["pd_mode"] == "Unpinned"
    assert handle["remote_blocks_expiry_time"] is None
    await until(lambda: _is_zero(pair))
    longer = [*tokens, *prompt(2, NEXT)[TURN:]]
    truth = await prefill(pair, longer)
    for _ in range(3):
        again = await prefill(pair, longer, handle)
        assert (again.pulled, again.gone, again.wasted) == (TURN, 0, 0)
        assert abs(again.logprob - truth.logprob) <= TOLERANCE
    log = pair.deployment.log("decode").read_text()
    assert "Potentially invalid KV blocks" not in log, "a read is no error"


async def _is_zero(pair: Pair) -> bool:
    return await usage(pair) == 0.0


async def test_exactly_the_intact_beginning_is_pulled(pair: Pair) -> None:
    """The pool hands out what is free for longest: all others first, then the turn's last block, its first one last."""
    seen = []
    for number, taken in enumerate((30, 44, 50, 56, POOL - 1)):
        tokens = prompt(10 + number, TURN)
        longer = [*tokens, *prompt(20 + number, NEXT)[TURN:]]
        truth = await prefill(pair, longer)
        handle = await turn(pair, tokens)
        await churn(pair, 100 + number, taken)
        now = await prefill(pair, longer, handle)
        assert abs(now.logprob - truth.logprob) <= TOLERANCE
        assert (now.pulled + now.gone, now.wasted) == (TURN, 0)
        seen.append(now.pulled // BLOCK)
    assert seen[0] == WHOLE
    assert seen[1:] == [seen[1], seen[1] - 6, seen[1] - 12, 0]
    assert WHOLE - 6 < seen[1] < WHOLE


async def test_conversations_that_never_come_back_hold_nobody_up(pair: Pair, race: Path) -> None:
    for number in range(12):
        await asyncio.wait_for(turn(pair, prompt(200 + number, TURN)), 60)
    tokens = prompt(250, TURN)
    handle = await turn(pair, tokens)
    again = await prefill(pair, [*tokens, *prompt(251, NEXT)[TURN:]], handle)
    assert again.pulled == TURN


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control without the check"])
async def test_blocks_that_are_overwritten_during_the_read_are_noticed(pair: Pair, race: Path, checked: bool) -> None:
    (race / "delay").write_text("0.25")
    if not checked:
        (race / "unchecked").touch()
    reads: list[tuple[Prefilled, float]] = []
    stop = asyncio.Event()

    async def overwrite(lane: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await churn(pair, 1000 + 500 * lane + number % 400, 18)

    others = [asyncio.create_task(overwrite(lane)) for lane in range(2)]
    number = 300
    try:
        while len(reads) < RACED_READS and (checked or not _wrong(reads)):
            number += 1
            tokens = prompt(number, TURN)
            longer = [*tokens, *prompt(number + 7000, NEXT)[TURN:]]
            truth = (await prefill(pair, longer)).logprob
            handle = await turn(pair, tokens)
            raced = await asyncio.gather(*(prefill(pair, longer, handle) for _ in range(READERS)))
            reads += [(one, truth) for one in raced if one.pulled or one.wasted]
    finally:
        stop.set()
        await asyncio.gather(*others)
    caught = [one for one, _ in reads if one.wasted]
    print(f"{len(reads)} raced reads, {len(caught)} caught, {len(_wrong(reads))} wrong")
    if checked:
        assert _wrong(reads) == []
        assert caught
    else:
        assert _wrong(reads), "without the check nothing is wrong: this race proves nothing"


def _wrong(reads: list[tuple[Prefilled, float]]) -> list[tuple[Prefilled, float]]:
    return [(one, truth) for one, truth in reads if abs(one.logprob - truth) > 2 * TOLERANCE]


async def test_a_reset_cache_and_a_restart_end_every_handle(pair: Pair) -> None:
    tokens = prompt(5, TURN)
    longer = [*tokens, *prompt(6, NEXT)[TURN:]]
    truth = await prefill(pair, longer)
    for end in (_reset, _restart):
        handle = await turn(pair, tokens)
        assert (await prefill(pair, longer, handle)).pulled == TURN
        await end(pair)
        after = await prefill(pair, longer, handle)
        assert after.pulled == 0, end.__name__
        assert abs(after.logprob - truth.logprob) <= TOLERANCE, end.__name__
    handle = await turn(pair, tokens)
    assert (await prefill(pair, longer, handle)).pulled == TURN


async def _reset(pair: Pair) -> None:
    async with pair.session.post(f"{pair.deployment.urls.decode[0]}/reset_prefix_cache") as response:
        assert response.status == 200, await response.text()


async def _restart(pair: Pair) -> None:
    await pair.deployment.restart("decode")
