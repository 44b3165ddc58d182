"""One prefill and two decode engines, real ones, behind two routers over one handle store: a conversation is at home on
both, and outlives either. Three engines are more than this project's smallest machine has cores.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pd_operator.core.render_engine import NOT_BOUND
from pdctl.core.placement import plan_seats
from pdctl.shell.machine import observe_machine
from support.engine_pair import Message, Pair, Pairs, tiny_deployment, user
from support.redis_server import RedisServer
from support.router_process import RouterProcess
from support.valkey_bench import written

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PROMPT_WORDS = 400
SLOW_MACHINE = {
    f"--{name}-timeout": "120" for name in ("prefill", "pull", "first-byte", "answer", "idle")
}  # three real engines share the cores with this test


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(pairs: Pairs) -> Pair:
    """Three engines; the router that comes with them is not used."""
    return await pairs.use(tiny_deployment(decodes=2), "shared-store")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routers(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RouterProcess]]:
    """Two routers over one server."""
    server = RedisServer()
    key = written(tmp_path_factory.mktemp("routers"), "handle-key", "a-key-of-32-bytes-for-tests-01234\n")
    flags = {
        **SLOW_MACHINE,
        "--handle-store": "valkey",
        "--valkey-url": server.url,
        "--valkey-timeout": "2",
        "--handle-key-file": key,
    }
    urls = pair.deployment.urls
    made = [RouterProcess(urls.prefill, urls.decode, flags) for _ in range(2)]
    try:
        await server.start()
        await asyncio.gather(*(router.start() for router in made))
        yield made
    finally:
        for router in made:
            await router.stop()
            router.discard()
        server.close()


async def test_no_engine_computes_on_cores_that_it_was_not_given(pair: Pair) -> None:
    """A process is free, or held to its engine's cores: vLLM itself would hold what computes to the last core."""
    machine = observe_machine()
    for seat in plan_seats(tiny_deployment(decodes=2), machine):
        pid = pair.deployment.pid(seat.role.value, seat.index)
        assert pid is not None
        own = set() if seat.cores in (None, NOT_BOUND) else {int(core) for core in str(seat.cores).split(",")}
        held = {one: os.sched_getaffinity(one) for one in family(pid)}
        assert len(held) >= 3, "API server, engine core, worker"
        assert all((cores and cores <= own) or cores == set(machine.cores) for cores in held.values()), (seat, held)


async def test_every_turn_on_the_other_router_reuses(pair: Pair, routers: list[RouterProcess]) -> None:
    history: list[Message] = []
    pulled: list[int] = []
    for number in range(4):
        history = [*history, user(pair.text(PROMPT_WORDS if number == 0 else 60))]
        answer = await pair.ask(history, via=routers[number % 2])
        pulled.append(answer.pulled)
        if number:
            await pair.assert_equals_recompute(answer, history)
        history.append(answer.message)
    assert pulled[0] == 0
    assert all(one > PROMPT_WORDS / 2 for one in pulled[1:]), pulled


async def test_conversations_at_once_on_both_routers_are_right(pair: Pair, routers: list[RouterProcess]) -> None:
    async def converse(number: int) -> list[int]:
        history: list[Message] = [user(pair.text(PROMPT_WORDS))]
        pulled = []
        for turn in range(3):
            answer = await pair.ask(history, key=f"tenant-{number}", via=routers[(number + turn) % 2])
            pulled.append(answer.pulled)
            if turn:
                await pair.assert_equals_recompute(answer, history)
            history = [*history, answer.message, user(pair.text(40))]
        return pulled

    for first, *later in await asyncio.gather(*(converse(number) for number in range(4))):
        assert first == 0
        assert all(later), later


async def test_a_killed_router_loses_no_conversation(pair: Pair, routers: list[RouterProcess]) -> None:
    doomed, other = routers
    histories: list[list[Message]] = []
    for number in range(3):
        messages = [user(pair.text(PROMPT_WORDS))]
        answer = await pair.ask(messages, key=f"owner-{number}", via=doomed)
        histories.append([*messages, answer.message, user(pair.text(40))])
    doomed.kill()
    await doomed.wait()
    for number, history in enumerate(histories):
        answer = await pair.ask(history, key=f"owner-{number}", via=other)
        assert answer.pulled > PROMPT_WORDS / 2, answer.decision
        await pair.assert_equals_recompute(answer, history)


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in thread.joinpath("children").read_text().split():
            yield from family(int(child))
