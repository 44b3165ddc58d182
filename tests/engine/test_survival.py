"""What happens between two turns on real engines: killed, restarted, hanging, expired.

The client gets a right answer or a clear 503, and the turns after it reuse again.

One pair for the whole file, in the order of the tests; a restart of a real engine takes half a minute or more.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
import pytest_asyncio

from support.engine_pair import Message, Pair, Pairs, tiny_deployment, user
from support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PROMPT_WORDS = 500
TTL = 45
"""Seconds that D would keep a turn's blocks if it pinned them; the router's own limit has to be below it."""
ROUTER_TTL = 30


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(pairs: Pairs) -> Pair:
    """One pair with a short TTL."""
    return await pairs.use(tiny_deployment(ttl=TTL, router_ttl=ROUTER_TTL), "survival")


async def one_turn(pair: Pair) -> list[Message]:
    """A finished turn and the next question."""
    messages = [user(pair.text(PROMPT_WORDS))]
    first = await pair.ask(messages)
    assert first.decision.get("stored") == "stored", first.decision
    return [*messages, first.message, user(pair.text(40))]


async def assert_reuse_works(pair: Pair) -> None:
    messages = await one_turn(pair)
    answer = await pair.ask(messages)
    assert answer.pulled > 0, answer.decision


async def until_ready(pair: Pair) -> None:
    async def ready() -> bool:
        async with pair.session.get(f"{pair.deployment.urls.admin}/readyz") as response:
            return response.status == 200

    await until(ready, seconds=60)


async def status_and_error(pair: Pair, messages: list[Message]) -> tuple[int, str, str]:
    url = f"{pair.deployment.urls.router}/v1/chat/completions"
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    async with pair.session.post(url, json=body, headers={"authorization": "Bearer tenant-a"}) as response:
        answer = await response.json()
        return response.status, response.headers.get("retry-after", ""), answer.get("error", {}).get("code", "")


async def test_decode_killed_then_restarted_on_the_same_port(pair: Pair) -> None:
    messages = await one_turn(pair)
    await pair.deployment.kill("decode")
    status, retry_after, code = await status_and_error(pair, messages)
    assert (status, code) == (503, "no_engine")
    assert int(retry_after) > 0
    await pair.deployment.restart("decode")
    await until_ready(pair)
    answer = await pair.ask(messages)
    assert not answer.attached, answer.decision
    await pair.assert_equals_recompute(answer, messages)
    await assert_reuse_works(pair)


async def test_prefill_restarted(pair: Pair) -> None:
    messages = await one_turn(pair)
    handed = asyncio.create_task(pair.deployment.restart("prefill"))
    await handed
    await until_ready(pair)
    answer = await pair.ask(messages)
    await pair.assert_equals_recompute(answer, messages)
    await assert_reuse_works(pair)


async def test_the_ttl_has_passed(pair: Pair) -> None:
    messages = await one_turn(pair)
    await asyncio.sleep(ROUTER_TTL + 1)
    answer = await pair.ask(messages)
    assert not answer.attached
    assert answer.decision["reason"] in ("expired", "not_found")
    await pair.assert_equals_recompute(answer, messages)
    await assert_reuse_works(pair)


async def test_prefill_hangs(pair: Pair) -> None:
    messages = await one_turn(pair)
    pair.deployment.send_signal("prefill", number=signal.SIGSTOP)
    try:
        status, retry_after, _ = await status_and_error(pair, messages)
        assert status == 503
        assert int(retry_after) > 0
    finally:
        pair.deployment.send_signal("prefill", number=signal.SIGCONT)
    await until_ready(pair)
    answer = await pair.ask(messages)
    await pair.assert_equals_recompute(answer, messages)
    await assert_reuse_works(pair)


async def test_no_process_ended_by_itself(pair: Pair) -> None:
    """Everything above happened to the engines from outside; none of them, and not the router, fell over by itself."""
    for role in ("prefill", "decode", "router"):
        assert pair.deployment.pid(role) is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pair.deployment.wait_failure(), 0.5)
