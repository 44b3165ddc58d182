"""Engines that are pods: they join, drain, restart and leave behind one name or one address.

What must hold throughout: every answer is the right one, no handle of a gone process reaches a prefill engine, no pair
is of two generations, and a client sees an error only where no pair of engines was left.
"""

from __future__ import annotations

import asyncio

import pytest

from support.chat import Talk, send
from support.fake_engine import Behaviour, FakeEngine, Gate
from support.pod_deployment import PodDeployment
from support.pod_load import Load, listed, load
from support.waiting import until


# -- joining, draining, leaving --------------------------------------------------------------------------
async def test_a_turn_is_served_and_the_next_one_reuses(pods: PodDeployment) -> None:
    talk = Talk(pods, stream=True)
    await talk.say()
    assert (await talk.say("Go on.")).pulled > 100


async def test_status(pods: PodDeployment) -> None:
    before = (await pods.status())["funnel"]
    talk = Talk(pods)
    await talk.say()
    turn = await talk.say("Go on.")
    status = await pods.status()
    gained = {stage: count - before[stage] for stage, count in status["funnel"].items()}
    assert gained == {
        "eligible": 2, "found": 1, "live": 1, "attached": 1, "proven": 1, "pulled": 1, "pulled_tokens": turn.pulled,
        "gone_tokens": 0,
    }  # fmt: skip
    assert status["reuse"] == "on"
    assert status["started"] == (await pods.status())["started"] > 1e9
    assert status["engines"] == [
        {
            "engine": name, "role": role, "generation": "g1", "ready": True, "draining": False,
            "retention": retention, "fallback": "",
        }
        for name, role, retention in (("tiny-prefill-0", "prefill", ""), ("tiny-decode-0", "decode", "Pinned"))
    ]  # fmt: skip
    assert status["discovery"]["deployment"] == "default/tiny"
    assert status["discovery"]["trouble"] is None


async def test_scaling_up_and_down_under_load(pods: PodDeployment) -> None:
    async with load(pods) as talking:
        await talking.more()
        for engine in (*pods.decodes[1:], *pods.prefills[1:]):
            pods.join(engine)
        await pods.wait_states(dict.fromkeys(pods.engines, "ready"))
        await talking.more(30)
        for engine in (pods.decodes[0], pods.decodes[2], pods.prefills[0], pods.prefills[1]):
            assert engine.generates
            await drain(pods, engine, talking)
    await pods.wait_states({pods.decodes[1]: "ready", pods.prefills[2]: "ready"})
    assert talking.pulled > 0


async def drain(pods: PodDeployment, engine: FakeEngine, talking: Load) -> None:
    """As the kubelet does: marked, given time to end what runs, then not ready, ended, gone."""
    pods.move(engine, deleting=True)

    async def draining() -> bool:
        return (await pods.states())[pods.name(engine)] == "draining"

    await until(draining)
    # Turns that had chosen it are through after this: each conversation has had more than one turn.
    await talking.more(12)
    await engine.idle(20.0)
    served = len(engine.generates)
    await talking.more(12)
    assert len(engine.generates) == served
    pods.move(engine, ready=False)
    await engine.kill()
    pods.leave(engine)


async def test_a_stream_on_a_draining_engine_ends_and_its_handle_is_not_used(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    gates = {engine: Gate(3) for engine in pods.decodes[:2]}
    for engine, gate in gates.items():
        engine.next(Behaviour(gate=gate))
    begun = asyncio.Event()
    talk = Talk(pods, stream=True)
    reading = asyncio.create_task(talk.say(at_content=begun.set))
    await begun.wait()
    holder = next(engine for engine in gates if engine.generates)
    other = next(engine for engine in gates if engine is not holder)
    other.plan.clear()
    pods.move(holder, deleting=True, ready=False)

    async def draining() -> bool:
        return (await pods.states())[pods.name(holder)] == "draining"

    await until(draining)
    gates[holder].open()
    assert (await reading).error is None
    turn = await talk.say("Go on.")
    assert (turn.attached, turn.decodes[0] in other.generates) == ([], True)
    assert (await pods.explain())[-1]["reason"] == "holder_draining"


async def test_an_answer_that_waits_on_a_draining_engine_is_not_cut(pods: PodDeployment) -> None:
    # An engine that shuts down may say so at its health check long before it has ended what runs.
    release = asyncio.Event()
    pods.decode.next(Behaviour(hold=release))
    talk = Talk(pods)
    reading = asyncio.create_task(talk.say())

    async def arrived() -> bool:
        return bool(pods.decode.generates)

    await until(arrived)
    pods.move(pods.decode, deleting=True, ready=False)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "draining"})
    pods.decode.health_status = 503
    answers = 'pd_router_engine_ready{engine="tiny-decode-0",role="decode"}'

    async def refused() -> bool:
        return (await pods.metrics())[answers] == 0

    await until(refused)
    release.set()
    assert len((await reading).decodes) == 1


async def test_a_pod_without_an_address_or_not_ready_gets_nothing(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1], ip=None, start=None, ready=False)
    pods.join(pods.decodes[2], ready=False)
    states = {pods.prefill: "ready", pods.decode: "ready"}
    await pods.wait_states({**states, pods.decodes[2]: "not ready"})
    for _ in range(6):
        await Talk(pods).say()
    assert [len(engine.generates) for engine in pods.decodes] == [6, 0, 0]
    pods.move(pods.decodes[1], ip="127.0.0.1", start=1, ready=True)
    await pods.wait_states({**states, pods.decodes[1]: "ready", pods.decodes[2]: "not ready"})
    pods.move(pods.decodes[1], ip=None)
    pods.move(pods.decodes[2], deployment="another")
    await pods.wait_states(states)


async def test_a_pod_that_is_ready_while_nothing_answers(pods: PodDeployment) -> None:
    await pods.decodes[1].kill()
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "not ready"})
    await pods.decodes[1].restart()
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})


async def test_pods_that_cannot_be_engines_are_named(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1], port_name="web")
    pods.join(pods.decodes[2], generation=None)

    async def told() -> dict[str, str]:
        unusable = (await pods.status())["discovery"]["unusable"]
        return {item["pod"]: item["why"] for item in unusable} if len(unusable) == 2 else {}

    assert await until(told) == {
        "tiny-decode-1": "its container engine has no port named http",
        "tiny-decode-2": "its label pdserving.dev/generation is missing or no label value",
    }
    pods.move(pods.decodes[1], port_name="http")
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})


async def test_series_of_pods_that_left_are_gone(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    series = 'pd_router_engine_ready{engine="tiny-decode-1",role="decode"}'
    metrics = await pods.metrics()
    assert metrics[series] == 1
    assert metrics['pd_router_engines{role="decode",state="ready"}'] == 2
    pods.leave(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    metrics = await pods.metrics()
    assert series not in metrics
    assert metrics['pd_router_engines{role="decode",state="ready"}'] == 1
    assert metrics["pd_router_discovery_connected"] == 1
    assert metrics["pd_router_discovery_event_age_seconds"] < 30
    assert metrics['pd_router_discovery_events_total{type="DELETED"}'] >= 1


# -- another process behind the same name or address --------------------------------------------------------
async def test_a_container_restarts_between_turns(pods: PodDeployment) -> None:
    talk = Talk(pods, stream=True)
    await talk.say()
    old = pods.decode.engine_id
    await pods.restart_container(pods.decode)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    turn = await talk.say("Go on.")
    assert all(old.encode() not in record.raw for record in turn.prefills)
    assert len((await talk.say("And then?")).attached) == 1


async def test_a_container_restart_purges_although_the_connection_stands(pods: PodDeployment) -> None:
    # What the probe cannot see: its connection ends at something else than the engine's process.
    talk = Talk(pods)
    await talk.say()
    breaks = 'pd_router_engine_incarnations_total{engine="tiny-decode-0",role="decode"}'
    before = (await pods.metrics()).get(breaks, 0)
    pods.move(pods.decode, start=7)

    async def seen() -> bool:
        return (await pods.metrics()).get(breaks, 0) > before

    await until(seen)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    assert (await talk.say("Go on.")).attached == []
    assert len((await talk.say("And then?")).attached) == 1


@pytest.mark.parametrize("seen", ["watched", "missed"])
async def test_another_pod_of_the_same_name_and_address(pods: PodDeployment, seen: str) -> None:
    talk = Talk(pods, stream=True)
    await talk.say()
    old = pods.decode.engine_id
    await pods.decode.restart()
    if seen == "watched":
        pods.leave(pods.decode)
        pods.join(pods.decode)
    else:
        # The watch breaks, the pod is replaced, and history is gone: only a list can tell.
        wait = await listed(pods)
        pods.api.refuse("list", 500)
        pods.api.drop()
        pods.join(pods.decode)
        pods.api.compact()
        await wait()
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    turn = await talk.say("Go on.")
    assert turn.attached == []
    assert all(old.encode() not in record.raw for record in turn.prefills)
    assert len((await talk.say("And then?")).attached) == 1


async def test_handles_kept_while_their_engine_was_replaced_are_not_used(pods: PodDeployment) -> None:
    # The turn began on the old pod and ends, whole, when its name is the new one's already.
    pods.decode.next(Behaviour(gate=(gate := Gate(4))))
    begun = asyncio.Event()
    talk = Talk(pods, stream=True)
    reading = asyncio.create_task(talk.say(at_content=begun.set))
    await begun.wait()
    hosts = [engine.connector.host for engine in pods.decodes[:2]]
    pods.join(pods.decode, port=pods.decodes[1].port, ips=hosts)

    async def moved() -> bool:
        return any(
            "tiny-decode-0" in line and f":{pods.decodes[1].port}" in line for line in pods.router.log.splitlines()
        )

    await until(moved)
    gate.open()
    await reading
    turn = await talk.say("Go on.")
    assert (turn.attached, turn.decodes[0] in pods.decodes[1].generates) == ([], True)


async def test_handles_name_hosts_of_known_decode_pods_only(pods: PodDeployment) -> None:
    pods.leave(pods.decode)
    pods.join(pods.decodes[1], ips=[])
    await pods.wait_states({pods.prefill: "ready", pods.decodes[1]: "ready"})
    talk = Talk(pods)
    await talk.say()
    assert (await talk.say("Go on.")).attached == []
    pods.move(pods.decodes[1], ips=[pods.decodes[1].connector.host])
    await pods.wait_states({pods.prefill: "ready", pods.decodes[1]: "ready"})
    await talk.say("And then?")
    assert len((await talk.say("Why?")).attached) == 1


async def test_handles_name_no_host_of_a_prefill_pod(pods: PodDeployment) -> None:
    pods.decode.next(Behaviour(edit_handle=lambda handle: {**handle, "remote_host": pods.prefill.connector.host}))
    talk = Talk(pods)
    await talk.say()
    assert (await talk.say("Go on.")).attached == []


async def test_handles_of_a_pod_that_left_take_no_memory(pods: PodDeployment) -> None:
    await Talk(pods).say()
    assert (await pods.metrics())["pd_router_handles"] == 1
    pods.leave(pods.decode)
    await pods.wait_states({pods.prefill: "ready"})
    assert (await pods.metrics())["pd_router_handles"] == 0


# -- generations ---------------------------------------------------------------------------------------
async def test_generations_are_never_mixed(pods: PodDeployment) -> None:
    pods.join(pods.prefills[1], generation="g2")
    pods.join(pods.decodes[1], generation="g2")
    pods.join(pods.decodes[2], generation="g3")
    ready = [*pods.prefills[:2], *pods.decodes]
    await pods.wait_states(dict.fromkeys(ready, "ready"))
    async with load(pods, talks=6) as talking:
        await talking.more(40)
        pods.move(pods.prefill, deleting=True)  # g1 has no prefill from here on
        await pods.wait_states({**dict.fromkeys(ready, "ready"), pods.prefill: "draining"})
        await talking.more(20)
    assert pods.decodes[0].generates
    assert pods.decodes[1].generates
    assert not pods.decodes[2].generates
    of = {pods.prefills[0]: "g1", pods.prefills[1]: "g2", pods.decodes[0]: "g1", pods.decodes[1]: "g2"}
    by_request: dict[str, set[str]] = {}
    for engine, generation in of.items():
        for record in engine.generates:
            by_request.setdefault(str(record.header("x-request-id")), set()).add(generation)
    assert by_request
    assert all(len(generations) == 1 for generations in by_request.values())


async def test_engines_of_two_generations_are_no_pair(pods: PodDeployment) -> None:
    pods.move(pods.decode, generation="g2")
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    assert "of one generation" in await pods.not_ready_reason()
    turn = await send(pods, Talk(pods).body("Hello."))
    assert (turn.status, turn.prefills, turn.decodes) == (503, [], [])
    assert int(turn.headers["Retry-After"]) >= 1
    pods.move(pods.prefill, generation="g2")
    await pods.router.wait_ready()
    await Talk(pods).say()
