"""Several workers are one router: same reuse, same limits, same pages; and none of them takes the others along."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from support import promtool
from support.chat import Talk, send
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Gate
from support.pod_deployment import PodDeployment
from support.redis_server import RedisServer
from support.router_process import RouterFailed, RouterProcess
from support.valkey_bench import written
from support.waiting import until

WORKERS = 3
SPEC = Spec(flags=(("--workers", str(WORKERS)),))
STOCK = Spec(mode="stock", flags=SPEC.flags)
PAIR = Spec(flags=(("--workers", "2"), ("--tenant-max-inflight", "2")))


def workers_of(pid: int) -> list[int]:
    """Process ids of a router's workers, oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def all_gone(pids: list[int]) -> None:
    async def gone() -> bool:
        return not any(map(runs, pids))

    await until(gone)


async def page(deployment: Deployment, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(deployment.router.admin_url + path) as response:
        return response.status, await response.text()


async def explained(deployment: Deployment, before: int, turns: int) -> list[dict[str, Any]]:
    """The last turns, once each is over for the router, too: a client may have its answer a moment before."""

    async def all_there() -> list[dict[str, Any]]:
        found = await deployment.explain()
        return found[before:] if len(found) == before + turns else []

    return await until(all_there)


async def turns_by_worker(deployment: Deployment) -> Counter[int]:
    """Turns that each worker has on decode engines now."""
    found: Counter[int] = Counter()
    for member in await deployment._fleet():
        if member["role"] == "decode":
            found[member["worker"]] += member["turns"]
    return found


@asynccontextmanager
async def held_streams(deployment: Deployment, each: int = 2) -> AsyncIterator[tuple[Gate, list[asyncio.Task[Any]]]]:
    """Streams that have content and are held there, until every worker has some."""
    workers = int(dict(deployment.spec.flags)["--workers"])
    gate = Gate(2)
    deployment.decode.default = Behaviour(gate=gate)
    running: list[asyncio.Task[Any]] = []
    while sum(count >= each for count in (await turns_by_worker(deployment)).values()) < workers:
        content = asyncio.Event()
        talk = Talk(deployment, stream=True)
        running.append(asyncio.create_task(talk.say(check=False, at_content=content.set)))
        await content.wait()
    yield gate, running
    gate.open()
    await asyncio.gather(*running, return_exceptions=True)


# -- reuse -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [SPEC, STOCK], ids=["verified", "stock"])
async def test_a_conversation_is_found_by_whichever_worker_its_next_turn_meets(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec)
    before = len(await deployment.explain())
    talks = [Talk(deployment, stream=bool(number % 2)) for number in range(6)]
    for turn in range(4):
        said = await asyncio.gather(*(talk.say() for talk in talks))
        if turn:
            assert all(one.pulled for one in [*said])
    places: dict[str, list[int]] = {}
    for item in await explained(deployment, before, 24):
        assert item["stored"] == "stored"
        places.setdefault(item["worker"], []).append(item["attached"])
    assert len(places) > 1
    assert sum(map(sum, places.values())) == 18


@pytest.mark.parametrize("link", [{}, {"conversation_id": "twins of several"}], ids=["history", "id"])
@pytest.mark.parametrize("spec", [SPEC, STOCK], ids=["verified", "stock"])
async def test_a_handle_is_sent_once_whoever_asks_for_it(deploy: Any, spec: Spec, link: dict[str, Any]) -> None:
    deployment = await deploy(spec)
    talk = Talk(deployment, **link)
    await talk.say()
    for _ in range(3):
        for engine in deployment.engines:
            engine.requests.clear()
        body = talk.body("Go on.")
        hold = asyncio.Event()  # none may leave its own handle before the last has looked for one
        deployment.prefill.default = Behaviour(hold=hold)
        asked = asyncio.gather(*(send(deployment, body, talk.headers) for _ in range(12)))

        async def all_there() -> bool:
            return len(deployment.prefill.generates) == 12

        await until(all_there)
        hold.set()
        turns = await asked
        assert [turn.text for turn in turns] == [deployment.right(body).content] * 12
        assert len([one for one in deployment.records(deployment.prefills) if one.handle_id]) == 1
        deployment.prefill.default = Behaviour()
        await talk.say("Go on.")


async def test_a_late_answer_of_one_worker_does_not_replace_a_newer_turn_of_another(deploy: Any) -> None:
    deployment = await deploy(SPEC)
    for number in range(4):
        talk = Talk(deployment, conversation_id=f"late {number}")
        await talk.say()
        before = len(deployment.decode.generates)
        gate = Gate(0)
        deployment.decode.next(Behaviour(gate=gate))
        late = asyncio.create_task(send(deployment, talk.body("The slow branch.", stream=True), talk.headers))

        async def decoding(before: int = before) -> bool:
            return len(deployment.decode.generates) == before + 1

        await until(decoding)
        quick = await talk.say("The quick branch.")
        gate.open()
        await late
        turn = await talk.say("And then?")
        assert turn.attached == [quick.decodes[0].request_id]


async def test_a_response_is_named_to_whichever_worker(deploy: Any) -> None:
    deployment = await deploy(SPEC)
    previous: str | None = None
    for turn in range(6):
        # A client of its own for each turn, and so a connection.
        url = deployment.router.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-canary-named", max_retries=0) as client:
            response = await client.responses.create(
                model="tiny", input="What is the tide doing in the harbour now? " * 4, previous_response_id=previous
            )
        previous = response.id
        assert ((deployment.prefill.generates[-1].pulled_tokens or 0) > 0) is (turn > 0)


async def test_workers_share_a_store_in_valkey_as_routers_do(tmp_path: Path) -> None:
    server = RedisServer()
    await server.start()
    key = written(tmp_path, "key", "canary-key-of-32-bytes-0123456789")
    store = (("--handle-store", "valkey"), ("--valkey-url", server.url), ("--handle-key-file", key))
    deployment = Deployment(Spec(flags=(("--workers", "2"), ("--valkey-timeout", "2"), *store)))
    try:
        await deployment.start()

        async def up() -> bool:
            return (await deployment.metrics())["pd_router_handle_store_up"] == 1

        await until(up)
        talks = [Talk(deployment) for _ in range(6)]
        for turn in range(3):
            said = await asyncio.gather(*(talk.say() for talk in talks))
            assert all(one.pulled for one in said) is (turn > 0)
        assert {item["worker"] for item in await explained(deployment, 0, 18)} == {0, 1}
        # What it holds is the server's to tell.
        assert "pd_router_handles" not in await deployment.metrics()
        await deployment.check()
    finally:
        await deployment.stop()
        server.close()


# -- limits ------------------------------------------------------------------------------------------
async def test_a_tenants_limit_is_of_the_whole_router(deploy: Any) -> None:
    deployment = await deploy(PAIR)
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate), times=2)
    running = []
    for _ in range(2):
        content = asyncio.Event()
        talk = Talk(deployment, tenant="many", stream=True)
        running.append(asyncio.create_task(talk.say(at_content=content.set)))
        await content.wait()
    refused = [await Talk(deployment, tenant="many").say(check=False) for _ in range(8)]
    assert {(turn.status, turn.json["error"]["code"]) for turn in refused} == {(429, "tenant_concurrency_limit")}
    await Talk(deployment, tenant="another").say()
    gate.open()
    await asyncio.gather(*running)
    await Talk(deployment, tenant="many").say()


# -- pages -------------------------------------------------------------------------------------------
async def test_metrics_are_those_of_one_router(deploy: Any) -> None:
    alone, deployment = await deploy(), await deploy(SPEC)
    before = await deployment.metrics()
    talks = [Talk(deployment) for _ in range(5)]
    for talk in talks:
        await talk.say()
        await talk.say()
    await send(deployment, b"{", {"Authorization": "Bearer sk-canary-bad"}, path="/v1/chat/completions")
    after: dict[str, float] = {}

    def gained(name: str) -> float:
        return after.get(f"pd_router_{name}", 0.0) - before.get(f"pd_router_{name}", 0.0)

    async def counted() -> bool:
        after.update(await deployment.metrics())
        return gained("turn_seconds_count") >= 11

    await until(counted)

    assert gained('requests_total{api="chat.completions",status="200"}') == 10
    assert gained('requests_total{api="chat.completions",status="400"}') == 1
    assert gained('reuse_stage_total{stage="eligible"}') == 10
    assert gained('reuse_stage_total{stage="pulled"}') == 5
    assert gained("handles_stored_total") == 10
    assert gained('handle_fates_total{fate="taken"}') == 5
    assert gained("turn_seconds_count") == 11
    assert gained('turn_seconds_bucket{le="+Inf"}') == 11
    assert gained("handles") == 5
    assert after["pd_router_workers"] == WORKERS
    assert after["pd_router_handle_store_up"] == 1
    engines = {name: value for name, value in after.items() if name.startswith("pd_router_engine_ready")}
    assert list(engines.values()) == [1.0, 1.0]
    assert after['pd_router_engines{role="decode",state="ready"}'] == 1
    breaker = f'pd_router_engine_breaker_state{{engine="{deployment.decode.url}",role="decode",state='
    assert (after[breaker + '"closed"}'], after[breaker + '"open"}']) == (1, 0)
    await Talk(alone).say()
    _, text = await page(deployment, "/metrics")
    _, plain = await page(alone, "/metrics")
    assert heads(text) == heads(plain)
    assert promtool.run("check", "metrics", text=text) == (0, "")


def heads(text: str) -> set[str]:
    """Without the times of creation, which are there only for what has been counted."""
    return {line for line in text.splitlines() if line.startswith("# ") and not line.split()[2].endswith("_created")}


async def test_status_is_that_of_one_router(deploy: Any) -> None:
    alone, deployment = await deploy(), await deploy(SPEC)
    await Talk(deployment).say()
    async with aiohttp.ClientSession() as session:

        async def status(url: str) -> dict[str, Any]:
            async with session.get(url + "/status") as response:
                found: dict[str, Any] = await response.json()
            return found

        one, many = await status(alone.router.admin_url), await status(deployment.router.admin_url)
        again = await status(deployment.router.admin_url)
    assert set(many) == {*one, "workers"}
    assert [engine["ready"] for engine in many["engines"]] == [True, True]
    assert set(many["funnel"]) == set(one["funnel"])
    assert many["funnel"]["eligible"] >= 1
    # The operator knows a router that was started anew by this.
    assert many["started"] == again["started"]
    assert many["workers"] == WORKERS


async def test_a_turn_is_explained_wherever_it_was_served(deploy: Any) -> None:
    deployment = await deploy(SPEC)
    before = len(await deployment.explain())
    for number in range(6):
        await Talk(deployment, headers={"X-Request-Id": f"explained-{number}"}).say()
    ids = [item["request_id"] for item in await explained(deployment, before, 6)]
    assert ids == [f"explained-{number}" for number in range(6)]
    _, text = await page(deployment, "/debug/explain?request_id=explained-3")
    assert text.count("request_id") == 1


async def test_ready_when_every_worker_is(deploy: Any) -> None:
    deployment = await deploy(SPEC, breaks=True)
    assert await page(deployment, "/readyz") == (200, "ok\n")
    await deployment.decode.kill()
    await deployment.router.wait_ready(False)
    code, reason = await page(deployment, "/readyz")
    assert code == 503
    assert reason.startswith("worker ")
    assert reason.endswith("no decode engine is ready\n")
    assert await page(deployment, "/healthz") == (200, "ok\n")
    await deployment.decode.restart()
    await deployment.router.wait_ready()


# -- processes that end ------------------------------------------------------------------------------
async def test_a_killed_worker_takes_only_its_own_connections_along(start_pods: Any) -> None:
    pods: PodDeployment = await start_pods(Spec(flags=(("--workers", "2"),)))
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    talks = [Talk(pods) for _ in range(8)]
    for talk in talks:
        await talk.say()
    before = await pods.metrics()
    async with held_streams(pods) as (gate, running):
        held = await turns_by_worker(pods)
        victim, _ = workers = workers_of(pods.router.pid)
        os.kill(victim, signal.SIGKILL)

        async def replaced() -> bool:
            return (await page(pods, "/metrics"))[1].count("pd_router_worker_restarts_total 1.0") == 1

        await until(replaced)
        gate.open()
        pods.decode.default = Behaviour()
        broken = [turn for turn in await asyncio.gather(*running) if turn.error is not None]
    assert len(broken) == held[0]
    await pods.router.wait_ready(seconds=30.0)
    assert len(set(workers_of(pods.router.pid)) & set(workers)) == 1
    # What was kept before is found by both, the new worker included: the pod is the same process.
    for _ in range(2):
        for turn in await asyncio.gather(*(talk.say() for talk in talks)):
            assert turn.pulled

    async def counted() -> bool:
        name = 'pd_router_requests_total{api="chat.completions",status="200"}'
        return (await pods.metrics())[name] >= before[name] + 16

    await until(counted)
    assert {item["worker"] for item in (await pods.explain())[-16:]} == {0, 1}
    after = await pods.metrics()
    assert after["pd_router_workers"] == 2


@pytest.mark.parametrize("told", ["supervisor", "every process"])
async def test_sigterm_drains_every_worker_and_loses_no_stream(deploy: Any, told: str) -> None:
    deployment = await deploy(PAIR, fresh=True)
    workers = workers_of(deployment.router.pid)
    async with held_streams(deployment) as (gate, running):
        if told == "every process":  # as systemd does by default
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
        deployment.router.terminate()
        await deployment.router.wait_ready(False)
        assert (await page(deployment, "/readyz"))[1] == "draining\n"

        async def refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", deployment.router.port)
            except OSError:
                return True
            writer.close()
            return False

        await until(refused)
        assert all(map(runs, workers))
        gate.open()
        turns = await asyncio.gather(*running)
        assert {turn.events[-1] for turn in turns} == {"[DONE]"}
    assert await deployment.router.wait() == 0
    assert not any(map(runs, workers))
    deployment.ended = True


async def test_a_worker_that_is_told_to_end_serves_its_streams_first_and_is_replaced(deploy: Any) -> None:
    deployment = await deploy(PAIR, fresh=True)
    first, second = workers_of(deployment.router.pid)
    async with held_streams(deployment, each=1) as (gate, running):
        os.kill(first, signal.SIGTERM)
        await deployment.router.wait_ready(False)
        gate.open()
        turns = await asyncio.gather(*running)
        assert {turn.events[-1] for turn in turns} == {"[DONE]"}

    async def replaced() -> bool:
        return not runs(first) and len(workers_of(deployment.router.pid)) == 2

    await until(replaced)
    await deployment.router.wait_ready(seconds=30.0)
    assert runs(second)


async def test_a_second_signal_ends_the_drain_of_all(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--workers", "2"), ("--drain-timeout", "600"))), fresh=True)
    workers = workers_of(deployment.router.pid)
    async with held_streams(deployment, each=1) as (_, running):
        deployment.router.terminate()
        await deployment.router.wait_ready(False)
        deployment.router.terminate()
        assert await deployment.router.wait() == 0
        for turn in await asyncio.gather(*running):
            assert turn.error is not None or "error" in turn.events[-1]
    assert not any(map(runs, workers))
    deployment.ended = True


async def test_a_killed_supervisor_leaves_nobody_behind(deploy: Any) -> None:
    deployment = await deploy(PAIR, fresh=True)
    workers = workers_of(deployment.router.pid)
    assert len(workers) == 2
    os.kill(deployment.router.pid, signal.SIGKILL)
    assert await deployment.router.wait() == -signal.SIGKILL
    await all_gone(workers)
    deployment.ended = True


async def test_a_supervisor_that_stands_still_costs_reuse_and_no_turn(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--workers", "2"),)), fresh=True)
    talk = Talk(deployment)
    await talk.say()
    os.kill(deployment.router.pid, signal.SIGSTOP)
    try:
        for _ in range(4):
            turn = await talk.say()
            assert turn.attached == []
    finally:
        os.kill(deployment.router.pid, signal.SIGCONT)

    async def answered() -> bool:
        return (await deployment.metrics())["pd_router_handle_store_up"] == 1

    await until(answered)
    await talk.say()
    assert (await talk.say()).pulled


# -- starting ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [{}, {"--workers": "2"}], ids=["alone", "several"])
async def test_a_port_of_several_workers_is_taken(deploy: Any, flags: dict[str, str]) -> None:
    deployment = await deploy(SPEC)
    await assert_refused(deployment, ["--listen", f"127.0.0.1:{deployment.router.port}"], flags)


async def test_several_workers_take_no_port_of_another(deploy: Any) -> None:
    deployment = await deploy()
    flags = {"--workers": "2"}
    await assert_refused(deployment, ["--listen", f"127.0.0.1:{deployment.router.port}"], flags)
    await assert_refused(deployment, ["--admin", f"127.0.0.1:{deployment.router.admin_port}"], flags)


async def assert_refused(deployment: Deployment, words: list[str], flags: dict[str, str]) -> None:
    router = RouterProcess([deployment.prefill.url], [deployment.decode.url], flags, words)
    with pytest.raises(RouterFailed, match=r"cannot listen: .* \(--listen, --admin\)"):
        await router.start()
    assert router.returncode == 1
    router.discard()


async def test_what_is_wrong_with_every_worker_is_said_once(deploy: Any) -> None:
    deployment = await deploy()
    flags = {"--workers": "4", "--api-keys-file": "/nowhere/keys"}
    router = RouterProcess([deployment.prefill.url], [deployment.decode.url], flags)
    with pytest.raises(RouterFailed):
        await router.start()
    assert router.returncode == 2
    assert router.log.count("--api-keys-file") == 1
    router.discard()


async def test_told_to_end_while_it_starts(deploy: Any) -> None:
    deployment = await deploy()
    router = RouterProcess([deployment.prefill.url], [deployment.decode.url], {"--workers": "3"})
    await router.start(ready=False)

    async def begun() -> bool:
        return bool(workers_of(router.pid))

    await until(begun)
    workers = workers_of(router.pid)
    router.terminate()
    assert await router.wait() == 0
    assert not any(map(runs, workers))
    for word in ("Traceback", "Warning:"):
        assert word not in router.log, router.log
    router.discard()


async def test_one_worker_is_one_process(deploy: Any) -> None:
    deployment = await deploy()
    assert workers_of(deployment.router.pid) == []
