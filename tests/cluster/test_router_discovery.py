"""The router finds its engines at a real API server: pods, watches, a service account, and the server's own faults."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.chat import Talk
from support.cluster_pods import ClusterPodDeployment
from support.deployment import Spec
from support.waiting import until


@pytest_asyncio.fixture
async def pods(light_cluster: EmbeddedCluster, namespace: str) -> AsyncIterator[ClusterPodDeployment]:
    # No bookmark comes within 3 s, so a quiet watch is given up and pods are listed again that often.
    flags = (("--discovery-stall", "3"), ("--discovery-retry-max", "1"))
    deployment = ClusterPodDeployment(Spec(prefills=2, decodes=2, flags=flags), light_cluster, namespace)
    await deployment.start()
    yield deployment
    await deployment.check()
    await deployment.stop()


async def test_pods_join_restart_drain_and_leave(pods: ClusterPodDeployment) -> None:
    talk = Talk(pods, stream=True)
    await talk.say()
    assert (await talk.say("Go on.")).pulled > 100
    states = {pods.prefill: "ready", pods.decode: "ready"}
    pods.join(pods.decodes[1])
    await pods.wait_states({**states, pods.decodes[1]: "ready"})
    old = pods.decode.engine_id
    await pods.restart_container(pods.decode)
    await pods.wait_states({**states, pods.decodes[1]: "ready"})
    turn = await talk.say("And then?")
    assert all(old.encode() not in record.raw for record in turn.prefills)
    pods.move(pods.decode, deleting=True)
    await pods.wait_states({**states, pods.decode: "draining", pods.decodes[1]: "ready"})
    for _ in range(3):
        turn = await talk.say("Why?")
        assert turn.decodes[0] in pods.decodes[1].generates
    pods.leave(pods.decode)
    await pods.wait_states({pods.prefill: "ready", pods.decodes[1]: "ready"})
    pods.move(pods.decodes[1], generation="g2")
    await pods.router.wait_ready(False)
    assert {
        (event.verb, event.resource) for event in pods.cluster.audit_events(pods.begun) if event.user == pods.user
    } == {
        ("list", "pods"),
        ("watch", "pods"),
    }


async def test_another_pod_of_the_same_name_and_address(pods: ClusterPodDeployment) -> None:
    talk = Talk(pods)
    await talk.say()
    old = pods.decode.engine_id
    await pods.decode.restart()
    pods.join(pods.decode)
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready"})
    turn = await talk.say("Go on.")
    assert turn.attached == []
    assert all(old.encode() not in record.raw for record in turn.prefills)
    assert len((await talk.say("And then?")).attached) == 1


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_the_api_server_is_away(pods: ClusterPodDeployment, how: str) -> None:
    cluster, talk = pods.cluster, Talk(pods, stream=True)
    await talk.say()

    async def noticed() -> bool:
        return (await pods.metrics())["pd_router_discovery_connected"] == 0

    try:
        if how == "killed":
            await asyncio.to_thread(cluster.stop_daemon, "apiserver")
        else:
            await asyncio.to_thread(cluster.signal_daemon, "apiserver", signal.SIGSTOP)
        await until(noticed, 60.0)
        assert (await talk.say("Go on.")).pulled > 100
        assert await pods.not_ready_reason() == "ok"
    finally:
        if how == "killed":
            await asyncio.to_thread(cluster.start_daemon, "apiserver")
        else:
            await asyncio.to_thread(cluster.signal_daemon, "apiserver", signal.SIGCONT)
        await asyncio.to_thread(cluster.wait_until_ready)
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
    assert (await talk.say("And then?")).pulled > 100


async def test_an_account_that_may_no_longer_look(pods: ClusterPodDeployment) -> None:
    kubectl = pods.cluster.kubectl
    await asyncio.to_thread(kubectl, "-n", pods.namespace, "delete", "rolebinding", "router")

    async def refused() -> bool:
        return str((await pods.status())["discovery"]["trouble"]).startswith("refused: 403")

    await until(refused, 60.0)
    await Talk(pods).say()
    account = f"--serviceaccount={pods.namespace}:router"
    await asyncio.to_thread(kubectl, "-n", pods.namespace, "create", "rolebinding", "router", "--role=router", account)
    pods.join(pods.decodes[1])
    await pods.wait_states({pods.prefill: "ready", pods.decode: "ready", pods.decodes[1]: "ready"})
