"""Blocks that decode keeps by leases, on real engines: kept as long as they are spoken for, never at a request's cost.

Without a router, but for the last: the test prolongs and ends leases itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pd_wire import lease, names
from support.by_hand import decode, prefill, prompt, turn
from support.engine_pair import TOLERANCE, Pair, Pairs, racing_deployment, user
from support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

BLOCK = 32
POOL = 61
"""Blocks of the decode engine, one of which vLLM keeps for itself."""
CAP = POOL // 2
TURN = 640
NEXT = TURN + 60
WHOLE = TURN // BLOCK
LOOK_SECONDS = 3


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder by which the engines are told to retain in vLLM's own way."""
    return tmp_path_factory.mktemp("race")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(pairs: Pairs, race: Path) -> Pair:
    """A pair whose decode engine has room for three conversations, one of them by a lease."""
    wanted = racing_deployment(BLOCK, POOL, retention="Leased", lease={"seconds": 60, "sharePercent": 50})
    return await pairs.use(wanted, "leased", racing=race)


async def metrics(pair: Pair) -> dict[str, float]:
    """The decode engine's own metrics without labels."""
    async with pair.session.get(f"{pair.deployment.urls.decode[0]}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:")}


async def send(pair: Pair, items: Any) -> tuple[int, Any]:
    """Status and answer of the endpoint for leases."""
    url = pair.deployment.urls.decode[0] + names.LEASES_PATH
    async with pair.session.post(url, json={"leases": items}) as response:
        return response.status, await response.json()


async def set_ends(pair: Pair, *items: tuple[str, int]) -> list[int]:
    """Seconds left of each lease."""
    status, answer = await send(pair, [{"token": token, "seconds": seconds} for token, seconds in items])
    assert status == 200, answer
    assert [item["token"] for item in answer["leases"]] == [token for token, _ in items]
    return [item["seconds"] for item in answer["leases"]]


def token_of(handle: dict[str, Any]) -> str:
    """The token of a handle's lease."""
    found = lease.parse(handle["pd_lease"])
    assert found is not None
    return found.token


async def is_empty(pair: Pair) -> bool:
    """Whether none of decode's blocks is in use."""
    return (await metrics(pair))["vllm:kv_cache_usage_perc"] == 0.0


async def holds(pair: Pair, blocks: int) -> bool:
    """Whether leases hold exactly so many blocks, by the engine's own metrics."""
    return (await metrics(pair))["vllm:pd_leased_blocks"] == blocks


async def test_an_engine_without_a_request_tells_its_cap(pair: Pair) -> None:
    async def told() -> bool:
        return (await metrics(pair))["vllm:pd_lease_cap_blocks"] == CAP

    await until(told, seconds=10)


async def test_a_lease_is_prolonged_and_ended(pair: Pair) -> None:
    handle = await turn(pair, prompt(1, TURN))
    assert handle["pd_mode"] == "Leased"
    assert handle["pd_lease"].endswith("-60")
    seen = await metrics(pair)
    assert seen["vllm:kv_cache_usage_perc"] == pytest.approx(WHOLE / (POOL - 1))
    assert (seen["vllm:pd_leases"], seen["vllm:pd_leased_blocks"], seen["vllm:pd_lease_cap_blocks"]) == (1, WHOLE, CAP)
    token = token_of(handle)
    assert await set_ends(pair, (token, 300), ("ab" * 16, 300)) == [300, 0]
    status, answer = await send(pair, [{"token": token, "seconds": 3601}])
    assert (status, answer["error"]["param"]) == (400, "leases[0].seconds")
    began = time.monotonic()
    assert await set_ends(pair, (token, 0)) == [0]
    # Less than the time after which an idle engine looks by itself.
    await until(lambda: is_empty(pair), seconds=5)
    print(f"ended on an idle engine: free after {time.monotonic() - began:.3f} s")
    assert await set_ends(pair, (token, 300)) == [0]
    seen = await metrics(pair)
    assert (seen["vllm:pd_leases"], seen["vllm:pd_readable_blocks"]) == (0, WHOLE)


async def test_a_lease_that_runs_out_frees_an_idle_engine(pair: Pair) -> None:
    handle = await turn(pair, prompt(2, TURN))
    assert not await is_empty(pair)
    assert await set_ends(pair, (token_of(handle), 1)) == [1]
    await until(lambda: is_empty(pair), seconds=30)


async def test_a_leased_conversation_survives_what_evicts_another(pair: Pair) -> None:
    tokens, others = prompt(3, TURN), prompt(4, TURN)
    longer, longer_others = ([*known, *prompt(5, NEXT)[TURN:]] for known in (tokens, others))
    truth = await prefill(pair, longer)
    handle = await turn(pair, tokens)
    assert await set_ends(pair, (token_of(handle), 300)) == [300]
    part = await turn(pair, others)
    assert part["pd_mode"] == "Leased"
    assert (await metrics(pair))["vllm:pd_leased_blocks"] == CAP, "as much of it as the prolonged one leaves of the cap"
    for number in range(4):
        await decode(pair, prompt(100 + number, 36 * BLOCK - 8), None, answer_tokens=2)
    again = await prefill(pair, longer, handle)
    assert (again.pulled, again.gone, again.wasted) == (TURN, 0, 0)
    assert abs(again.logprob - truth.logprob) <= TOLERANCE
    evicted = await prefill(pair, longer_others, part)
    assert evicted.pulled < TURN
    assert evicted.gone > 0
    # More than is free besides: the lease gives way, and what was not taken of it is still right.
    await decode(pair, prompt(110, 44 * BLOCK - 8), None, answer_tokens=2)
    assert await set_ends(pair, (token_of(handle), 300)) == [0]
    partly = await prefill(pair, longer, handle)
    assert 0 < partly.pulled < TURN
    assert abs(partly.logprob - truth.logprob) <= TOLERANCE


async def test_at_the_cap_a_new_turn_takes_all_that_nobody_prolonged(pair: Pair) -> None:
    async with pair.session.post(f"{pair.deployment.urls.decode[0]}/reset_prefix_cache") as response:
        assert response.status == 200, await response.text()
    before = (await metrics(pair))["vllm:pd_leases_displaced_total"]
    held = await turn(pair, prompt(20, 10 * BLOCK))
    assert await set_ends(pair, (token_of(held), 300)) == [300]
    single = await turn(pair, prompt(21, 18 * BLOCK))
    new = await turn(pair, prompt(22, 25 * BLOCK))
    seen = await metrics(pair)
    assert (seen["vllm:pd_leased_blocks"], seen["vllm:pd_leases_displaced_total"] - before) == (CAP, 1)
    assert await set_ends(pair, (token_of(single), 60), (token_of(held), 0), (token_of(new), 60)) == [0, 0, 60]
    await until(lambda: holds(pair, CAP - 10), seconds=5)
    assert await set_ends(pair, (token_of(new), 0)) == [0]
    await until(lambda: is_empty(pair), seconds=5)


async def test_forks_of_a_short_held_turn_displace_each_other(pair: Pair) -> None:
    system = prompt(23, 4 * BLOCK)
    held = await turn(pair, system)
    assert await set_ends(pair, (token_of(held), 300)) == [300]
    before = await metrics(pair)
    singles = [await turn(pair, [*system, *prompt(24 + number, 10 * BLOCK)]) for number in range(4)]
    new = await turn(pair, prompt(30, 10 * BLOCK))
    after = await metrics(pair)
    assert after["vllm:pd_leases_displaced_total"] - before["vllm:pd_leases_displaced_total"] == 3
    left = await set_ends(pair, *((token_of(handle), 60) for handle in (held, *singles, new)))
    assert left == [60, 60, 0, 0, 0, 60]
    await set_ends(pair, *((token_of(handle), 0) for handle in (held, *singles, new)))
    await until(lambda: is_empty(pair), seconds=5)


async def test_single_turns_beyond_the_cap_hold_nobody_up(pair: Pair) -> None:
    before = await metrics(pair)
    prompts = iter([prompt(200 + number, TURN) for number in range(30)])

    async def lane() -> None:
        for tokens in prompts:
            handle = await asyncio.wait_for(turn(pair, tokens), 120)
            assert handle["pd_mode"] == "Leased"
            assert (await metrics(pair))["vllm:pd_leased_blocks"] <= CAP

    # Two at a time need more than what is free beside a lease.
    await asyncio.gather(lane(), lane())
    after = await metrics(pair)
    names_of = ("granted", "displaced", "reclaimed", "refused")
    added = {key: after[f"vllm:pd_leases_{key}_total"] - before[f"vllm:pd_leases_{key}_total"] for key in names_of}
    print(added)
    assert (added["granted"], added["refused"]) == (30, 0)
    assert added["displaced"] + added["reclaimed"] >= 29
    assert after["vllm:num_preemptions_total"] == 0
    assert after["vllm:num_requests_waiting"] == 0


async def test_a_reset_ends_leases(pair: Pair) -> None:
    handle = await turn(pair, prompt(6, TURN))
    async with pair.session.post(f"{pair.deployment.urls.decode[0]}/reset_prefix_cache") as response:
        assert response.status == 200, await response.text()
    assert await set_ends(pair, (token_of(handle), 60)) == [0]
    await until(lambda: holds(pair, 0), seconds=10)  # although nobody asks it for anything
    assert (await prefill(pair, [*prompt(6, TURN), *prompt(7, NEXT)[TURN:]], handle)).pulled == 0


async def test_an_idle_engine_takes_no_steps_for_a_lease(pair: Pair, race: Path) -> None:
    tokens = prompt(8, TURN)
    handle = await turn(pair, tokens)
    assert await set_ends(pair, (token_of(handle), 300)) == [300]
    leased = await _switches(pair)
    await set_ends(pair, (token_of(handle), 0))
    (race / "pinned").touch()
    try:
        pinned = await turn(pair, tokens)
    finally:
        (race / "pinned").unlink()
    assert (await metrics(pair))["vllm:pd_pinned_blocks"] >= WHOLE
    stepping = await _switches(pair)
    await prefill(pair, [*tokens, *prompt(9, NEXT)[TURN:]], pinned)  # lets the engine give the blocks back
    print(f"switches of the engine's thread in {LOOK_SECONDS} s: {leased} leased, {stepping} with vLLM's own retention")
    assert pinned["pd_mode"] == "Pinned"
    assert leased < stepping / 10


async def _switches(pair: Pair) -> int:
    """How often the engine core's own thread went to sleep and came back while nobody wanted anything."""
    await asyncio.sleep(1)
    before = _count(pair)
    await asyncio.sleep(LOOK_SECONDS)
    return _count(pair) - before


async def test_the_router_prolongs_while_a_tool_runs_and_ends_with_the_conversation(pair: Pair) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    await pair.ask(
        [user(pair.text(300))],
        conversation="with-a-tool",
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "look"}},
    )

    async def prolonged() -> bool:
        async with pair.session.get(f"{pair.deployment.urls.admin}/metrics") as response:
            found = re.search(r"^pd_router_leases_renewed_total (\S+)$", await response.text(), re.MULTILINE)
        return found is not None and float(found[1]) > 0

    await until(prolonged, seconds=60)
    assert (await metrics(pair))["vllm:pd_leases"] == 1
    url = f"{pair.deployment.urls.router}/v1/conversations/with-a-tool"
    async with pair.session.delete(url, headers={"authorization": "Bearer tenant-b"}) as response:
        assert response.status == 200
    assert not await is_empty(pair), "another tenant's word"
    async with pair.session.delete(url, headers={"authorization": "Bearer tenant-a"}) as response:
        assert (await response.json())["deleted"] is True
    await until(lambda: is_empty(pair), seconds=5)


def _count(pair: Pair) -> int:
    pid = re.findall(r"\(EngineCore pid=(\d+)\)", pair.deployment.log("decode").read_text())[-1]
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])
