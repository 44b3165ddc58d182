"""Whole reconciles over a cluster in memory: what is created, healed and left alone, and how little is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pd_operator.core.observed_kinds import Ref
from pd_operator.shell.api import ApiError
from support.operator_bench import QWEN, Bench

STATEFUL_SET = Ref("StatefulSet", "models", "qwen-decode")
SERVICE = Ref("Service", "models", "qwen-decode")


async def test_all_children_are_created_and_owned(bench: Bench) -> None:
    raw = bench.create()
    await bench.settle(await bench.operator())
    children = {str(ref) for ref in bench.cluster.objects if ref != QWEN}
    assert children >= {
        "ServiceAccount qwen-router", "Role qwen-router", "RoleBinding qwen-router", "Service qwen-router",
        "Service qwen-prefill", "Service qwen-decode", "StatefulSet qwen-prefill", "StatefulSet qwen-decode",
        "Deployment qwen-router",
    }  # fmt: skip
    for ref, child in bench.cluster.objects.items():
        if ref != QWEN:
            assert [owner["uid"] for owner in child["metadata"]["ownerReferences"]] == [raw["metadata"]["uid"]]
    assert bench.condition("Ready")["reason"] == "Creating"


async def test_ready_when_pods_are_ready_and_one_event_tells_it(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    assert bench.condition("Ready")["status"] == "True"
    assert [event["reason"] for event in bench.cluster.events].count("AllReady") == 1


async def test_nothing_is_written_when_nothing_changed(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    bench.cluster.writes.clear()
    bench.cluster.put(bench.cluster.objects[QWEN])
    await operator.resync_once()
    await bench.settle(operator)
    await bench.settle(await bench.operator())
    assert bench.cluster.writes == []


async def test_somebody_elses_condition_stays_and_costs_no_write(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    theirs = {
        "type": "example.com/Checked",
        "status": "True",
        "reason": "Yes",
        "lastTransitionTime": "2026-11-30T10:00:00Z",
    }
    status = bench.cluster.objects[QWEN]["status"]
    bench.cluster.set_status(QWEN, {**status, "conditions": [*status["conditions"], theirs]})
    bench.cluster.writes.clear()
    await bench.settle(operator)
    await operator.resync_once()
    await bench.settle(operator)
    assert bench.cluster.writes == []
    bench.serve_all()
    await bench.settle(operator)
    assert bench.condition("example.com/Checked") == theirs
    assert [write for write in bench.cluster.writes if write[0] == "status"] == [("status", QWEN)]


async def test_a_deleted_child_comes_back(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.writes.clear()
    bench.cluster.remove(SERVICE)
    await bench.settle(operator)
    assert bench.cluster.writes == [("apply", SERVICE)]
    assert SERVICE in bench.cluster.objects


async def test_an_edited_child_is_healed_once(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.writes.clear()
    bench.cluster.edit(STATEFUL_SET, ("spec", "replicas"), 7)
    await bench.settle(operator)
    assert [write for write in bench.cluster.writes if write[0] == "apply"] == [("apply", STATEFUL_SET)]
    assert bench.cluster.objects[STATEFUL_SET]["spec"]["replicas"] == 1


@pytest.mark.parametrize("added", [[], [{"name": "x", "port": 80, "protocol": "TCP"}]], ids=["moved", "and taken"])
async def test_a_port_whose_number_was_edited_is_put_back(bench: Bench, added: list[dict[str, Any]]) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    router = Ref("Service", "models", "qwen-router")
    [port] = bench.cluster.objects[router]["spec"]["ports"]
    bench.cluster.edit(router, ("spec", "ports"), [{**port, "port": 8080, "nodePort": 31000}, *added])
    await bench.settle(operator)
    raw = bench.cluster.objects[router]
    [healed] = raw["spec"]["ports"]
    assert {key: healed[key] for key in port} == port
    assert added or healed["nodePort"] == 31000, "what the server gave it stays"
    assert [entry["manager"] for entry in raw["metadata"]["managedFields"]] == ["pd-operator"]
    await bench.assert_another_look_writes_nothing(operator)


@pytest.mark.parametrize("lost", [1, 2], ids=["before the port", "before its ownership"])
async def test_a_repair_that_somebody_comes_between_is_ended_later(bench: Bench, lost: int) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    patch, tries = bench.cluster.patch, 0

    async def conflicting(ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        nonlocal tries
        tries += 1
        return await patch(ref, "1" if tries == lost else version, operations)

    bench.cluster.patch = conflicting  # type: ignore[method-assign]
    router = Ref("Service", "models", "qwen-router")
    [port] = bench.cluster.objects[router]["spec"]["ports"]
    bench.cluster.edit(router, ("spec", "ports"), [{**port, "port": 8080}])
    await bench.settle(operator)
    raw = bench.cluster.objects[router]
    assert [entry["manager"] for entry in raw["metadata"]["managedFields"]] == ["pd-operator"]
    assert raw["spec"]["ports"] == [port]
    assert tries == 3


def containers(bench: Bench) -> list[dict[str, Any]]:
    found = bench.cluster.objects[STATEFUL_SET]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, list)
    return found


TEMPLATE = ("spec", "template", "spec")


@pytest.mark.parametrize("refused", [False, True], ids=["put back", "removed afterwards"])
async def test_nothing_stays_of_an_item_that_was_renamed_by_hand(bench: Bench, refused: bool) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    patch, before = bench.cluster.patch, bench.cluster.objects[STATEFUL_SET]["spec"]

    async def refusing(ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if refused and any(one["op"] == "replace" and one["path"].startswith("/spec") for one in operations):
            raise ApiError(422, "Invalid", "volumeMounts[0].name: Not found")
        return await patch(ref, version, operations)

    bench.cluster.patch = refusing  # type: ignore[method-assign]
    [engine] = containers(bench)
    added = {"name": "SIDE", "value": "x"}
    env = [{**one, "name": "OTHER"} if one["name"] == "NIXL_LOG_LEVEL" else one for one in engine["env"]]
    assert env != engine["env"]
    sidecar = {"name": "side", "image": "side:1"}
    bench.cluster.edit(
        STATEFUL_SET, (*TEMPLATE, "containers"), [sidecar, {**engine, "name": "engine2", "env": [*env, added]}]
    )
    await bench.settle(operator)
    found = {one["name"]: one for one in containers(bench)}
    assert found.keys() == {"engine", "side"}
    names = [one["name"] for one in found["engine"]["env"]]
    # A container that had to be removed takes along what was added in it.
    assert names == [*(one["name"] for one in engine["env"]), *([] if refused else ["SIDE"])]
    raw = bench.cluster.objects[STATEFUL_SET]
    assert [entry["manager"] for entry in raw["metadata"]["managedFields"]] == ["pd-operator"]
    assert raw["spec"].keys() == before.keys()
    await bench.assert_another_look_writes_nothing(operator)


async def test_what_was_added_stays_when_ours_was_taken_away(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    [engine] = containers(bench)
    sidecar = {"name": "side", "image": "side:1", "ports": engine["ports"]}
    bench.cluster.edit(STATEFUL_SET, (*TEMPLATE, "containers"), [sidecar])
    await bench.settle(operator)
    assert containers(bench) == [engine, sidecar]


async def test_a_refusal_that_is_no_moved_port_stays_one(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.edit(SERVICE, ("spec", "ports"), [{"name": "http", "port": 1, "protocol": "TCP"}] * 2)
    await bench.work(operator, 2)
    assert bench.condition("DecodeReady")["reason"] == "ApplyRefused"


async def test_a_label_removed_by_hand_comes_back_although_the_watch_loses_sight(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    label = "pdserving.dev/pddeployment"
    bench.cluster.edit(SERVICE, ("metadata", "labels", label), "")
    await bench.settle(operator)
    assert bench.cluster.objects[SERVICE]["metadata"]["labels"][label] == "qwen"


@pytest.mark.parametrize(
    ("path", "value", "touched"),
    [
        ("spec.decode.replicas", 2, {"StatefulSet qwen-decode"}),
        ("spec.prefill.replicas", 0, {"StatefulSet qwen-prefill"}),
        ("spec.router.replicas", 3, {"Deployment qwen-router"}),
        ("spec.router.service.port", 8080, {"Service qwen-router"}),
    ],
)
async def test_an_edit_touches_only_what_it_concerns(bench: Bench, path: str, value: int, touched: set[str]) -> None:
    bench.create(("spec.decode.podDisruptionBudget", "Disabled"), ("spec.router.podDisruptionBudget", "Disabled"))
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.writes.clear()
    bench.change((path, value))
    await bench.settle(operator)
    assert {str(ref) for verb, ref in bench.cluster.writes if verb != "status" and verb != "event"} == touched
    assert sum(verb == "apply" for verb, _ in bench.cluster.writes) == 1


async def test_a_child_that_is_not_wanted_any_more_is_deleted(bench: Bench) -> None:
    bench.create(("spec.router.replicas", 2))
    operator = await bench.operator()
    await bench.settle(operator)
    budget = Ref("PodDisruptionBudget", "models", "qwen-router")
    assert budget in bench.cluster.objects
    bench.change(("spec.router.replicas", 1))
    await bench.settle(operator)
    assert budget not in bench.cluster.objects


async def test_a_bad_edit_leaves_what_serves_alone(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    before = {str(ref): raw for ref, raw in bench.cluster.objects.items() if ref != QWEN}
    bench.change(("spec.decode.tensorParallelSize", 3), ("spec.kvTransfer.routerTTLSeconds", 10_000))
    await bench.settle(operator)
    assert {str(ref): raw for ref, raw in bench.cluster.objects.items() if ref != QWEN} == before
    assert bench.condition("Ready")["reason"] == "InvalidSpec"
    assert bench.condition("DecodeReady")["status"] == "True"
    assert "spec.kvTransfer.routerTTLSeconds" in bench.condition("Ready")["message"]
    bench.change(("spec.decode.tensorParallelSize", 1), ("spec.kvTransfer.routerTTLSeconds", 400))
    await bench.settle(operator)
    assert bench.condition("Ready")["reason"] != "InvalidSpec"


async def test_one_bad_object_does_not_keep_the_others(bench: Bench) -> None:
    bench.create(("spec.kvTransfer.backend", "UCX"), name="bad")
    bench.create()
    await bench.settle(await bench.operator())
    assert bench.condition("Ready", "bad")["reason"] == "InvalidSpec"
    assert STATEFUL_SET in bench.cluster.objects
    assert Ref("StatefulSet", "models", "bad-decode") not in bench.cluster.objects


@pytest.mark.parametrize("labels", [{}, {"pdserving.dev/pddeployment": "qwen"}], ids=["plain", "with our label"])
async def test_a_foreign_object_stays_and_the_rest_is_made(bench: Bench, labels: dict[str, str]) -> None:
    metadata = {"name": "qwen-decode", "namespace": "models", "labels": labels}
    bench.cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"mine": True}})
    bench.create()
    operator = await bench.operator()
    await bench.work(operator, 5)
    assert bench.cluster.objects[SERVICE]["spec"] == {"mine": True}
    assert bench.condition("DecodeReady")["reason"] == "ForeignObject"
    assert STATEFUL_SET in bench.cluster.objects
    writes = len(bench.cluster.writes)
    await bench.work(operator, 3)
    assert len(bench.cluster.writes) == writes, "looking again is no reason to write"
    bench.cluster.remove(SERVICE)
    await bench.settle(operator)
    assert bench.cluster.objects[SERVICE]["spec"]["clusterIP"] == "None"


async def test_nothing_runs_as_or_gives_rights_to_a_foreign_account(bench: Bench) -> None:
    account = Ref("ServiceAccount", "models", "qwen-router")
    bench.cluster.put(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account.name, "namespace": "models"}}
    )
    bench.create()
    operator = await bench.operator()
    await bench.work(operator, 3)
    assert Ref("RoleBinding", "models", "qwen-router") not in bench.cluster.objects
    assert Ref("Deployment", "models", "qwen-router") not in bench.cluster.objects
    assert STATEFUL_SET in bench.cluster.objects
    assert "Deployment qwen-router is not written" in bench.condition("RouterReady")["message"]
    bench.cluster.remove(account)
    await bench.settle(operator)
    assert Ref("Deployment", "models", "qwen-router") in bench.cluster.objects


async def test_a_child_without_its_owner_reference_is_taken_back(bench: Bench) -> None:
    raw = bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.edit(SERVICE, ("metadata", "ownerReferences"), [])
    await bench.settle(operator)
    owners = bench.cluster.objects[SERVICE]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [raw["metadata"]["uid"]]
    assert bench.condition("DecodeReady")["reason"] != "ForeignObject"


async def test_refused_pods_are_told_and_looked_for_until_they_are_there(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    assert not any(verb == "list" and ref.kind == "Event" for verb, ref in bench.cluster.calls), "nothing lacks"
    raw = bench.cluster.objects[STATEFUL_SET]
    bench.cluster.set_status(STATEFUL_SET, {**raw["status"], "replicas": 0, "readyReplicas": 0, "updatedReplicas": 0})
    await bench.work(operator, 2)
    assert bench.condition("DecodeReady")["reason"] == "Scaling"
    assert len(operator.wakeups) == 1, "no watch tells of an Event"
    about = {"uid": raw["metadata"]["uid"]}
    told = {"reason": "FailedCreate", "message": "violates PodSecurity", "involvedObject": about, "metadata": {}}
    bench.cluster.events.append(told)
    await bench.work(operator)
    assert bench.condition("DecodeReady")["reason"] == "PodsRefused"
    assert "violates PodSecurity" in bench.condition("Ready")["message"]
    bench.cluster.serve(STATEFUL_SET)
    await bench.settle(operator)
    assert bench.condition("Ready")["reason"] == "AllReady"


async def test_what_hinders_a_pods_beginning_is_looked_for_until_it_has_begun(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    raw = bench.cluster.objects[STATEFUL_SET]
    bench.cluster.set_status(STATEFUL_SET, {**raw["status"], "readyReplicas": 0})
    labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "decode"}
    scheduled = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}
    metadata = {"name": "qwen-decode-0", "namespace": "models", "labels": labels}
    pod = bench.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": scheduled})
    await bench.work(operator, 2)
    assert bench.condition("DecodeReady")["reason"] == "Starting"
    assert len(operator.wakeups) == 1, "no watch tells of an Event"
    about = {"uid": pod["metadata"]["uid"]}
    told = {"reason": "FailedMount", "message": "no such claim", "involvedObject": about, "metadata": {}, "count": 3}
    bench.cluster.events.append(told)
    await bench.work(operator)
    assert bench.condition("DecodeReady")["reason"] == "ContainerNotCreated"
    assert "pod qwen-decode-0: ContainerNotCreated: FailedMount: no such claim" in bench.condition("Ready")["message"]
    writes = len(bench.cluster.writes)
    await bench.work(operator, 3)
    assert len(bench.cluster.writes) == writes
    bench.cluster.set_status(Ref("Pod", "models", "qwen-decode-0"), {"phase": "Running"})
    bench.cluster.serve(STATEFUL_SET)
    await bench.settle(operator)
    assert bench.condition("Ready")["reason"] == "AllReady"


async def test_an_engine_that_does_not_end_is_looked_at_until_its_time_is_up_and_told_once(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()
    await bench.settle(operator)
    raw = bench.cluster.objects[STATEFUL_SET]
    bench.cluster.set_status(STATEFUL_SET, {**raw["status"], "readyReplicas": 0, "updatedReplicas": 0})
    labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "decode"}
    metadata = {"name": "qwen-decode-0", "namespace": "models", "labels": labels}
    far, past = "2999-01-01T00:00:00Z", "2020-01-01T00:00:00Z"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "deletionTimestamp": far}, "spec": {}}
    bench.cluster.put(pod)
    await bench.work(operator, 3)
    assert bench.condition("DecodeReady")["reason"] == "Starting"
    assert len(operator.wakeups) == 1, "no watch tells that a grace period is over"
    writes = len(bench.cluster.writes)
    await bench.work(operator, 3)
    assert len(bench.cluster.writes) == writes
    # As when the time has come: the clock of the bench is not that of statuses.
    bench.cluster.put({**pod, "metadata": {**metadata, "deletionTimestamp": past}})
    await bench.settle(operator)
    assert bench.condition("DecodeReady")["reason"] == "TerminationStuck"
    await bench.assert_another_look_writes_nothing(operator)


async def test_events_that_may_not_be_read_keep_nothing_from_its_way(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.serve_all()

    async def events_about(_namespace: str, _uid: str) -> Sequence[Mapping[str, Any]]:
        raise ApiError(403, "Forbidden", "no right to list events")

    bench.cluster.events_about = events_about  # type: ignore[method-assign]
    raw = bench.cluster.objects[STATEFUL_SET]
    bench.cluster.set_status(STATEFUL_SET, {**raw["status"], "replicas": 0, "readyReplicas": 0})
    await bench.work(operator, 2)
    assert bench.condition("DecodeReady")["reason"] == "Scaling"


NOT_KNOWN_YET = (
    'roles.rbac.authorization.k8s.io "qwen-router" is forbidden: cannot set blockOwnerDeletion in this case because '
    "cannot find RESTMapping for APIVersion pdserving.dev/v1alpha1 Kind PDDeployment: no matches for kind"
)


async def test_a_server_that_does_not_know_the_definition_yet_is_waited_for_quietly(bench: Bench) -> None:
    bench.create()
    apply, tries = bench.cluster.apply, 0

    async def refuse(_manifest: Mapping[str, Any], _uid: str | None) -> Mapping[str, Any]:
        nonlocal tries
        tries += 1
        raise ApiError(403, "Forbidden", NOT_KNOWN_YET)

    bench.cluster.apply = refuse  # type: ignore[method-assign]
    operator = await bench.operator()
    for number in range(1, 7):
        assert len(operator.wakeups) == 1
        assert number == 1 or operator.wakeups.overdue() > 0, "the pauses don't grow"
        await operator.work_once()
        assert tries == number, "one question per look, not one per child"
        bench.time += 1.2
    for kind in ("Ready", "PrefillReady", "DecodeReady", "RouterReady"):
        assert bench.condition(kind)["reason"] == "WaitingForAPI"
    assert len(bench.condition("Ready")["message"]) < 120
    assert {event["type"] for event in bench.cluster.events} == {"Normal"}
    bench.cluster.apply = apply  # type: ignore[method-assign]
    await bench.settle(operator)
    assert STATEFUL_SET in bench.cluster.objects
    assert bench.condition("Ready")["reason"] == "Creating"


async def test_deleted_and_created_again_under_the_same_name(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.remove(QWEN, collect=False)
    bench.create()
    await bench.work(operator, 3)
    assert bench.condition("Ready")["reason"] == "WaitingForCleanup"
    bench.cluster.collect_garbage()
    await bench.settle(operator)
    owners = {raw["metadata"]["ownerReferences"][0]["uid"] for ref, raw in bench.cluster.objects.items() if ref != QWEN}
    assert owners == {bench.cluster.objects[QWEN]["metadata"]["uid"]}


async def test_an_object_in_deletion_gets_no_children_back(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.cluster.edit(STATEFUL_SET, ("spec", "replicas"), 7)
    bench.cluster.objects[QWEN]["metadata"]["deletionTimestamp"] = "2026-11-30T10:00:00Z"
    bench.cluster.put(bench.cluster.objects[QWEN])
    bench.cluster.writes.clear()
    await bench.settle(operator)
    assert bench.cluster.writes == []


async def test_changes_made_while_no_operator_ran_are_picked_up(bench: Bench) -> None:
    bench.create()
    first = await bench.operator()
    await bench.settle(first)
    bench.stop(first)
    bench.change(("spec.decode.replicas", 2))
    bench.cluster.remove(SERVICE)
    await bench.settle(await bench.operator())
    assert bench.cluster.objects[STATEFUL_SET]["spec"]["replicas"] == 2
    assert SERVICE in bench.cluster.objects


async def test_a_deletion_that_no_watch_told_is_found_by_the_complete_look(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.stop(operator)
    bench.cluster.remove(SERVICE)
    assert len(operator.wakeups) == 0
    await operator.resync_once()
    await bench.settle(operator)
    assert SERVICE in bench.cluster.objects


@pytest.mark.parametrize("successor", [False, True], ids=["gone", "another one"])
async def test_a_child_that_vanished_unseen_is_noticed_when_it_is_written(bench: Bench, successor: bool) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.stop(operator)
    raw = bench.cluster.objects[STATEFUL_SET]
    bench.cluster.remove(STATEFUL_SET)
    if successor:
        bench.cluster.put({key: value for key, value in raw.items() if key != "status"})
    bench.cluster.listeners.append(operator.saw)
    bench.change(("spec.decode.replicas", 2))
    await bench.settle(operator)
    assert bench.cluster.objects[STATEFUL_SET]["spec"]["replicas"] == 2


async def test_an_unwanted_child_that_vanished_unseen_is_forgotten(bench: Bench) -> None:
    bench.create(("spec.router.replicas", 2))
    operator = await bench.operator()
    await bench.settle(operator)
    bench.stop(operator)
    bench.cluster.remove(Ref("PodDisruptionBudget", "models", "qwen-router"))
    bench.cluster.listeners.append(operator.saw)
    for count in (2, 3):
        bench.change(("spec.router.replicas", 1), ("spec.prefill.replicas", count))
        await bench.settle(operator)
    assert [str(ref) for verb, ref in bench.cluster.writes if verb == "delete"] == ["PodDisruptionBudget qwen-router"]


async def test_an_owner_that_vanished_unseen_gets_no_children(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    bench.stop(operator)
    bench.cluster.remove(QWEN, collect=False)
    bench.cluster.listeners.append(operator.saw)
    bench.cluster.writes.clear()
    bench.cluster.collect_garbage()
    await bench.settle(operator)
    assert bench.cluster.writes == []
    assert operator.mirror.keys() == ()


WORKLOADS = {
    "decode": STATEFUL_SET,
    "router": Ref("Deployment", "models", "qwen-router"),
}


@pytest.mark.parametrize(("role", "ref"), WORKLOADS.items(), ids=WORKLOADS)
async def test_replicas_of_an_autoscaled_role_are_left_alone(bench: Bench, role: str, ref: Ref) -> None:
    bench.create((f"spec.{role}.scaling", "External"))
    operator = await bench.operator()
    await bench.settle(operator)
    raw = bench.cluster.objects[ref]
    bench.cluster.put({**raw, "spec": {**raw["spec"], "replicas": 5}})
    await bench.settle(operator)
    before = bench.cluster.objects[ref]["spec"]
    bench.change((f"spec.{role}.pod", {"labels": {"team": "x"}}))
    await bench.settle(operator)
    after = bench.cluster.objects[ref]["spec"]
    assert after["template"] != before["template"]
    assert after["replicas"] == 5


@pytest.mark.parametrize(("role", "ref"), WORKLOADS.items(), ids=WORKLOADS)
async def test_a_role_that_is_handed_over_to_an_autoscaler_keeps_its_replicas(
    bench: Bench, role: str, ref: Ref
) -> None:
    bench.create((f"spec.{role}.replicas", 3))
    operator = await bench.operator()
    await bench.settle(operator)
    bench.change((f"spec.{role}.scaling", "External"))
    await bench.settle(operator)
    assert bench.cluster.objects[ref]["spec"]["replicas"] == 3
    bench.change((f"spec.{role}.scaling", "Fixed"), (f"spec.{role}.replicas", 2))
    await bench.settle(operator)
    assert bench.cluster.objects[ref]["spec"]["replicas"] == 2


async def test_an_orphaned_pods_successor_adopts_them(bench: Bench) -> None:
    bench.create()
    operator = await bench.operator()
    await bench.settle(operator)
    raw = bench.cluster.objects[STATEFUL_SET]
    hashed = {**raw["metadata"], "annotations": {"pdserving.dev/rendered-hash": "of an older release"}}
    bench.cluster.put({**raw, "metadata": hashed, "spec": {**raw["spec"], "podManagementPolicy": "OrderedReady"}})
    bench.cluster.writes.clear()
    await bench.settle(operator)
    verbs = [verb for verb, ref in bench.cluster.writes if ref == STATEFUL_SET]
    assert verbs == ["orphan", "apply"]
    assert bench.cluster.objects[STATEFUL_SET]["spec"]["podManagementPolicy"] == "Parallel"
