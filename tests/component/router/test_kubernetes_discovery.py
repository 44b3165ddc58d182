"""Engines that are pods: they join, drain, restart and leave behind one name or one address, and the API server fails.

What must hold throughout: every answer is the right one, no handle of a gone process reaches a prefill engine, no pair
is of two generations, and a client sees an error only where no pair of engines was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.chat import Talk, send
from support.deployment import Spec
from support.fake_engine import Behaviour, FakeEngine, Gate
from support.pod_deployment import PodDeployment
from support.pods import make_pod
from support.router_process import RouterFailed, RouterProcess
from support.waiting import until

THREE_BY_THREE = Spec(prefills=3, decodes=3)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[PodDeployment]:
    deployment = PodDeployment(THREE_BY_THREE)
    await deployment.start()
    yield deployment
    await deployment.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def pods(running: PodDeployment) -> AsyncIterator[PodDeployment]:
    """One pod per role, fresh; clean afterwards."""
    await running.restore()
    yield running
    await running.api.start()
    await running.check()


@pytest_asyncio.fixture(loop_scope="session")
async def start() -> AsyncIterator[Callable[..., Awaitable[PodDeployment]]]:
    """Deployments of a test's own."""
    made: list[PodDeployment] = []

    async def make(spec: Spec | None = None, **how: Any) -> PodDeployment:
        deployment = PodDeployment(spec or Spec())
        made.append(deployment)
        await deployment.start(**how)
        return deployment

    yield make
    try:
        for deployment in made:
            await deployment.check()
    finally:
        for deployment in made:
            await deployment.stop()


class Load:
    """Conversations that never stop talking; each answer is checked."""

    def __init__(self, deployment: PodDeployment) -> None:
        self.deployment = deployment
        self.turns = 0
        self.pulled = 0
        self._stop = asyncio.Event()

    async def talk(self) -> None:
        """One conversation after the other until told to stop."""
        while not self._stop.is_set():
            talk = Talk(self.deployment, stream=self.turns % 2 == 0)
            for text in ("First.", "Go on.", "And then?", "Why?"):
                turn = await talk.say(talk.opening * 8 + text)
                self.turns += 1
                self.pulled += turn.pulled

    async def more(self, count: int = 10) -> None:
        """Wait for so many more turns."""
        wanted = self.turns + count

        async def done() -> bool:
            return self.turns >= wanted

        await until(done, 60.0)

    def stop(self) -> None:
        self._stop.set()


@asynccontextmanager
async def load(deployment: PodDeployment, talks: int = 4) -> AsyncIterator[Load]:
    """Keep talking while the block runs; any wrong answer or error fails it."""
    made = Load(deployment)
    async with asyncio.TaskGroup() as group:
        for _ in range(talks):
            group.create_task(made.talk())
        yield made
        made.stop()


async def listed(pods: PodDeployment) -> Callable[[], Awaitable[None]]:
    """Returns what waits until the pods were listed once more and a watch is open."""
    before = pods.api.count("watch")

    async def again() -> bool:
        return pods.api.count("watch") > before and pods.api.watching > 0

    async def wait() -> None:
        await until(again)

    return wait


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
        "eligible": 2, "found": 1, "live": 1, "attached": 1, "proven": 1, "pulled": 1, "pulled_tokens": turn.pulled
    }  # fmt: skip
    assert status["reuse"] == "on"
    assert status["started"] == (await pods.status())["started"] > 1e9
    assert status["engines"] == [
        {"engine": name, "role": role, "generation": "g1", "ready": True, "draining": False}
        for name, role in (("tiny-prefill-0", "prefill"), ("tiny-decode-0", "decode"))
    ]
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


# -- the API server ---------------------------------------------------------------------------------------
async def test_a_deletion_that_a_broken_watch_missed(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1])
    states = {pods.prefill: "ready", pods.decode: "ready"}
    await pods.wait_states({**states, pods.decodes[1]: "ready"})
    pods.api.refuse("list", 503)
    pods.api.drop()
    pods.leave(pods.decodes[1])
    pods.api.compact()
    await pods.wait_states(states)


@pytest.mark.parametrize("how", ["as an event", "as an answer"])
async def test_a_version_that_is_too_old(pods: PodDeployment, how: str) -> None:
    wait = await listed(pods)
    if how == "as an event":
        pods.api.expire()
    else:
        pods.api.refuse("watch", 410)
        pods.api.drop()
    pods.join(pods.decodes[1])
    await wait()
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    assert (await pods.status())["discovery"]["trouble"] is None


async def test_a_watch_that_falls_silent(pods: PodDeployment) -> None:
    stalled = 'pd_router_discovery_watch_ends_total{reason="stalled"}'
    before = (await pods.metrics()).get(stalled, 0)
    pods.api.silence()
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    assert (await pods.metrics())[stalled] == before + 1


async def test_a_watch_that_is_only_quiet_goes_on(pods: PodDeployment) -> None:
    # Bookmarks come each 0.2 s; ten in a row without a list in between outlast the second after which it would be dead.
    name = 'pd_router_discovery_events_total{type="BOOKMARK"}'
    lists, base = 0, 0.0

    async def outlasted() -> bool:
        nonlocal lists, base
        marks = (await pods.metrics()).get(name, 0)
        if pods.api.count("list") != lists:
            lists, base = pods.api.count("list"), marks
        return marks >= base + 10

    await until(outlasted, 30.0)


async def test_a_watch_that_ends_in_order_is_followed_by_a_list(pods: PodDeployment) -> None:
    wait, lists = await listed(pods), pods.api.count("list")
    pods.api.end()
    await wait()
    assert pods.api.count("list") == lists + 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"<html>\n", id="no JSON"),
        pytest.param(b"[]\n", id="no object"),
        pytest.param(b'{"type": 1, "object": {}}\n', id="no type"),
        pytest.param(b'{"type": "ADDED", "object": []}\n', id="no pod"),
        pytest.param(b'{"type": "ERROR", "object": {"code": 500, "message": "etcd leader changed"}}\n', id="an error"),
    ],
)
async def test_a_watch_that_says_nonsense(pods: PodDeployment, data: bytes) -> None:
    wait = await listed(pods)
    pods.api.garble(data)
    pods.join(pods.decodes[1])
    await wait()
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})


async def test_doubled_late_and_foreign_events(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1])
    states = {pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"}
    await pods.wait_states(states)
    talk = Talk(pods)
    await talk.say()
    now = pods.api.pods
    late = pods.pod(pods.decode, ready=False, version=1, start=9)
    for kind, pod in (
        ("ADDED", now["tiny-decode-0"]),
        ("MODIFIED", now["tiny-decode-0"]),
        ("MODIFIED", late),
        ("DELETED", late),
        ("DELETED", make_pod("nobody", version=10**9)),
        ("ADDED", make_pod("other", deployment="other", version=10**9)),
        ("ADDED", {"metadata": {}}),
        ("BOOKMARK", {}),
        ("FUTURE", now["tiny-decode-0"]),
    ):
        pods.api.send(kind, pod)
    pods.move(pods.decodes[1], deleting=True)
    await pods.wait_states({**states, pods.decodes[1]: "draining"})
    assert len((await talk.say("Go on.")).attached) == 1


async def test_the_api_server_is_away_for_a_while(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1])
    states = {pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"}
    await pods.wait_states(states)
    await pods.api.stop()

    async def noticed() -> bool:
        return (await pods.metrics())["pd_router_discovery_connected"] == 0

    async with load(pods) as talking:
        await until(noticed)
        await talking.more(20)
        # Nobody tells, but the probe and the first refused connection do.
        await pods.decodes[1].kill()
        await pods.wait_states({**states, pods.decodes[1]: "not ready"}, told=False)
        await talking.more(20)
        assert (await pods.status())["discovery"]["trouble"].startswith("lost")
        assert await pods.not_ready_reason() == "ok"
        pods.leave(pods.decodes[1])
        pods.join(pods.decodes[2])
        pods.api.compact()
        await pods.api.start()
        await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[2]: "ready"})
        await talking.more()
    assert (await pods.metrics())["pd_router_discovery_connected"] == 1
    assert (await pods.status())["discovery"]["trouble"] is None


@pytest.mark.parametrize(
    ("status", "headers", "word"),
    [(429, {"Retry-After": "1"}, "throttled: 429"), (403, {}, "refused: 403"), (500, {}, "server_error: 500")],
)
async def test_lists_that_are_refused(pods: PodDeployment, status: int, headers: dict[str, str], word: str) -> None:
    pods.api.refuse("list", status, 2, **headers)
    pods.api.drop()

    async def told() -> bool:
        return str((await pods.status())["discovery"]["trouble"]).startswith(word)

    await until(told)
    await Talk(pods).say()
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})


async def test_watches_that_are_refused_again_and_again(pods: PodDeployment) -> None:
    pods.api.refuse("watch", 403, 4)
    pods.api.drop()

    async def told() -> bool:
        return str((await pods.status())["discovery"]["trouble"]).startswith("refused: 403")

    await until(told)
    assert (await pods.metrics())["pd_router_discovery_connected"] == 0
    await Talk(pods).say()
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})

    async def over() -> bool:
        return (await pods.status())["discovery"]["trouble"] is None

    await until(over)


async def test_one_watch_that_breaks_is_no_trouble(start: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start()
    lost = 'pd_router_discovery_watch_ends_total{reason="lost"}'
    before = (await pods.metrics()).get(lost, 0)
    wait, warned = await listed(pods), pods.router.log.count('"warning"')
    pods.api.drop()
    await wait()
    assert (await pods.metrics())[lost] == before + 1
    assert pods.router.log.count('"warning"') == warned


async def test_a_token_that_changed_is_read_again(pods: PodDeployment) -> None:
    pods.api.token = "another-canary"
    try:
        path = pods.kubeconfig_path
        path.write_text(pods.api.kubeconfig())
        wait = await listed(pods)
        pods.api.drop()
        await wait()
        assert pods.api.asked[-1].authorization == "Bearer another-canary"
    finally:
        assert "canary-token" not in pods.router.log
        assert "another-canary" not in pods.router.log


async def test_many_pods_come_in_pages(pods: PodDeployment) -> None:
    for number in range(120):
        pods.api.put(make_pod(f"a-{number:03}", ip=None, start=None, ready=False))
    pods.join(pods.decodes[1])
    wait, before = await listed(pods), len(pods.api.asked)
    pods.api.drop()
    await wait()
    pages = [asked.query for asked in pods.api.asked[before:] if asked.verb == "list"]
    assert len(pages) == 3
    assert {page["labelSelector"] for page in pages} == {
        "pdserving.dev/pddeployment=tiny,pdserving.dev/role in (prefill,decode)"
    }
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    for number in range(120):
        pods.api.delete(f"a-{number:03}")


async def test_a_flood_of_events_does_not_stop_turns(pods: PodDeployment) -> None:
    pods.join(pods.decodes[1], ready=False)

    async def flood() -> None:
        for number in range(4000):
            pods.move(pods.decodes[1], ready=number % 2 == 1)
            if number % 50 == 0:
                await asyncio.sleep(0)
        await pods.wait_told()

    flooding, turns = asyncio.create_task(flood()), 0
    while not flooding.done():
        await Talk(pods).say()
        turns += 1
    await flooding
    assert turns >= 3
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})


# -- starting ---------------------------------------------------------------------------------------------
async def test_not_ready_before_the_first_list(start: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start(api=False)
    assert (await pods.not_ready_reason()).startswith("the pods of default/tiny were not listed yet")
    turn = await send(pods, Talk(pods).body("Hello."))
    assert (turn.status, int(turn.headers["Retry-After"]) >= 1) == (503, True)
    assert (await pods.status())["engines"] == []
    await pods.api.start()
    await pods.router.wait_ready()
    talk = Talk(pods)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1


async def test_engines_with_ipv6_addresses(start: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start(Spec(engine=(("host", "::1"),)))
    talk = Talk(pods, stream=True)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1


async def test_the_router_ends_in_order_while_it_watches(start: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start()
    assert pods.api.watching == 1
    pods.ended = True
    assert await pods.router.stop() == 0


async def test_a_proxy_for_the_application_is_none_for_the_api_server(
    start: Callable[..., Awaitable[PodDeployment]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await start()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        pytest.param(None, "there is no file", id="no file"),
        pytest.param("{", "no YAML", id="no YAML"),
        pytest.param("", "shape of a kubeconfig", id="empty"),
        pytest.param("current-context: a\ncontexts: []\nclusters: []\nusers: []\n", "name a", id="no such context"),
    ],
)
async def test_a_kubeconfig_that_cannot_work(tmp_path: Path, text: str | None, word: str) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    router = RouterProcess([], [], {}, ["--discover-kubernetes", "default/tiny", "--kubeconfig", str(path)])
    try:
        with pytest.raises(
            RouterFailed, match=f"(?s)ended with status 2.*--kubeconfig: credentials: .*{word}"
        ) as failed:
            await router.start()
    finally:
        router.discard()
    assert "Traceback" not in str(failed.value)
