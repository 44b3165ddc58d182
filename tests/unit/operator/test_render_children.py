"""The objects around the pods: order, owners, names, what is left out, budgets, policies, access."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import SpecError
from pd_operator.core.render_children import RenderContext, render_children
from support.pddeployments import EXAMPLES, deployment, example, smallest

Edit = tuple[str, Any]
Manifest = dict[str, Any]

IMAGE: Edit = ("spec.engine.image", "r.example/vllm:v0.32.0")
CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1", None, ("operators-pull",))
ORDER = (
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "Service",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "StatefulSet",
    "Deployment",
)
OWN_KINDS = {
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
}


def children(*edits: Edit, context: RenderContext = CONTEXT) -> tuple[Manifest, ...]:
    return render_children(deployment(IMAGE, *edits), context)


def one(kind: str, name: str, *edits: Edit, context: RenderContext = CONTEXT) -> Manifest:
    [found] = [
        child
        for child in children(*edits, context=context)
        if (child["kind"], child["metadata"]["name"]) == (kind, name)
    ]
    return found


def names_of(kind: str, *edits: Edit) -> list[str]:
    return [child["metadata"]["name"] for child in children(*edits) if child["kind"] == kind]


def test_what_pods_need_is_there_before_them() -> None:
    kinds = [child["kind"] for child in children(("spec.decode.replicas", 2))]
    assert kinds == sorted(kinds, key=ORDER.index)


def test_children_of_a_pair() -> None:
    assert Counter(child["kind"] for child in children()) == {
        "ServiceAccount": 1,
        "Role": 1,
        "RoleBinding": 1,
        "Service": 3,
        "NetworkPolicy": 2,
        "StatefulSet": 2,
        "Deployment": 1,
    }
    assert names_of("StatefulSet") == ["qwen-prefill", "qwen-decode"]
    assert names_of("Service") == ["qwen-prefill", "qwen-decode", "qwen-router"]


@pytest.mark.parametrize("child", children(("spec.decode.replicas", 2)), ids=lambda child: str(child["kind"]))
def test_each_child_belongs_to_its_deployment(child: Manifest) -> None:
    metadata = child["metadata"]
    assert metadata["namespace"] == "default"
    assert metadata["labels"]["pdserving.dev/pddeployment"] == "qwen"
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "pd-operator"
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "pdserving.dev/v1alpha1",
            "kind": "PDDeployment",
            "name": "qwen",
            "uid": "uid-1",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert child["apiVersion"] == OWN_KINDS.get(child["kind"], "v1")


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_nothing_empty_is_sent_since_what_is_sent_is_owned(name: str) -> None:
    for child in render_children(deployment(base=example(name)), CONTEXT):
        assert list(_nothings(child)) == []


def _nothings(value: Any, path: str = "") -> Any:
    """Paths of values without content, save for those whose presence is the meaning."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner is None or (inner in ({}, []) and key not in ("emptyDir", "namespaceSelector")):
                yield f"{path}.{key}"
            yield from _nothings(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nothings(inner, f"{path}[{index}]")


def test_equal_input_gives_equal_text() -> None:
    assert json.dumps(children()) == json.dumps(children())


def test_no_two_children_have_one_name() -> None:
    everything = children(("spec.decode.replicas", 2), ("spec.prefill.replicas", 2), ("spec.router.replicas", 2))
    keys = [(child["kind"], child["metadata"]["name"]) for child in everything]
    assert len(keys) == len(set(keys))


def test_without_an_image_there_can_be_no_pods() -> None:
    with pytest.raises(SpecError, match=r"spec\.engine\.image\n +is required in a cluster") as caught:
        render_children(deployment(), CONTEXT)
    assert caught.value.name == "qwen"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_statefulset(role: str) -> None:
    spec = one("StatefulSet", f"qwen-{role}", (f"spec.{role}.replicas", 3))["spec"]
    selector = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": role}
    assert spec["replicas"] == 3
    assert spec["serviceName"] == f"qwen-{role}"
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["minReadySeconds"] == 10
    assert spec["selector"] == {"matchLabels": selector}
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    assert selector.items() <= spec["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("role", "kind"), [("prefill", "StatefulSet"), ("decode", "StatefulSet"), ("router", "Deployment")]
)
def test_an_autoscalers_replicas_are_never_sent(role: str, kind: str) -> None:
    number: Edit = (f"spec.{role}.replicas", 7)
    assert one(kind, f"qwen-{role}", number)["spec"]["replicas"] == 7
    assert "replicas" not in one(kind, f"qwen-{role}", number, (f"spec.{role}.scaling", "External"))["spec"]


@pytest.mark.parametrize(
    ("strategy", "rendered"),
    [
        ({"type": "OnDelete"}, {"type": "OnDelete"}),
        ({"maxUnavailable": 2}, {"type": "RollingUpdate", "rollingUpdate": {"partition": 0, "maxUnavailable": 2}}),
        ({"partition": 0}, {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}),
        ({"partition": 1, "maxUnavailable": 2},
         {"type": "RollingUpdate", "rollingUpdate": {"partition": 1, "maxUnavailable": 2}}),
    ],
)  # fmt: skip
def test_update_strategy(strategy: dict[str, Any], rendered: dict[str, Any]) -> None:
    spec = one("StatefulSet", "qwen-decode", ("spec.decode.updateStrategy", strategy))["spec"]
    assert spec["updateStrategy"] == rendered


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_headless_service(role: str) -> None:
    spec = one("Service", f"qwen-{role}")["spec"]
    assert spec["clusterIP"] == "None"
    assert [(port["name"], port["port"]) for port in spec["ports"]] == [("http", 8000), ("nixl", 5600)]


def test_router_service() -> None:
    service = {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}, "sessionAffinity": "ClientIP"}
    manifest = one("Service", "qwen-router", ("spec.router.service", service))
    assert manifest["metadata"]["annotations"] == {"a": "b"}
    assert manifest["spec"] == {
        "type": "LoadBalancer",
        "selector": {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "router"},
        "ports": [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP"}],
        "sessionAffinity": "ClientIP",
    }
    assert one("Service", "qwen-router")["spec"]["ports"][0]["port"] == 80


@pytest.mark.parametrize(
    ("edits", "budgets"),
    [
        ([], []),
        ([("spec.decode.replicas", 0)], []),
        ([("spec.decode.replicas", 2)], ["qwen-decode"]),
        ([("spec.prefill.replicas", 2), ("spec.router.replicas", 2)], ["qwen-prefill", "qwen-router"]),
        ([("spec.decode.replicas", 2), ("spec.decode.podDisruptionBudget", "Disabled")], []),
        ([("spec.router.replicas", 2), ("spec.router.podDisruptionBudget", "Disabled")], []),
        ([("spec.decode.scaling", "External")], ["qwen-decode"]),
        ([("spec.router.scaling", "External")], ["qwen-router"]),
    ],
)
def test_budgets_never_block_the_drain_of_a_single_pod(edits: list[Edit], budgets: list[str]) -> None:
    assert names_of("PodDisruptionBudget", *edits) == budgets


def test_budget() -> None:
    spec = one("PodDisruptionBudget", "qwen-decode", ("spec.decode.replicas", 2))["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"]["matchLabels"]["pdserving.dev/role"] == "decode"


def test_the_router_may_see_pods_of_its_namespace_and_nothing_else() -> None:
    assert one("Role", "qwen-router")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    binding = one("RoleBinding", "qwen-router")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "qwen-router", "namespace": "default"}]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "qwen-router"}


def test_engines_accept_their_router_and_each_other() -> None:
    spec = one("NetworkPolicy", "qwen-engines")["spec"]
    roles = [{"key": "pdserving.dev/role", "operator": "In", "values": ["prefill", "decode"]}]
    engines = {"matchLabels": {"pdserving.dev/pddeployment": "qwen"}, "matchExpressions": roles}
    router = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "router"}
    assert spec == {
        "podSelector": engines,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": router}}], "ports": [{"protocol": "TCP", "port": 8000}]},
            {"from": [{"podSelector": engines}]},
        ],
    }


def test_monitoring_may_read_metrics_only() -> None:
    edits: list[Edit] = [("spec.networkPolicy.monitoringNamespaces", ["monitoring"])]
    source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    engines = one("NetworkPolicy", "qwen-engines", *edits)["spec"]["ingress"]
    assert engines[-1] == {"from": [source], "ports": [{"protocol": "TCP", "port": 8000}]}
    router = one("NetworkPolicy", "qwen-router", *edits)["spec"]["ingress"]
    assert source in router[-1]["from"]
    assert router[-1]["ports"] == [{"protocol": "TCP", "port": 9000}]


@pytest.mark.parametrize(
    ("namespace", "selector"),
    [("", {}), ("operators", {"matchLabels": {"kubernetes.io/metadata.name": "operators"}})],
)
def test_the_routers_admin_port_is_the_operators(namespace: str, selector: dict[str, Any]) -> None:
    context = replace(CONTEXT, operator_namespace=namespace)
    clients, admin = one("NetworkPolicy", "qwen-router", context=context)["spec"]["ingress"]
    assert clients == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert admin["ports"] == [{"protocol": "TCP", "port": 9000}]
    [source] = admin["from"]
    assert source["namespaceSelector"] == selector
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"


def test_policies_can_be_left_to_somebody_else() -> None:
    assert names_of("NetworkPolicy", ("spec.networkPolicy.mode", "Disabled")) == []


def test_policies_follow_the_ports_of_the_hosts_network() -> None:
    rules = one("NetworkPolicy", "qwen-engines", ("spec.engine.hostNetwork", "Enabled"))["spec"]["ingress"]
    assert [port["port"] for port in rules[0]["ports"]] == [8100, 8200]


def test_children_of_the_longest_name_fit() -> None:
    value = PDDeployment.model_validate(smallest() | {"metadata": {"name": "a" * 40}})
    spec = value.spec.model_copy(update={"engine": value.spec.engine.model_copy(update={"image": "r.example/x:1"})})
    for child in render_children(value.model_copy(update={"spec": spec}), CONTEXT):
        assert len(child["metadata"]["name"]) <= 63 - len("-0123456789")
        assert all(len(text) <= 63 for text in child["metadata"]["labels"].values())
