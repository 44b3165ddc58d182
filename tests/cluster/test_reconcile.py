"""The operator against a real API server and its controllers: what it makes, heals and leaves alone, and that it writes
nothing when nothing changed. Writes are counted by the server's audit log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_operator.core.observed import HASH_ANNOTATION
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import ACCOUNT_ANNOTATION
from pdctl.shell.cluster.api import APPLY, MERGE
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.api_faults import Fault
from support.clusters import eventually, exists
from support.operator_lab import JSON_PATCH, STRATEGIC, Lab, router_at
from support.operator_process import OperatorProcess

ALL_CHILDREN = {
    "ServiceAccount qwen-router", "Role qwen-router", "RoleBinding qwen-router", "Service qwen-router",
    "Service qwen-prefill", "Service qwen-decode", "NetworkPolicy qwen-engines", "NetworkPolicy qwen-router",
    "StatefulSet qwen-prefill", "StatefulSet qwen-decode", "Deployment qwen-router",
}  # fmt: skip


BAD = ("spec.engine.vllmVersion", "0.31.0")
"""Not what the image's tag says: one of the few mistakes that an API server can't see."""


@pytest.fixture
def lab(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    """A namespace of its own."""
    made = Lab(light_cluster, namespace, tmp_path)
    yield made
    made.close()


def test_an_object_gets_all_children_and_a_second_apply_changes_nothing(lab: Lab) -> None:
    operator = lab.operator("--resync", "2", "--router-poll", "1")
    raw = lab.create()
    lab.settled(operator)
    children = lab.children()
    assert {str(ref) for ref in children} == ALL_CHILDREN
    for child in children.values():
        assert [owner["uid"] for owner in child["metadata"]["ownerReferences"]] == [raw["metadata"]["uid"]]
    lab.serve()
    lab.until_condition("BidirectionalActive", "Unknown", "RouterUnreachable")
    lab.resynced(operator)
    since = lab.cluster.audit_position()
    lab.create()
    lab.resynced(operator)
    assert lab.writes(since) == []
    assert "does not keep" not in operator.log()
    after = lab.get(lab.ref("PDDeployment"))["metadata"]
    assert "finalizers" not in after
    assert not any("kopf" in name for name in after.get("annotations", {}))


def test_a_restarted_operator_writes_nothing(lab: Lab) -> None:
    operator = lab.operator("--router-poll", "1")
    lab.create()
    lab.serve()
    lab.until_condition("BidirectionalActive", "Unknown", "RouterUnreachable")
    lab.settled(operator)
    assert operator.terminate() == 0
    since = lab.cluster.audit_position()
    lab.settled(lab.operator())
    assert lab.writes(since) == []


def test_ready_is_told_to_kubectl_and_once_as_an_event(lab: Lab) -> None:
    lab.operator()
    lab.create()
    lab.serve()
    lab.cluster.kubectl("wait", "-n", lab.namespace, "--for=condition=Ready", "pdd/qwen", "--timeout=60s")
    columns = lab.cluster.kubectl("get", "pdd", "qwen", "-n", lab.namespace).splitlines()
    assert columns[0].split() == ["NAME", "READY", "MODEL", "PREFILL", "DECODE", "ROUTER", "BIDIRECTIONAL", "AGE"]
    assert columns[1].split()[:6] == ["qwen", "True", "Qwen/Qwen3-32B", "1/1", "1/1", "1/1"]
    reasons = lab.cluster.kubectl(
        *("get", "events", "-n", lab.namespace, "--field-selector", "involvedObject.kind=PDDeployment"),
        *("-o", "jsonpath={.items[*].reason}"),
    )
    assert reasons.split().count("AllReady") == 1


@pytest.mark.parametrize("child", sorted(ALL_CHILDREN))
def test_a_deleted_child_comes_back(shared: Lab, child: str) -> None:
    kind, name = child.split()
    ref = shared.ref(kind, name)
    uid = shared.get(ref)["metadata"]["uid"]
    shared.delete(ref)
    eventually(f"another {child}", lambda: shared.get(ref)["metadata"]["uid"] != uid)


@pytest.fixture(scope="module")
def shared(light_cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One served deployment for the tests that damage its children one by one."""
    folder = tmp_path_factory.mktemp("shared")
    made = Lab(light_cluster, f"shared-{folder.name[-6:]}".lower().replace("_", "-"), folder)
    operator = made.operator()
    made.create(("spec.decode.replicas", 2))
    made.settled(operator)
    yield made
    made.close()


EDITS: dict[str, tuple[str, str, dict[str, Any], tuple[str | int, ...], Any]] = {
    "replicas": ("StatefulSet", "qwen-decode", {"spec": {"replicas": 5}}, ("spec", "replicas"), 2),
    "image": (
        "StatefulSet", "qwen-prefill",
        {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "other:1"}]}}}},
        ("spec", "template", "spec", "containers", 0, "image"), "vllm/vllm-openai:v0.32.0",
    ),
    "label": ("Service", "qwen-decode", {"metadata": {"labels": {"pdserving.dev/role": None}}},
              ("metadata", "labels", "pdserving.dev/role"), "decode"),
    "our own label": ("Service", "qwen-prefill", {"metadata": {"labels": {"pdserving.dev/pddeployment": None}}},
                      ("metadata", "labels", "pdserving.dev/pddeployment"), "qwen"),
    "managed-by": ("Role", "qwen-router", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}},
                   ("metadata", "labels", "app.kubernetes.io/managed-by"), "pd-operator"),
    "service port": ("Service", "qwen-router", {"spec": {"ports": [{"port": 80, "targetPort": 1234}]}},
                     ("spec", "ports", 0, "targetPort"), "http"),
    "rights": ("Role", "qwen-router", {"rules": []}, ("rules", 0, "resources", 0), "pods"),
    "policy": ("NetworkPolicy", "qwen-engines", {"spec": {"policyTypes": ["Egress"]}},
               ("spec", "policyTypes", 0), "Ingress"),
    "variable removed": (
        "Deployment", "qwen-router",
        {"spec": {"template": {"spec": {"containers": [{"name": "router", "command": ["sleep"]}]}}}},
        ("spec", "template", "spec", "containers", 0, "command", 0), "pd-router",
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edit_by_hand_is_healed(
    shared: Lab, edit: tuple[str, str, dict[str, Any], tuple[str | int, ...], Any]
) -> None:
    kind, name, patch, path, expected = edit
    ref = shared.ref(kind, name)
    shared.patch(ref, patch, STRATEGIC)

    def healed() -> bool:
        value: Any = shared.get(ref)
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return False
        return bool(value == expected)

    eventually("healed", healed)


KEYS: dict[str, tuple[str, str, str, Any]] = {
    "service": ("Service", "qwen-router", "/spec/ports/0/port", 8080),
    "headless service": ("Service", "qwen-prefill", "/spec/ports/1/port", 8080),
    "engine": ("StatefulSet", "qwen-prefill", "/spec/template/spec/containers/0/ports/0/containerPort", 8080),
    "router": ("Deployment", "qwen-router", "/spec/template/spec/containers/0/ports/1/containerPort", 8080),
    "owner": ("Service", "qwen-decode", "/metadata/ownerReferences", None),
}


@pytest.mark.parametrize("edit", KEYS.values(), ids=KEYS.keys())
def test_an_edited_key_of_a_list_is_put_back_and_nothing_stays_of_it(
    shared: Lab, edit: tuple[str, str, str, Any]
) -> None:
    kind, name, path, value = edit
    ref = shared.ref(kind, name)
    before = shared.get(ref)
    step = {"op": "remove", "path": path} if value is None else {"op": "replace", "path": path, "value": value}
    shared.patch(ref, [step], JSON_PATCH)
    owners = before["metadata"]["ownerReferences"]

    def healed() -> bool:
        raw = shared.get(ref)
        same = raw["spec"] == before["spec"] and raw["metadata"].get("ownerReferences") == owners
        return same and {entry["manager"] for entry in raw["metadata"]["managedFields"]} <= {
            *(entry["manager"] for entry in before["metadata"]["managedFields"]),
            "kubectl-edit",
        }

    eventually("healed", healed)
    assert shared.condition("Ready")["reason"] not in ("ApplyRefused", "ForeignObject")


def _of_template(raw: dict[str, Any]) -> dict[str, Any]:
    found = raw["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def _edit(lab: Lab, ref: Ref, change: Callable[[dict[str, Any]], None]) -> None:
    """As `kubectl edit` of the pod template, which controllers may come between."""

    def put() -> bool:
        raw = lab.get(ref)
        change(_of_template(raw))
        lab.api.request("PUT", f"{lab.path(ref)}?fieldManager=kubectl-edit", raw)
        return True

    eventually("edited", put)


def _rename_engine(pod: dict[str, Any]) -> None:
    pod["containers"][0]["name"] = "engine2"


def _rename_engine_elsewhere(pod: dict[str, Any]) -> None:
    """With another image, behind a container of somebody else."""
    [engine] = pod["containers"]
    pod["containers"] = [{"name": "first", "image": "side:1"}, {**engine, "name": "engine2", "image": "other:1"}]


def _rename_variable(pod: dict[str, Any]) -> None:
    next(one for one in pod["containers"][0]["env"] if one.get("value") and one["name"] != "POD_IP")["name"] = "OTHER"


def _rename_in_every_way(pod: dict[str, Any]) -> None:
    _rename_variable(pod)
    pod["containers"][0]["name"] = "engine2"
    pod["initContainers"][0]["name"] = "connector2"


def _rename_volume(pod: dict[str, Any]) -> None:
    """With every mount of it, since a server would not take it else."""
    volume = next(one for one in pod["volumes"] if one.get("emptyDir"))
    for container in (*pod["initContainers"], *pod["containers"]):
        for mount in container["volumeMounts"]:
            mount["name"] = "other" if mount["name"] == volume["name"] else mount["name"]
    volume["name"] = "other"


def _rename_mount(pod: dict[str, Any]) -> None:
    pod["containers"][0]["volumeMounts"][0]["mountPath"] = "/elsewhere"


RENAMES = (_rename_engine, _rename_variable, _rename_in_every_way, _rename_volume, _rename_mount)


@pytest.mark.parametrize("rename", RENAMES, ids=lambda one: one.__name__.strip("_"))
def test_nothing_stays_of_an_item_that_was_renamed_by_hand(
    shared: Lab, rename: Callable[[dict[str, Any]], None]
) -> None:
    ref = shared.ref("StatefulSet", "qwen-prefill")
    before = shared.get(ref)
    _edit(shared, ref, rename)

    def healed() -> bool:
        raw = shared.get(ref)
        managers = {entry["manager"] for entry in raw["metadata"]["managedFields"]}
        return raw["spec"] == before["spec"] and not managers & {"pd-operator-repair", "kubectl-edit"}

    eventually("healed", healed)


def test_what_others_have_added_stays_when_ours_is_renamed_beside_it(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    ref = lab.ref("StatefulSet", "qwen-prefill")
    before = lab.get(ref)
    _edit(lab, ref, _rename_engine_elsewhere)

    def healed() -> bool:
        containers = {one["name"]: one for one in _of_template(lab.get(ref))["containers"]}
        return (
            containers.keys() == {"engine", "first"} and containers["engine"] == _of_template(before)["containers"][0]
        )

    eventually("healed", healed)


def test_what_others_add_beside_ours_stays_and_costs_no_write(lab: Lab) -> None:
    operator = lab.operator("--resync", "2")
    lab.create()
    lab.settled(operator)
    ref = lab.ref("StatefulSet", "qwen-decode")
    sidecar = {"name": "sidecar", "image": "side:1"}
    patch = {"metadata": {"annotations": {"team": "a"}}, "spec": {"template": {"spec": {"containers": [sidecar]}}}}
    lab.serve()
    lab.resynced(operator)
    since = lab.cluster.audit_position()
    lab.patch(ref, patch, STRATEGIC)
    lab.resynced(operator)
    assert lab.written(since) == []
    raw = lab.get(ref)
    assert raw["metadata"]["annotations"]["team"] == "a"
    assert {one["name"] for one in raw["spec"]["template"]["spec"]["containers"]} == {"engine", "sidecar"}


ROLES = ["patch statefulsets qwen-decode", "patch statefulsets qwen-prefill"]
CHANGES: dict[str, tuple[tuple[str, Any], list[str]]] = {
    "decode up": (
        ("spec.decode.replicas", 2),
        ["patch poddisruptionbudgets qwen-decode", "patch statefulsets qwen-decode"],
    ),
    "prefill to none": (("spec.prefill.replicas", 0), ["patch statefulsets qwen-prefill"]),
    "router": (
        ("spec.router.replicas", 3),
        ["patch deployments qwen-router", "patch poddisruptionbudgets qwen-router"],
    ),
    "time to live": (("spec.kvTransfer.decoderBlocksTTLSeconds", 300), ["patch deployments qwen-router", *ROLES]),
    "reuse": (("spec.kvTransfer.bidirectional", "Disabled"), ["patch deployments qwen-router", *ROLES]),
    "service": (("spec.router.service.type", "LoadBalancer"), ["patch services qwen-router"]),
    "router limits": (("spec.router.limits.maxInflight", 7), ["patch deployments qwen-router"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_touches_what_it_concerns_and_once(lab: Lab, change: tuple[tuple[str, Any], list[str]]) -> None:
    edit, expected = change
    operator = lab.operator("--resync", "2")
    lab.create()
    lab.settled(operator)
    since = lab.cluster.audit_position()
    lab.create(edit)
    lab.settled(operator)
    lab.resynced(operator)
    assert lab.written(since) == expected


def test_reuse_that_is_switched_off_is_another_generation(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    before = lab.get(lab.ref("PDDeployment"))["status"]["generation"]
    lab.create(("spec.kvTransfer.bidirectional", "Disabled"))
    lab.settled(operator)
    assert lab.get(lab.ref("PDDeployment"))["status"]["generation"] != before
    assert lab.condition("BidirectionalActive")["reason"] == "Disabled"


def test_decode_is_scaled_with_kubectl(lab: Lab) -> None:
    lab.operator()
    lab.create()
    lab.serve()
    lab.cluster.kubectl("scale", "pdd/qwen", "-n", lab.namespace, "--replicas=2")
    ref = lab.ref("StatefulSet", "qwen-decode")
    eventually("scaled", lambda: lab.get(ref)["spec"]["replicas"] == 2)
    lab.until_ready("decode", "2/2")


def test_replicas_of_an_autoscaler_are_kept(lab: Lab) -> None:
    operator = lab.operator("--resync", "2")
    lab.create(("spec.decode.scaling", "External"))
    lab.settled(operator)
    ref = lab.ref("StatefulSet", "qwen-decode")
    lab.api.request("PATCH", f"{lab.path(ref)}/scale", {"spec": {"replicas": 3}}, "application/merge-patch+json")
    lab.create(("spec.decode.scaling", "External"), ("spec.engine.maxNumSeqs", 3))
    lab.settled(operator)
    lab.resynced(operator)
    assert lab.get(ref)["spec"]["replicas"] == 3
    lab.until_ready("decode", "3/3")


def test_a_role_that_is_handed_over_to_an_autoscaler_keeps_its_pods(lab: Lab) -> None:
    operator = lab.operator()
    lab.create(("spec.decode.replicas", 3))
    lab.settled(operator)
    lab.create(("spec.decode.replicas", 3), ("spec.decode.scaling", "External"))
    lab.settled(operator)
    assert lab.get(lab.ref("StatefulSet", "qwen-decode"))["spec"]["replicas"] == 3


def test_a_bad_edit_becomes_a_condition_and_touches_nothing(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.serve()
    lab.settled(operator)
    since = lab.cluster.audit_position()
    lab.create(BAD)
    condition = lab.until_condition("Ready", "False", "InvalidSpec")
    assert "spec.engine.vllmVersion" in condition["message"]
    assert lab.condition("DecodeReady")["status"] == "True"
    assert lab.written(since) == []
    lab.create()
    lab.until_condition("Ready", "True")


def test_one_bad_object_does_not_keep_the_others(lab: Lab) -> None:
    lab.operator()
    lab.create(BAD, name="bad")
    lab.create()
    lab.until_condition("Ready", "False", "InvalidSpec", name="bad")
    eventually("children", lambda: {str(ref) for ref in lab.children()} == ALL_CHILDREN)
    assert lab.children("bad") == {}


def test_a_foreign_object_is_never_taken_over(lab: Lab) -> None:
    service = {"metadata": {"name": "qwen-decode"}, "spec": {"ports": [{"port": 1}], "selector": {"mine": "true"}}}
    lab.api.request("POST", f"/api/v1/namespaces/{lab.namespace}/services", service)
    lab.operator("--resync", "2")
    lab.create()
    condition = lab.until_condition("DecodeReady", "False", "ForeignObject")
    assert "Service qwen-decode" in condition["message"]
    foreign = lab.ref("Service", "qwen-decode")
    assert lab.get(foreign)["spec"]["selector"] == {"mine": "true"}
    eventually("the rest", lambda: len(lab.children()) == len(ALL_CHILDREN) - 1)
    lab.delete(foreign)
    eventually("ours", lambda: {str(ref) for ref in lab.children()} == ALL_CHILDREN)


def test_a_foreign_object_beside_what_serves_is_no_outage(lab: Lab) -> None:
    kinds = {
        "PodDisruptionBudget": ("qwen-decode", {"selector": {"matchLabels": {"mine": "true"}}, "maxUnavailable": 1}),
        "NetworkPolicy": ("qwen-engines", {"podSelector": {"matchLabels": {"mine": "true"}}}),
    }
    for kind, (name, spec) in kinds.items():
        ref = lab.ref(kind, name)
        lab.api.request("POST", lab.path(ref).rpartition("/")[0], {"metadata": {"name": name}, "spec": spec})
    lab.operator()
    lab.create(("spec.decode.replicas", 2))
    lab.serve()
    message = lab.until_condition("Progressing", "False", "ForeignObject")["message"]
    for kind, (name, _) in kinds.items():
        assert f"{kind} {name} exists and its controller is nobody" in message
    for kind in ("Ready", "PrefillReady", "DecodeReady", "RouterReady"):
        assert lab.condition(kind)["status"] == "True"
    for kind, (name, _) in kinds.items():
        lab.delete(lab.ref(kind, name))
    lab.until_ready("decode", "2/2")
    lab.until_condition("Ready", "True", "AllReady")


def test_nothing_runs_as_or_gives_rights_to_a_foreign_account(lab: Lab) -> None:
    account = lab.ref("ServiceAccount", "qwen-router")
    lab.api.request("POST", lab.path(account).rpartition("/")[0], {"metadata": {"name": account.name}})
    lab.operator("--resync", "2")
    lab.create()
    message = lab.until_condition("RouterReady", "False", "ForeignObject")["message"]
    assert "RoleBinding qwen-router is not written, since it would use ServiceAccount qwen-router" in message
    using = {"ServiceAccount qwen-router", "RoleBinding qwen-router", "Deployment qwen-router"}
    eventually("the rest", lambda: {str(ref) for ref in lab.children()} == ALL_CHILDREN - using)
    assert not any(lab.exists(lab.ref(kind, "qwen-router")) for kind in ("RoleBinding", "Deployment"))
    lab.delete(account)
    eventually("ours", lambda: {str(ref) for ref in lab.children()} == ALL_CHILDREN)


def test_a_child_that_is_not_wanted_any_more_is_deleted_and_nothing_else(lab: Lab) -> None:
    operator = lab.operator()
    lab.create(("spec.router.replicas", 2))
    lab.settled(operator)
    budget = lab.ref("PodDisruptionBudget", "qwen-router")
    assert lab.exists(budget)
    label = {"app.kubernetes.io/managed-by": "pd-operator", "pdserving.dev/pddeployment": "qwen"}
    stray = {"metadata": {"name": "stray", "labels": label}}
    lab.api.request("POST", f"/api/v1/namespaces/{lab.namespace}/serviceaccounts", stray)
    lab.create(("spec.router.replicas", 1))
    eventually("budget is gone", lambda: not lab.exists(budget))
    assert lab.exists(lab.ref("ServiceAccount", "stray"))


def test_children_go_with_their_owner_while_no_operator_runs(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    operator.kill()
    lab.delete(lab.ref("PDDeployment"))
    assert not lab.exists(lab.ref("PDDeployment"))
    eventually("garbage is collected", lambda: lab.children() == {})


def test_a_namespace_goes_while_the_operator_runs_and_while_it_does_not(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    path = f"/api/v1/namespaces/{lab.namespace}"
    lab.api.request("DELETE", path)
    eventually("namespace is gone", lambda: not exists(lab.api, path))
    lab.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": lab.namespace}})
    eventually("account", lambda: exists(lab.api, f"{path}/serviceaccounts/default"))
    lab.create()
    lab.settled(operator)
    operator.kill()
    lab.api.request("DELETE", path)
    eventually("namespace is gone", lambda: not exists(lab.api, path))
    lab.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": lab.namespace}})


def test_deleted_and_created_again_at_once(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    lab.delete(lab.ref("PDDeployment"))
    uid = lab.create()["metadata"]["uid"]

    def own() -> bool:
        owners = {one["metadata"]["ownerReferences"][0]["uid"] for one in lab.children().values()}
        return len(lab.children()) == len(ALL_CHILDREN) and owners == {uid}

    eventually("children of the new one", own)
    lab.until_condition("Ready", "False", "Unschedulable")


def test_changes_made_while_no_operator_ran_are_picked_up(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    operator.kill()
    lab.create(("spec.decode.replicas", 2))
    lab.delete(lab.ref("Service", "qwen-router"))
    lab.settled(lab.operator())
    assert lab.get(lab.ref("StatefulSet", "qwen-decode"))["spec"]["replicas"] == 2
    assert lab.exists(lab.ref("Service", "qwen-router"))


def test_a_status_that_somebody_edits_is_corrected(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    right = lab.get(lab.ref("PDDeployment"))["status"]
    lab.patch(lab.ref("PDDeployment"), {"status": {"url": "http://evil", "generation": "x"}}, sub="/status")
    eventually("corrected", lambda: lab.get(lab.ref("PDDeployment"))["status"] == right)


def delete_without_pods(lab: Lab, ref: Ref) -> None:
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Orphan"}
    lab.api.request("DELETE", lab.path(ref), options)
    eventually("gone", lambda: not lab.exists(ref))


def test_a_fixed_field_of_an_older_release_is_replaced_without_its_pods(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    operator.kill()
    ref = lab.ref("StatefulSet", "qwen-decode")
    raw = lab.get(ref)
    pod = eventually("a pod", lambda: lab.pods("decode"))[0]["metadata"]["uid"]
    delete_without_pods(lab, ref)
    older = {key: raw[key] for key in ("apiVersion", "kind", "spec")}
    older["spec"]["podManagementPolicy"] = "OrderedReady"
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
    older["metadata"] = {**metadata, "annotations": {HASH_ANNOTATION: "older"}}
    lab.api.request("PATCH", f"{lab.path(ref)}?fieldManager=pd-operator&force=true", older, APPLY)
    lab.operator()
    eventually("replaced", lambda: lab.get(ref)["spec"]["podManagementPolicy"] == "Parallel")
    uid = lab.get(ref)["metadata"]["uid"]

    def adopted() -> bool:
        found = lab.pods("decode")[0]["metadata"]
        return found["uid"] == pod and [owner["uid"] for owner in found.get("ownerReferences", [])] == [uid]

    eventually("the same pod is adopted", adopted)


def test_routers_that_lost_their_account_and_their_deployment_are_rolled_once(lab: Lab) -> None:
    operator = lab.operator()
    lab.create()
    lab.settled(operator)
    ref, account = lab.ref("Deployment", "qwen-router"), lab.ref("ServiceAccount", "qwen-router")
    eventually("a router", lambda: lab.pods("router"))
    operator.kill()
    delete_without_pods(lab, ref)
    lab.delete(account)
    eventually("gone", lambda: not lab.exists(account))
    operator = lab.operator()
    eventually("made anew", lambda: lab.exists(ref) and lab.exists(account))
    uid = lab.get(account)["metadata"]["uid"]

    def rolled() -> bool:
        found = [one["metadata"].get("annotations", {}).get(ACCOUNT_ANNOTATION) for one in lab.pods("router")]
        lab.make_ready()
        return found == [uid]

    eventually("no router has a token of the earlier account", rolled)
    router = lab.pods("router")[0]["metadata"]["uid"]
    operator.kill()
    delete_without_pods(lab, ref)
    lab.operator()
    eventually("made anew", lambda: lab.exists(ref))
    replica_sets = f"/apis/apps/v1/namespaces/{lab.namespace}/replicasets"

    def adopted() -> bool:
        owners = [one["metadata"].get("ownerReferences", []) for one in lab.api.get(replica_sets)["items"]]
        return [[owner["uid"] for owner in found] for found in owners] == [[lab.get(ref)["metadata"]["uid"]]] * 2

    eventually("what is there is taken over", adopted)
    eventually("it is current", lambda: lab.get(ref).get("status", {}).get("updatedReplicas") == 1)
    assert [one["metadata"]["uid"] for one in lab.pods("router")] == [router]
    assert len(lab.api.get(replica_sets)["items"]) == 2, "the first template and the one with the account, no third"


def test_what_is_wrong_with_pods_is_told(lab: Lab) -> None:
    lab.operator()
    lab.create()
    lab.until_condition("DecodeReady", "False", "Unschedulable")
    pod = lab.pods("decode")[0]
    scheduled = {"conditions": [{"type": "PodScheduled", "status": "True", "reason": ""}]}
    waiting = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    pull = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "ErrImagePull: not found"}}}
    lab.report(pod, {**scheduled, "containerStatuses": [{**waiting, **pull}]})
    assert "not found" in lab.until_condition("DecodeReady", "False", "ImagePullFailed")["message"]
    ended = {"exitCode": 1, "reason": "Error", "message": "RuntimeError: no NIXL plugin LIBFABRIC"}
    loop = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}, "restartCount": 4}
    lab.report(pod, {**scheduled, "containerStatuses": [{**waiting, **loop}]})
    assert "no NIXL plugin LIBFABRIC" in lab.until_condition("Ready", "False", "CrashLooping")["message"]


def test_refused_pods_are_told_with_the_servers_words(lab: Lab) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    lab.api.request("PATCH", f"/api/v1/namespaces/{lab.namespace}", {"metadata": {"labels": label}}, MERGE)
    lab.operator()
    lab.create()
    for kind in ("PrefillReady", "DecodeReady", "Progressing"):
        message = lab.until_condition(kind, "False", "PodsRefused")["message"]
        assert "violates PodSecurity" in message


def test_a_quota_is_told_for_routers_as_well(lab: Lab) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    lab.api.request("POST", f"/api/v1/namespaces/{lab.namespace}/resourcequotas", quota)
    lab.operator()
    lab.create()
    for kind in ("RouterReady", "DecodeReady"):
        assert "exceeded quota" in lab.until_condition(kind, "False", "PodsRefused")["message"]


def test_reuse_and_transfers_are_read_from_the_router(lab: Lab) -> None:
    engines = [
        {"engine": role, "role": role, "generation": "g", "ready": True, "draining": False}
        for role in ("prefill", "decode")
    ]
    answer = {"reuse": "on", "started": 1.5, "engines": engines, "funnel": {"attached": 0, "pulled_tokens": 0}}
    operator = lab.operator("--router-poll", "1", "--resync", "2")
    lab.create()
    address = "127.0.0.77"
    with router_at(address, lambda: answer) as asked:
        lab.serve(ip=address)
        lab.until_condition("BidirectionalActive", "True", "ReuseOn")
        lab.until_condition("TransfersFlowing", "Unknown", "NoTurnsYet")
        answer["funnel"] = {"attached": 3, "pulled_tokens": 640}
        lab.until_condition("TransfersFlowing", "True", "TokensPulled")
        lab.settled(operator)
        since, count = lab.cluster.audit_position(), len(asked)
        answer["funnel"] = {"attached": 40, "pulled_tokens": 64_000}
        eventually("asked again", lambda: len(asked) > count + 2)
        assert lab.writes(since) == [], "counters that move are no reason to write"
        answer["funnel"] = {"attached": 60, "pulled_tokens": 64_000}
        lab.until_condition("TransfersFlowing", "False", "NothingPulled")
    lab.until_condition("TransfersFlowing", "Unknown", "RouterUnreachable")
    assert lab.condition("Ready")["status"] == "True", "an operator that can't ask is no outage"
    assert set(asked) == {"/status"}


def test_without_the_definition_the_operator_says_so_and_ends(lab: Lab) -> None:
    with lab.proxy() as proxy:
        operator = lab.operator(url=proxy.url, start=False)
        proxy.rule = lambda seen: Fault(404) if "/pdserving.dev/" in seen.path else None
        operator.start(wait=False)
        eventually("it ends", lambda: not operator.running)
    assert "does not serve pddeployments.pdserving.dev" in operator.log()


def test_thirty_deployments_settle_and_then_cost_nothing(lab: Lab) -> None:
    operator = lab.operator("--resync", "3")
    lab.create(BAD, name="bad")
    names = [f"many-{n}" for n in range(30)]
    for name in names:
        lab.create(name=name)
    lab.settled(operator, *names, "bad")
    assert len(lab.children("many-29")) == len(ALL_CHILDREN)

    # Controllers go on reporting for a while; what they report is written once.
    def quiet() -> bool:
        since = lab.cluster.audit_position()
        lab.resynced(operator)
        return lab.writes(since) == []

    eventually("no writes", quiet)
    since = lab.cluster.audit_position()
    lab.resynced(operator, 3)
    assert lab.writes(since) == []
    assert operator.metric("pd_operator_watch_missed_total") == 0
    assert operator.health()[0] == 200


def test_two_namespaces_and_not_a_third(lab: Lab, light_cluster: EmbeddedCluster, tmp_path: Path) -> None:
    second = Lab(light_cluster, f"{lab.namespace}-b", tmp_path)
    third = Lab(light_cluster, f"{lab.namespace}-c", tmp_path)
    try:
        lab.operator("--namespace", second.namespace)
        for one in (lab, second, third):
            one.create()
        eventually("served", lambda: len(lab.children()) == len(second.children()) == len(ALL_CHILDREN))
        assert third.children() == {}
    finally:
        second.close()
        third.close()


def test_the_whole_cluster(lab: Lab, tmp_path: Path) -> None:
    with OperatorProcess(lab.cluster.kubeconfig, tmp_path / "all.log", "--all-namespaces"):
        lab.create()
        eventually("served", lambda: len(lab.children()) == len(ALL_CHILDREN))
