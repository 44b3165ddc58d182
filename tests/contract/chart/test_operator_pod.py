"""The operator's pod as the chart makes it fits the program: flags, variables, ports, labels, and what it may do."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed_kinds import CHILD_KINDS, DEPLOYMENTS, EVENTS, PODS
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_policies import OPERATOR_LABELS
from pd_operator.core.render_router_objects import ADMIN_PORT, router_access
from pd_operator.shell.options import Options, parse_options
from support.charts import combined, only, render
from support.pddeployments import deployment

TEAMS = {"watch": {"scope": "Namespaces", "namespaces": ["team-a", "team-b"]}}


def container(*sets: dict[str, Any]) -> dict[str, Any]:
    [found] = only(render(*sets), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def options(*sets: dict[str, Any]) -> Options:
    """What the program makes of the pod's arguments and variables."""
    made = container(*sets)
    assert made["command"] == ["pd-operator"]
    environment = {one["name"]: one.get("value", "from-the-pod") for one in made["env"]}
    return parse_options(made["args"], environment)


def test_the_defaults_are_the_programs_own() -> None:
    registry = "registry.example.com/team"
    assert options() == Options(
        router_image=f"{registry}/pd-router:0.1.0",
        connector_image=f"{registry}/pd-connector:0.1.0",
        operator_namespace="from-the-pod",
        identity="pd-system/pd-operator",
    )


def test_every_setting_reaches_the_program() -> None:
    settings = {
        "resyncSeconds": 60, "routerPollSeconds": 5, "workers": 3, "requestTimeoutSeconds": 10, "logFormat": "plain",
        "verbose": True,
    }  # fmt: skip
    children = {"imagePullPolicy": "Always", "imagePullSecrets": ["one", "two"]}
    digest = f"sha256:{'a' * 64}"
    images = {"image": {"tag": "next"}, "routerImage": {"registry": "other:5000"}, "connectorImage": {"digest": digest}}
    found = options(TEAMS, {"operator": settings, "children": children}, images)
    assert found == Options(
        router_image="other:5000/pd-router:next",
        connector_image=f"registry.example.com/team/pd-connector@{digest}",
        image_pull_policy="Always",
        image_pull_secrets=("one", "two"),
        operator_namespace="from-the-pod",
        identity="pd-system/pd-operator",
        namespaces=("team-a", "team-b"),
        resync=60,
        router_poll=5,
        workers=3,
        request_timeout=10,
        verbose=True,
        log_format="plain",
    )


def test_its_namespace_comes_from_the_pod_itself() -> None:
    [found] = [one for one in container()["env"] if one["name"] == "PD_OPERATOR_NAMESPACE"]
    assert found["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


@pytest.mark.parametrize("sets", [(), (TEAMS,)])
def test_ports_and_probes_are_where_the_program_listens(sets: tuple[dict[str, Any], ...]) -> None:
    made, found = container(*sets), options(*sets)
    ports = {one["name"]: one["containerPort"] for one in made["ports"]}
    assert ports == {"health": found.health[1], "metrics": found.metrics[1]}
    assert found.health[0] == found.metrics[0] == "0.0.0.0"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert made[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    service = only(render(*sets), "Service")
    assert {one["name"]: one["port"] for one in service["spec"]["ports"]} == ports


def test_one_operator_at_a_time() -> None:
    spec = only(render(), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert not [one for one in render() if one["kind"] == "PodDisruptionBudget"], "it would only block node drains"


def test_labels_are_those_that_routers_let_in_and_selectors_find() -> None:
    objects = render({"podLabels": {"a": "b"}})
    template = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert template.items() >= OPERATOR_LABELS.items()
    assert template.items() >= only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items()
    assert template.items() >= only(objects, "Service")["spec"]["selector"].items()


def test_selectors_find_no_child_of_a_deployment_and_nothing_that_changes_with_a_release() -> None:
    selector = only(render(), "Deployment")["spec"]["selector"]["matchLabels"]
    child = deployment(("metadata.name", "pd-operator"), ("spec.engine.image", "x"))
    for made in router_access(child, RenderContext("u", "r", "c")):
        assert not made["metadata"]["labels"].items() >= selector.items()
    assert not set(selector) & {"app.kubernetes.io/version", "helm.sh/chart"}


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_are_locked_down(kind: str) -> None:
    made = only(render(), kind)
    pod = made["spec"]["template"]["spec"] if kind == "Deployment" else made["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is (kind == "Deployment")
    for one in pod["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "cpu" not in one["resources"]["limits"]
        assert one["resources"]["requests"]["memory"]


# --- rights -----------------------------------------------------------------------------------------------------------

CHILD_VERBS = ("get", "list", "watch", "create", "patch", "delete")
Right = tuple[str, str, str]


def rights(role: dict[str, Any]) -> set[Right]:
    """Group, resource and verb of each right."""
    found: list[Right] = []
    for rule in role["rules"]:
        assert not set(rule) - {"apiGroups", "resources", "verbs"}
        found += [(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]]
    assert len(found) == len(set(found)), "a right stands twice"
    return set(found)


def wanted_rights() -> set[Right]:
    """From the operator's own table of kinds."""
    group, plural = DEPLOYMENTS.group, DEPLOYMENTS.plural
    return {
        *((kind.group, kind.plural, verb) for kind in CHILD_KINDS for verb in CHILD_VERBS),
        *((group, plural, verb) for verb in ("list", "watch")),
        (group, f"{plural}/status", "patch"),
        (group, f"{plural}/finalizers", "update"),
        *((PODS.group, PODS.plural, verb) for verb in ("list", "watch")),
        *((EVENTS.group, EVENTS.plural, verb) for verb in ("list", "create")),
    }


def operator_role(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in objects if one["kind"] == "ClusterRole" and one["metadata"]["name"] == "pd-operator")


def test_the_role_is_what_the_operators_table_of_kinds_needs() -> None:
    assert rights(operator_role(render())) == wanted_rights()


def test_there_is_a_role_in_each_namespace_and_none_for_the_cluster() -> None:
    objects = render(TEAMS)
    roles = {one["metadata"]["namespace"]: rights(one) for one in objects if one["kind"] == "Role"}
    assert roles == dict.fromkeys(("team-a", "team-b"), wanted_rights())
    bindings = [one for one in objects if one["kind"] == "RoleBinding"]
    assert [one["metadata"]["namespace"] for one in bindings] == ["team-a", "team-b"]
    for one in bindings:
        [subject] = one["subjects"]
        assert (subject["namespace"], subject["name"]) == ("pd-system", "pd-operator")
    names = [one["metadata"]["name"] for one in objects if one["kind"].startswith("ClusterRole")]
    assert names == ["pd-operator-edit", "pd-operator-view"] or names == ["pd-operator-view", "pd-operator-edit"]


def test_a_router_gets_nothing_that_the_operator_has_not() -> None:
    child = deployment(("spec.engine.image", "x"))
    [role] = [made for made in router_access(child, RenderContext("u", "r", "c")) if made["kind"] == "Role"]
    assert rights(role) <= wanted_rights()


def test_no_wildcard_no_secret_no_escalation() -> None:
    for sets in ((), (TEAMS,)):
        for one in render(*sets):
            if one["kind"] in ("Role", "ClusterRole"):
                for _group, resource, verb in rights(one):
                    assert "*" not in (resource, verb)
                    assert resource not in ("secrets", "clusterroles", "clusterrolebindings", "namespaces")
                    assert verb not in ("escalate", "bind", "impersonate")


def test_people_get_rights_by_aggregation() -> None:
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    found = {}
    for one in render():
        to = {key.removeprefix(aggregate) for key in one["metadata"]["labels"] if key.startswith(aggregate)}
        if to:
            found[one["metadata"]["name"]] = (to, {verb for _group, _resource, verb in rights(one)})
    assert found == {
        "pd-operator-view": ({"view", "edit", "admin"}, {"get", "list", "watch"}),
        "pd-operator-edit": ({"edit", "admin"}, {"create", "update", "patch", "delete", "deletecollection"}),
    }


def test_the_account_exists_and_is_the_pods() -> None:
    for values in ({}, {"serviceAccount": {"name": "chosen"}}, {"fullnameOverride": "op"}):
        objects = render(values)
        account = only(objects, "ServiceAccount")["metadata"]["name"]
        assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account
        [subject] = only(objects, "ClusterRoleBinding")["subjects"]
        assert subject["name"] == account


# --- the operator's own policy ----------------------------------------------------------------------------------------


def test_the_policy_leaves_open_what_the_operator_does() -> None:
    values = {"networkPolicy": {"enabled": True, "apiServer": {"cidrs": ["10.1.0.0/16"], "ports": [6443]}}}
    objects = render(values)
    policy = only(objects, "NetworkPolicy")["spec"]
    template = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert template.items() >= policy["podSelector"]["matchLabels"].items()
    found = options()
    assert [one["port"] for one in policy["ingress"][0]["ports"]] == [found.health[1], found.metrics[1]]
    api, routers = policy["egress"]
    assert api == {
        "ports": [{"port": 6443, "protocol": "TCP"}],
        "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    }
    assert [one["port"] for one in routers["ports"]] == [ADMIN_PORT]


def test_the_tests_pod_is_let_in_where_readers_are_named() -> None:
    names = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    objects = render(combined({"networkPolicy": {"enabled": True, "metricsFrom": names}}))
    [ingress] = only(objects, "NetworkPolicy")["spec"]["ingress"]
    test = only(objects, "Pod")["metadata"]["labels"]
    assert ingress["from"][0] == names[0]
    assert test.items() >= ingress["from"][1]["podSelector"]["matchLabels"].items()
