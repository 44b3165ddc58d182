"""An edit of which the server refuses a part: what exists stays as it is, whichever part that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pd_operator.core.observed_kinds import Ref
from pd_operator.shell.api import ApiError
from pd_operator.shell.run import Operator
from support.operator_bench import QWEN, Bench

PREFILL = Ref("StatefulSet", "models", "qwen-prefill")
DECODE = Ref("StatefulSet", "models", "qwen-decode")
ROUTER = Ref("Deployment", "models", "qwen-router")
EDIT = (("spec.engine.image", "vllm:v0.32.1"), ("spec.router.limits.maxInflight", 7), ("spec.router.service.port", 81))
WORDS = "ValidatingAdmissionPolicy 'sizes' denied request: too large"


def refuse(bench: Bench, *refs: Ref) -> None:
    """Admission refuses these from now on."""

    def policy(manifest: Mapping[str, Any]) -> None:
        if any((manifest["kind"], manifest["metadata"]["name"]) == (ref.kind, ref.name) for ref in refs):
            raise ApiError(422, "Invalid", WORDS)

    bench.cluster.policy = policy


async def serving(bench: Bench, *edits: tuple[str, Any]) -> Operator:
    """A deployment whose pods are all ready, and its operator at rest."""
    bench.create(*edits)
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    bench.cluster.writes.clear()
    bench.cluster.calls.clear()
    return operator


def children(bench: Bench) -> dict[str, Any]:
    return {str(ref): raw for ref, raw in bench.cluster.objects.items() if ref != QWEN}


def applied(bench: Bench) -> list[str]:
    return [str(ref) for verb, ref in bench.cluster.writes if verb not in ("status", "event")]


@pytest.mark.parametrize("refused", [PREFILL, DECODE, ROUTER], ids=str)
async def test_an_edit_of_which_one_workload_is_refused_changes_nothing_that_exists(bench: Bench, refused: Ref) -> None:
    operator = await serving(bench)
    before = children(bench)
    refuse(bench, refused)
    bench.change(*EDIT)
    await bench.work(operator, 4)
    assert children(bench) == before
    assert applied(bench) == []
    told = bench.condition("Progressing")
    assert (told["status"], told["reason"]) == ("False", "ApplyRefused")
    assert f"the API server refuses {refused}: {WORDS}" in told["message"]
    for other in {PREFILL, DECODE, ROUTER} - {refused}:
        assert f"{other} stays as it is until {refused} can change with it" in told["message"]
    for kind in ("Ready", "PrefillReady", "DecodeReady", "RouterReady"):
        assert bench.condition(kind)["status"] == "True", "what runs serves on"
    assert "requests are served as before, and it is tried again" in bench.condition("Ready")["message"]
    assert ("ApplyRefused", "Warning") in {(event["reason"], event["type"]) for event in bench.cluster.events}
    bench.cluster.policy = None
    await bench.settle(operator)
    images = {
        bench.cluster.objects[ref]["spec"]["template"]["spec"]["containers"][0]["image"] for ref in (PREFILL, DECODE)
    }
    assert images == {"vllm:v0.32.1"}
    assert bench.condition("Progressing")["reason"] != "ApplyRefused"


async def test_looking_again_at_a_refused_edit_writes_nothing_and_is_never_long_in_coming(bench: Bench) -> None:
    operator = await serving(bench)
    refuse(bench, DECODE)
    bench.change(*EDIT)
    await bench.work(operator, 12)
    writes = len(bench.cluster.writes)
    assert operator.wakeups.overdue() == 0.0
    bench.time += 35.0
    assert operator.wakeups.overdue() > 0.0
    await bench.work(operator, 3)
    assert len(bench.cluster.writes) == writes


async def test_everything_is_tried_before_the_first_write_and_nothing_without_a_change(bench: Bench) -> None:
    operator = await serving(bench)
    bench.change(*EDIT)
    await bench.settle(operator)
    verbs = [verb for verb, ref in bench.cluster.calls if verb in ("rehearse", "apply")]
    assert verbs == ["rehearse"] * 3 + ["apply"] * 4
    bench.cluster.calls.clear()
    await operator.resync_once()
    await bench.settle(operator)
    assert {verb for verb, _ in bench.cluster.calls} == {"list"}


async def test_a_first_creation_and_a_single_change_are_not_tried(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.change(("spec.prefill.replicas", 0))
    await bench.settle(operator)
    assert "rehearse" not in {verb for verb, _ in bench.cluster.calls}


async def test_what_serving_may_need_comes_back_although_the_edit_is_refused(bench: Bench) -> None:
    operator = await serving(bench)
    refuse(bench, DECODE)
    bench.change(*EDIT)
    await bench.work(operator, 2)
    bench.cluster.remove(ROUTER)
    bench.cluster.edit(PREFILL, ("spec", "replicas"), 5)
    bench.cluster.writes.clear()
    await bench.work(operator, 2)
    assert applied(bench) == ["Deployment qwen-router"]
    # An edit by hand can't be told from the refused edit of the object, so it is healed with it.
    bench.cluster.policy = None
    await bench.settle(operator)
    assert bench.cluster.objects[PREFILL]["spec"]["replicas"] == 1


async def test_a_refusal_that_comes_after_the_try_stops_what_is_left(bench: Bench) -> None:
    operator = await serving(bench)
    before = children(bench)
    rehearse = bench.cluster.rehearse

    async def late(manifest: Mapping[str, Any], uid: str | None) -> None:
        await rehearse(manifest, uid)
        if manifest["metadata"]["name"] == DECODE.name:
            refuse(bench, PREFILL)

    bench.cluster.rehearse = late  # type: ignore[method-assign]
    bench.change(("spec.engine.image", "vllm:v0.32.1"))
    await bench.work(operator)
    assert children(bench) == before
    assert applied(bench) == ["StatefulSet qwen-prefill"], "which is what was refused"


async def test_a_successor_that_is_refused_keeps_the_other_from_adopting_pods(bench: Bench) -> None:
    operator = await serving(bench)
    for role in ("prefill", "decode"):
        labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": role}
        metadata = {"name": f"qwen-{role}-0", "namespace": "models", "labels": labels}
        bench.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}})
    refuse(bench, DECODE)
    for ref in (PREFILL, DECODE):
        bench.cluster.remove(ref)
    bench.cluster.writes.clear()
    await bench.work(operator, 2)
    assert applied(bench) == []
    bench.cluster.policy = None
    await bench.settle(operator)
    assert {PREFILL, DECODE} <= bench.cluster.objects.keys()


async def test_replicas_that_are_handed_over_are_tried_with_their_number(bench: Bench) -> None:
    operator = await serving(bench, ("spec.decode.replicas", 3))
    asked: list[int] = []

    def policy(manifest: Mapping[str, Any]) -> None:
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == DECODE.name:
            asked.append(manifest["spec"].get("replicas", 1))

    bench.cluster.policy = policy
    bench.change(("spec.decode.scaling", "External"), *EDIT)
    await bench.settle(operator)
    assert asked[0] == 3
    assert bench.cluster.objects[DECODE]["spec"]["replicas"] == 3


@pytest.mark.parametrize("refused", [False, True], ids=["moved only", "refused as well"])
async def test_a_port_that_was_moved_by_hand_is_no_refusal(bench: Bench, refused: bool) -> None:
    operator = await serving(bench)
    containers = bench.cluster.objects[PREFILL]["spec"]["template"]["spec"]["containers"]
    [port, *others] = containers[0]["ports"]
    moved = [{**containers[0], "ports": [{**port, "containerPort": 1}, *others]}]

    def policy(manifest: Mapping[str, Any]) -> None:
        live = bench.cluster.objects[PREFILL]["spec"]["template"]["spec"]["containers"][0]["ports"][0]
        wrong = live["containerPort"] == 1 or refused
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == PREFILL.name and wrong:
            raise ApiError(422, "Invalid", "Duplicate value")

    bench.change(*EDIT)
    bench.cluster.edit(PREFILL, ("spec", "template", "spec", "containers"), moved)
    bench.cluster.policy = policy
    decode = bench.cluster.objects[DECODE]["spec"]
    await (bench.work(operator, 3) if refused else bench.settle(operator))
    assert (bench.cluster.objects[DECODE]["spec"] == decode) is refused
    assert (bench.condition("Progressing")["reason"] == "ApplyRefused") is refused
