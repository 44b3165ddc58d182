"""Several routers over one handle store behave as one, and as none of them where the store fails (HL-28)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.chat import Talk, assert_right, send
from support.deployment import Spec
from support.fake_engine import Behaviour
from support.pod_deployment import NAME, PodDeployment
from support.redis_server import RedisServer
from support.shared_deployment import SharedDeployment, say_on
from support.valkey_bench import written
from support.waiting import until

Pair = tuple[SharedDeployment, SharedDeployment]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    server = RedisServer()
    first = SharedDeployment(Spec(prefills=2, decodes=2), server, tmp_path_factory.mktemp("shared"))
    try:
        await server.start()
        await first.start()
        second = await first.join()
        yield first, second
    finally:
        await first.stop()
        server.close()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(running: Pair) -> AsyncIterator[Pair]:
    """Two routers that have all engines and the store; clean afterwards."""
    for view in running:
        view.reset()
        await view.wait_ready(len(view.engines))
        await view.wait_store()
    yield running
    await running[0].check()


# -- as one ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("link", [{}, {"conversation_id": "moving"}])
async def test_a_conversation_may_move_with_every_turn(pair: Pair, link: dict[str, Any], stream: bool) -> None:
    one, other = pair
    talk = Talk(one, stream=stream, **link)
    await talk.say()
    for view in (other, one, one, other, other, one):
        turn = await say_on(view, talk)
        assert len(turn.attached) == 1
        assert turn.pulled > 0


async def test_the_next_turn_may_come_as_soon_as_the_answer_is_seen(pair: Pair) -> None:
    """The handle is in the store before [DONE] is sent, on whichever router the next turn arrives."""
    one, other = pair
    talk = Talk(one, stream=True, conversation_id="hasty")
    await talk.say()
    attached = 0
    for number in range(40):
        attached += len((await say_on((other, one)[number % 2], talk, f"And {number}?")).attached)
    assert attached == 40


async def test_turns_with_one_history_on_both_routers(pair: Pair) -> None:
    one, other = pair
    talk = Talk(one)
    for number in range(30):
        await say_on(one, talk, f"Turn {number}.")
        for engine in one.engines:
            engine.requests.clear()
        body = talk.body("Go on.")
        turns = await asyncio.gather(*(send(view, body, talk.headers) for view in (one, other)))
        assert [turn.text for turn in turns] == [one.right(body).content] * 2
        carriers = [record for record in one.records(one.prefills) if record.handle_id]
        assert len(carriers) == 1
        talk.messages = [*body["messages"], turns[0].message]


async def test_a_late_answer_on_one_router_does_not_replace_a_newer_turn_on_the_other(pair: Pair) -> None:
    one, other = pair
    talk = Talk(one, conversation_id="late")
    await talk.say()
    hold = asyncio.Event()
    for decode in one.decodes:
        decode.next(Behaviour(hold=hold))
    started = sum(len(decode.generates) for decode in one.decodes)
    body = talk.body("The slow branch.")
    late = asyncio.create_task(send(one, body, talk.headers))

    async def decoding() -> bool:
        return sum(len(decode.generates) for decode in one.decodes) == started + 1

    await until(decoding)
    for decode in one.decodes:
        decode.plan.clear()
    await say_on(other, talk, "The quick branch.")
    hold.set()
    assert_right(one, await late)
    by_id = Talk(one, tenant=None, headers=talk.headers, conversation_id="late")
    by_id.messages = list(talk.messages)
    turn = await by_id.say("Go on.")
    assert len(turn.attached) == 1
    assert turn.pulled > 0


async def test_a_router_that_dies_in_a_turn_takes_its_handle_along(pair: Pair) -> None:
    one, _ = pair
    third = await one.join()
    talk = Talk(one, conversation_id="widow")
    await talk.say()
    hold = asyncio.Event()
    for decode in one.decodes:
        decode.next(Behaviour(hold=hold))
    dying = asyncio.create_task(send(third, talk.body("Go on."), talk.headers))

    async def prefilled() -> bool:
        return any(record.handle_id for record in one.records(one.prefills))

    await until(prefilled)
    third.ended = True
    third.router.kill()
    await third.router.wait()
    hold.set()
    assert (await dying).error is not None
    for decode in one.decodes:
        decode.plan.clear()
    turn = await say_on(one, talk)
    assert turn.attached == []
    assert len((await say_on(one, talk)).attached) == 1


async def test_tenants_stay_apart(pair: Pair) -> None:
    one, other = pair
    mine = Talk(one, conversation_id="same", opening="Same. ")
    theirs = Talk(other, conversation_id="same", opening="Same. ")
    await mine.say()
    assert (await theirs.say()).attached == []
    assert len((await say_on(other, mine)).attached) == 1


async def test_routers_with_two_keys_never_meet(pair: Pair, tmp_path: Path) -> None:
    one, _ = pair
    stranger = await one.join(handle_key_file=written(tmp_path, "other-key", "another-key-of-32-bytes-01234567\n"))
    talk = Talk(one, conversation_id="keys")
    await talk.say()
    assert (await say_on(stranger, talk)).attached == []


# -- the store fails ---------------------------------------------------------------------------------
async def test_no_client_notices_that_the_store_is_killed(pair: Pair) -> None:
    one, other = pair
    talks = [Talk((one, other)[number % 2], stream=number % 3 == 0) for number in range(6)]
    await asyncio.gather(*(talk.say() for talk in talks))
    stop = asyncio.Event()

    async def go_on(talk: Talk) -> int:
        turns = 0
        while not stop.is_set():
            await talk.say("Go on." if len(talk.messages) < 12 else "Stop.")
            turns += 1
            if len(talk.messages) > 12:
                del talk.messages[2:-2]
        return turns

    running = [asyncio.create_task(go_on(talk)) for talk in talks]
    for _ in range(3):
        with one.server.client() as client:
            client.save()  # what is taken from here on comes back with the file
        sent = len(one.records(one.prefills))

        async def taken(sent: int = sent) -> bool:
            return len(one.records(one.prefills)) > sent + 6

        await until(taken)
        one.server.kill()
        for view in pair:
            await view.wait_store(False)
            assert await view.is_ready()
        await one.server.start()
        for view in pair:
            await view.wait_store()
    stop.set()
    assert all(turns > 0 for turns in await asyncio.gather(*running))
    await talks[0].say("Go on.")
    assert len((await say_on(other, talks[0])).attached) == 1


async def test_no_client_notices_that_the_store_hangs(pair: Pair) -> None:
    one, other = pair
    talk = Talk(one)
    await talk.say()
    one.server.freeze()
    try:
        for view in (other, one, other):
            assert (await say_on(view, talk)).attached == []
            assert await view.is_ready()
    finally:
        one.server.thaw()
    for view in pair:
        await view.wait_store()
    await say_on(one, talk)
    assert len((await say_on(other, talk)).attached) == 1


# -- the holder's process ----------------------------------------------------------------------------
async def test_a_restarted_engine_is_noticed_by_every_router(pair: Pair) -> None:
    one, other = pair
    talk = Talk(one)
    await talk.say()
    [holder] = [decode for decode in one.decodes if decode.generates]
    await holder.restart()
    for view in pair:

        async def broken(view: SharedDeployment = view) -> bool:
            return sum(member["incarnation"] for member in await view._fleet()) > 0

        await until(broken)
        await view.wait_ready(len(view.engines))
    assert (await say_on(other, talk)).attached == []
    assert len((await say_on(one, talk)).attached) == 1


async def test_a_router_believes_no_address_for_what_was_before_its_time(pair: Pair) -> None:
    one, _ = pair
    talk = Talk(one)
    await talk.say()
    late = await one.join()
    assert (await say_on(late, talk)).attached == []
    assert (await late.explain())[-1]["reason"] == "holder_restarted"
    assert len((await say_on(one, talk)).attached) == 1
    assert len((await say_on(late, talk)).attached) == 1


async def test_a_router_believes_pods_for_what_was_before_its_time(tmp_path: Path) -> None:
    server = RedisServer()
    await server.start()
    key = written(tmp_path, "key", "canary-key-of-32-bytes-0123456789")
    flags = (("--handle-store", "valkey"), ("--valkey-url", server.url), ("--handle-key-file", key))
    pods = PodDeployment(Spec(flags=(*flags, ("--valkey-timeout", "2"))))
    try:
        await pods.start()
        await _wait_up(pods)
        talk = Talk(pods)
        await talk.say()
        # The router is replaced; the pods are the same.
        await _end_router(pods)
        await _next_router(pods)
        assert len((await talk.say("Go on.")).attached) == 1
        # The container of the holder is replaced while no router is there.
        await _end_router(pods)
        await pods.restart_container(pods.decode)
        await _next_router(pods)
        assert (await talk.say("Go on.")).attached == []
        assert (await pods.explain())[-1]["reason"] == "holder_restarted"
        # The same before a router's eyes, which then says so to the next one.
        await pods.restart_container(pods.decode)
        await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
        assert (await talk.say("Go on.")).attached == []
        await _end_router(pods)
        await _next_router(pods)
        assert len((await talk.say("Go on.")).attached) == 1
        await pods.check()
        with server.client() as client:
            stored = b"".join(client.keys())
        for word in (b"default", NAME.encode(), b"canary"):
            assert word not in stored
    finally:
        await pods.stop()
        server.close()


async def _end_router(pods: PodDeployment) -> None:
    await pods.router.stop()
    pods.check_log()
    pods.router.discard()
    pods._log_read = 0


async def _next_router(pods: PodDeployment) -> None:
    await pods.start_router(pods.kubeconfig_path)
    await _wait_up(pods)


async def _wait_up(deployment: PodDeployment) -> None:
    async def up() -> bool:
        return bool((await deployment.metrics())["pd_router_handle_store_up"])

    await until(up, 30.0)


# -- nothing secret comes out ------------------------------------------------------------------------
async def test_neither_key_nor_conversation_shows(pair: Pair) -> None:
    one, other = pair
    talk = Talk(one, conversation_id="canary-conversation")
    await talk.say()
    await say_on(other, talk)
    shown = json.dumps([await view.metrics() for view in pair]) + one.router.log + other.router.log
    with one.server.client() as client:
        stored = b"".join(client.keys())
    assert "canary" not in shown
    assert b"canary" not in stored
