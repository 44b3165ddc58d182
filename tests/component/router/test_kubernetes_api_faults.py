"""The API server fails in every way that is known of it, and the router starts with and without it.

What must hold throughout: turns go on with the engines that are known, and what a watch lost is found again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.chat import Talk, send
from support.deployment import Spec
from support.pod_deployment import PodDeployment
from support.pod_load import listed, load
from support.pods import make_pod
from support.router_process import RouterFailed, RouterProcess
from support.waiting import until


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


async def test_one_watch_that_breaks_is_no_trouble(start_pods: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start_pods()
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
async def test_not_ready_before_the_first_list(start_pods: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start_pods(api=False)
    assert (await pods.not_ready_reason()).startswith("the pods of default/tiny were not listed yet")
    turn = await send(pods, Talk(pods).body("Hello."))
    assert (turn.status, int(turn.headers["Retry-After"]) >= 1) == (503, True)
    assert (await pods.status())["engines"] == []
    await pods.api.start()
    await pods.router.wait_ready()
    talk = Talk(pods)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1


async def test_engines_with_ipv6_addresses(start_pods: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start_pods(Spec(engine=(("host", "::1"),)))
    talk = Talk(pods, stream=True)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1


async def test_the_router_ends_in_order_while_it_watches(start_pods: Callable[..., Awaitable[PodDeployment]]) -> None:
    pods = await start_pods()
    assert pods.api.watching == 1
    pods.ended = True
    assert await pods.router.stop() == 0


async def test_a_proxy_for_the_application_is_none_for_the_api_server(
    start_pods: Callable[..., Awaitable[PodDeployment]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await start_pods()


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
