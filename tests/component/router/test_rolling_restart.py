"""Decode engines are replaced one after the other under load: no error, no dead handle (EL-06)."""

from __future__ import annotations

import asyncio

from support.chat import Talk
from support.fake_engine import Behaviour, FakeEngine
from support.pod_deployment import PodDeployment
from support.waiting import until

CONVERSATIONS = 8


async def test_two_decode_engines_are_replaced_and_nobody_notices(pods: PodDeployment) -> None:
    second = pods.decodes[1]
    pods.join(second)
    decodes = (pods.decode, second)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", second: "ready"})
    for engine in decodes:
        engine.default = Behaviour(event_delay=0.01)
    over = asyncio.Event()
    pulled = 0

    async def converse(number: int) -> int:
        nonlocal pulled
        turns = 0
        while not over.is_set():
            talk = Talk(pods, tenant=f"roll-{number}")
            for place in range(3):
                turn = await talk.say(stream=bool((number + place) % 2))
                pulled += turn.pulled
                turns += 1
        return turns

    async def served(engine: FakeEngine, more: int) -> None:
        """Wait until the engine was sent so many more turns."""
        wanted = len(engine.generates) + more

        async def there() -> bool:
            return len(engine.generates) >= wanted

        await until(there, 20)

    talks = [asyncio.create_task(converse(number)) for number in range(CONVERSATIONS)]
    ended: list[str] = []
    for engine in decodes:
        await served(engine, CONVERSATIONS)
        pods.move(engine, deleting=True)
        await pods.wait_told()
        told = len(engine.generates)
        # It gets nothing new, however long that lasts, and ends what it has.
        await served(next(other for other in decodes if other is not engine), CONVERSATIONS)
        await engine.idle(20)
        assert len(engine.generates) == told
        ended.append(engine.engine_id)
        pods.leave(engine)
        await engine.restart()
        pods.join(engine)
        await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", second: "ready"})
    over.set()
    assert sum(await asyncio.gather(*talks)) > 4 * CONVERSATIONS
    assert pulled > 1000
    assert {engine.engine_id for engine in decodes}.isdisjoint(ended)
    # A read from a process that has ended fails, and so does the notice that nobody reads.
    counters = pods.prefill.connector.counters
    assert [counters[name] for name in ("failed_transfers", "failed_notifications", "expired")] == [0, 0, 0]
    assert {record.status for record in pods.records()} == {200}
