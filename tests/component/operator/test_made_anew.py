"""What is deleted by hand and made anew: the routers' account, and workloads whose number an autoscaler decides."""

from __future__ import annotations

import pytest

from pd_operator.core.observed import HASH_ANNOTATION
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import ACCOUNT_ANNOTATION
from pd_wire import names
from support.operator_bench import Bench

ACCOUNT = Ref("ServiceAccount", "models", "qwen-router")
ROUTER = Ref("Deployment", "models", "qwen-router")
ENGINES = Ref("StatefulSet", "models", "qwen-prefill")
LATER, LATEST = "2026-11-30T11:00:00Z", "2026-11-30T12:00:00Z"
EXTERNAL = (("spec.prefill.scaling", "External"), ("spec.router.scaling", "External"))


def uid_on(bench: Bench) -> str | None:
    """The account's uid on the routers' template."""
    metadata = bench.cluster.objects[ROUTER]["spec"]["template"]["metadata"]
    value = metadata.get("annotations", {}).get(ACCOUNT_ANNOTATION)
    return None if value is None else str(value)


def put_pods(bench: Bench, role: str, *pods: str, annotations: dict[str, str] | None = None) -> None:
    """Pods that run, as a controller made them."""
    for name in pods:
        labels = {names.LABEL_DEPLOYMENT: "qwen", names.LABEL_ROLE: role}
        metadata = {"name": name, "namespace": "models", "labels": labels, "annotations": annotations or {}}
        bench.cluster.put({"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": "Running"}})


async def test_a_new_account_rolls_the_routers_once(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    assert uid_on(bench) is None
    bench.cluster.time = LATER
    bench.cluster.writes.clear()
    bench.cluster.remove(ACCOUNT)
    await bench.settle(operator)
    assert [write for write in bench.cluster.writes if write[0] == "apply"] == [("apply", ACCOUNT), ("apply", ROUTER)]
    assert uid_on(bench) == bench.cluster.objects[ACCOUNT]["metadata"]["uid"]
    bench.serve_all()
    await bench.settle(operator)
    assert bench.condition("Progressing")["reason"] == "Complete"
    bench.cluster.writes.clear()
    await bench.settle(await bench.operator())
    assert bench.cluster.writes == []


@pytest.mark.parametrize("deployment_too", [False, True], ids=["account", "account and Deployment"])
async def test_an_account_that_waits_for_cleanup_gets_no_pods(bench: Bench, deployment_too: bool) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.time = LATER
    if deployment_too:
        bench.cluster.remove(ROUTER, collect=False)
    going = bench.cluster.objects[ACCOUNT]
    bench.cluster.put({**going, "metadata": {**going["metadata"], "deletionTimestamp": LATER}})
    bench.cluster.writes.clear()
    await bench.work(operator, 3)
    assert ("apply", ROUTER) not in bench.cluster.writes
    assert bench.condition("Progressing")["reason"] == "WaitingForCleanup"
    bench.cluster.remove(ACCOUNT)
    await bench.settle(operator)
    account = bench.cluster.objects[ACCOUNT]["metadata"]["uid"]
    assert uid_on(bench) == (None if deployment_too else account), "a Deployment that is made with it needs no roll"


async def test_routers_left_without_their_account_and_their_deployment_are_rolled_once(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    put_pods(bench, "router", "qwen-router-5d-a")
    bench.cluster.time = LATER
    bench.cluster.remove(ROUTER, collect=False)
    bench.cluster.remove(ACCOUNT)
    await bench.settle(operator)
    account = bench.cluster.objects[ACCOUNT]["metadata"]["uid"]
    assert uid_on(bench) == account
    await bench.assert_another_look_writes_nothing(operator)
    # The roll has brought routers that are younger than the account, and their Deployment is lost once more.
    bench.cluster.remove(Ref("Pod", "models", "qwen-router-5d-a"))
    bench.cluster.time = LATEST
    put_pods(bench, "router", "qwen-router-6e-a", annotations={ACCOUNT_ANNOTATION: account})
    bench.cluster.remove(ROUTER, collect=False)
    await bench.settle(operator)
    assert uid_on(bench) == account, "another template would roll them again"
    await bench.assert_another_look_writes_nothing(operator)


async def test_a_workload_of_an_autoscaler_comes_back_with_its_pods(bench: Bench) -> None:
    bench.create(*EXTERNAL)
    operator = await bench.operator()
    await bench.settle(operator)
    assert "replicas" not in bench.cluster.objects[ENGINES]["spec"]
    put_pods(bench, "prefill", "qwen-prefill-0", "qwen-prefill-2")
    put_pods(bench, "router", "qwen-router-5d-a", "qwen-router-5d-b")
    bench.cluster.remove(ENGINES, collect=False)
    bench.cluster.remove(ROUTER, collect=False)
    await bench.settle(operator)
    assert [bench.cluster.objects[ref]["spec"]["replicas"] for ref in (ENGINES, ROUTER)] == [3, 2]
    await bench.assert_another_look_writes_nothing(operator)
    bench.change(("spec.prefill.minReadySeconds", 3))
    await bench.settle(operator)
    spec = bench.cluster.objects[ENGINES]["spec"]
    assert (spec["minReadySeconds"], spec["replicas"]) == (3, 3), "what the creation sent is handed over"


async def test_a_replaced_workload_of_an_autoscaler_keeps_its_pods(bench: Bench) -> None:
    bench.create(*EXTERNAL)
    operator = await bench.operator()
    await bench.settle(operator)
    put_pods(bench, "prefill", *(f"qwen-prefill-{n}" for n in range(4)))
    bench.cluster.edit(ENGINES, ("spec", "replicas"), 4)
    bench.cluster.edit(ENGINES, ("spec", "podManagementPolicy"), "OrderedReady")
    bench.cluster.edit(ENGINES, ("metadata", "annotations", HASH_ANNOTATION), "of-an-older-release")
    bench.cluster.writes.clear()
    await bench.settle(operator)
    assert ("orphan", ENGINES) in bench.cluster.writes
    spec = bench.cluster.objects[ENGINES]["spec"]
    assert (spec["podManagementPolicy"], spec["replicas"]) == ("Parallel", 4)
