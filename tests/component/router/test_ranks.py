"""Data-parallel ranks behind one address (HL-25): a conversation goes back to the rank that holds its blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from pd_wire import names
from support.chat import Talk, Turn
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Gate
from support.waiting import until

RANKS = Spec(decodes=2, engine=(("ranks", 2),))
FULL = Spec(engine=(("ranks", 3),), flags=(("--decode-overload", "1"),))


def asked(turn: Turn) -> str | None:
    """The rank that decode's leg names."""
    return turn.decodes[0].header(names.RANK_HEADER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_a_turn_goes_back_to_its_rank(deploy: Any, mode: Any, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode, decodes=2, engine=(("ranks", 2),)))
    talks = [Talk(deployment, stream=stream) for _ in range(8)]
    homes = []
    for talk in talks:
        turn = await talk.say()
        assert asked(turn) is None
        homes.append(turn.decodes[0].rank)
    assert set(homes) == {0, 1}
    for talk, home in zip(talks, homes, strict=True):
        for _ in range(2):
            turn = await talk.say("Go on.")
            assert (asked(turn), turn.decodes[0].rank) == (str(home), home)
            assert turn.pulled > 100
            # That rank's own prefix cache has the conversation.
            assert turn.decodes[0].local_tokens
            assert (await deployment.explain())[-1]["rank"] == home


async def test_the_fleet_shows_ranks_and_their_load(deploy: Any) -> None:
    deployment = await deploy(RANKS)
    talks = [Talk(deployment, stream=True) for _ in range(8)]
    for talk in talks:
        await talk.say()
    gate = Gate(1)
    for engine in deployment.decodes:
        engine.default = Behaviour(gate=gate)
    running = [asyncio.create_task(talk.say("Go on.")) for talk in talks]

    async def all_there() -> bool:
        return sum(sum(loads.values()) for loads in await ranks(deployment)) == len(talks)

    await until(all_there)
    assert [set(loads) for loads in await ranks(deployment)] == [{"0", "1"}] * 2
    gate.open()
    await asyncio.gather(*running)
    assert [set(loads.values()) for loads in await ranks(deployment)] == [{0}] * 2


async def ranks(deployment: Deployment) -> list[dict[str, int]]:
    """Pinned turns by rank, of each decode engine."""
    url = deployment.router.admin_url + "/debug/fleet"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return [member["ranks"] for member in await response.json() if member["role"] == "decode"]


async def test_a_rank_that_is_too_busy_is_left_to_the_engine(deploy: Any) -> None:
    deployment = await deploy(FULL)
    talks: dict[int, list[Talk]] = {0: [], 1: [], 2: []}
    for _ in range(9):
        talk = Talk(deployment, stream=True)
        talks[(await talk.say()).decodes[0].rank].append(talk)
    first, second, third = talks[0]
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate), times=2)
    busy = [asyncio.create_task(talk.say("Go on.")) for talk in (first, second)]

    async def both_run() -> bool:
        return sum(record.fate == "running" for record in deployment.decode.generates) == 2

    await until(both_run)
    turn = await third.say("Go on.")
    assert asked(turn) is None
    assert turn.pulled > 100
    gate.open()
    assert [asked(turn) for turn in await asyncio.gather(*busy)] == ["0", "0"]


@pytest.mark.parametrize(("ranks", "first"), [(1, 3), (2, 4)], ids=["external balancer", "hybrid balancer"])
async def test_an_address_with_a_part_of_the_ranks_is_not_asked_for_one(deploy: Any, ranks: int, first: int) -> None:
    # vLLM counts the ranks of an address from 0 there and refuses a number beyond them; the handle has the global one.
    deployment = await deploy(Spec(decodes=2, engine=(("ranks", ranks), ("first_rank", first))))
    talks = [Talk(deployment) for _ in range(6)]
    for talk in talks:
        await talk.say()
    for talk in talks:
        turn = await talk.say("Go on.")
        assert asked(turn) is None
        assert turn.pulled > 100


async def test_a_restarted_engine_is_not_asked_for_the_rank_of_the_one_before(deploy: Any) -> None:
    deployment = await deploy(Spec(engine=(("ranks", 2),)), breaks=True)
    talk = Talk(deployment)
    await talk.say()
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    assert asked(await talk.say("Go on.")) is None


async def test_a_client_does_not_choose_the_rank(deploy: Any) -> None:
    deployment = await deploy(RANKS)
    talk = Talk(deployment, headers={"X-Data-Parallel-Rank": "77"})
    turn = await talk.say()
    assert asked(turn) is None
    assert turn.prefills[0].header(names.RANK_HEADER) is None
