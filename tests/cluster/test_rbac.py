"""The operator may do what it does, and nothing else: it runs with a token of the chart's account, and what it asks for
is read from the API server's audit log and compared with its role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator.core.observed_kinds import CHILD_KINDS, Ref
from pdctl.core.cluster.audit import AuditEvent
from pdctl.shell.cluster.api import MERGE
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.chart_release import Release, refusals
from support.clusters import eventually, make_namespace
from support.operator_lab import Lab
from support.operator_process import OperatorProcess

Right = tuple[str, str]
"""Resource as in the audit log, and verb."""

NOT_IN_THE_LOG: dict[Right, str] = {
    ("pddeployments.pdserving.dev/finalizers", "update"): (
        "asked for by the admission plugin OwnerReferencesPermissionEnforcement when a child with blockOwnerDeletion "
        "is written; an answer within the API server, so not a request"
    ),
}
"""Rights without a request of their own, and why they are needed all the same."""

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture
def lab(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    """A namespace for PDDeployments."""
    made = Lab(light_cluster, namespace, tmp_path)
    yield made
    made.close()


def release_for(lab: Lab, values: dict[str, Any]) -> Release:
    """The chart in a namespace of its own, with the definition that the lab has applied."""
    system = f"{lab.namespace}-system"
    make_namespace(lab.api, system, RESTRICTED)
    release = Release(lab.cluster, system, {**values, "crds": {"install": False}})
    release.install()
    return release


SCOPES: dict[str, Callable[[str], tuple[dict[str, Any], tuple[str, ...]]]] = {
    "cluster": lambda _namespace: ({}, ("--all-namespaces",)),
    "namespaces": lambda namespace: (
        {"watch": {"scope": "Namespaces", "namespaces": [namespace]}},
        ("--namespace", namespace),
    ),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_rights_are_used_and_suffice(
    lab: Lab, tmp_path: Path, scope: Callable[[str], tuple[dict[str, Any], tuple[str, ...]]]
) -> None:
    values, arguments = scope(lab.namespace)
    release = release_for(lab, values)
    try:
        begun = lab.cluster.audit_position()
        kubeconfig = release.token_kubeconfig(tmp_path)
        with OperatorProcess(kubeconfig, tmp_path / "operator.log", *arguments, "--resync", "3") as operator:
            live_through(lab, operator)
            assert operator.metric("pd_operator_resyncs_total") > 0
            health = operator.health()
        events = [one for one in lab.cluster.audit_events(begun) if one.user == release.account]
        assert health[0] == 200
        # With the scope of a cluster it also sees what other tests left in namespaces that are going, where a server
        # answers 403 to whatever would be created.
        own = [one for one in events if one.namespace in ("", lab.namespace)]
        assert refusals(own) == []
        assert granted(release) == used(events) | set(NOT_IN_THE_LOG)
        assert not used(events) & set(NOT_IN_THE_LOG), "in the log after all: the excuse is outdated"
        if "--namespace" in arguments:
            assert {one.namespace for one in events if one.resource} == {lab.namespace}
    finally:
        release.uninstall()
        lab.api.request("DELETE", f"/api/v1/namespaces/{release.namespace}")


def live_through(lab: Lab, operator: OperatorProcess) -> None:
    """Everything that may happen to a PDDeployment and its children."""
    several = [(f"spec.{part}.replicas", 2) for part in ("prefill", "decode", "router")]
    raw = lab.create(*several)
    lab.settled(operator)
    assert len(lab.children()) == 14
    lab.serve()
    # An edit, a scaling by the subresource, a role that an autoscaler takes over.
    lab.create(*several, ("spec.kvTransfer.decoderBlocksTTLSeconds", 300))
    lab.settled(operator)
    lab.cluster.kubectl("scale", "pdd/qwen", "-n", lab.namespace, "--replicas=3")
    lab.settled(operator)
    lab.create(*several, ("spec.decode.scaling", "External"))
    lab.settled(operator)
    # Children of every kind that nothing renders any more, as after an update of the operator that renames them.
    for kind in CHILD_KINDS:
        leave_behind(lab, kind.name, raw)
    lab.resynced(operator)
    eventually("old children are gone", lambda: not any(lab.exists(old(lab, kind.name)) for kind in CHILD_KINDS))
    # An edit by hand, and children that a setting takes away.
    lab.patch(lab.ref("StatefulSet", "qwen-prefill"), {"metadata": {"labels": {"pdserving.dev/role": None}}})
    lab.create(*several, ("spec.networkPolicy.mode", "Disabled"))
    lab.settled(operator)
    lab.delete(lab.ref("PDDeployment"))
    eventually("children are collected", lambda: not lab.children())
    lab.resynced(operator)


def old(lab: Lab, kind: str) -> Ref:
    return lab.ref(kind, "qwen-old")


def leave_behind(lab: Lab, kind: str, owner: dict[str, Any]) -> None:
    """Copy a child to another name."""
    child = next(raw for ref, raw in lab.children().items() if ref.kind == kind)
    metadata = {key: child["metadata"][key] for key in ("labels", "ownerReferences")}
    fields = {key: value for key, value in child.items() if key not in ("metadata", "status")}
    if kind == "Service":
        # Addresses are given out by the server.
        fields["spec"] = {key: value for key, value in fields["spec"].items() if not key.startswith("cluster")}
    if kind in ("StatefulSet", "Deployment"):
        fields["spec"] = {**fields["spec"], "replicas": 0}
    assert metadata["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
    ref = old(lab, kind)
    path = lab.path(ref).rpartition("/")[0]
    lab.api.request("POST", path, {**fields, "metadata": {**metadata, "name": ref.name, "namespace": lab.namespace}})


def granted(release: Release) -> set[Right]:
    """What the operator's roles allow."""
    found: set[Right] = set()
    for one in yaml.safe_load_all(release.manifest()):
        if one and one["kind"] in ("Role", "ClusterRole") and one["metadata"]["name"] == release.name:
            for rule in one["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        plain, slash, sub = resource.partition("/")
                        name = f"{plain}.{group}" if group else plain
                        found |= {(f"{name}{slash}{sub}", verb) for verb in rule["verbs"]}
    return found


def used(events: list[AuditEvent]) -> set[Right]:
    """What was asked for. An apply that has made an object was authorised as a creation, too."""
    found = {(one.resource, one.verb) for one in events if one.resource}
    return found | {(one.resource, "create") for one in events if one.verb == "patch" and one.code == 201}


def test_every_excuse_is_for_a_right_that_the_chart_grants(lab: Lab) -> None:
    release = release_for(lab, {})
    try:
        assert set(NOT_IN_THE_LOG) <= granted(release)
        assert all(NOT_IN_THE_LOG.values())
    finally:
        release.uninstall()
        lab.api.request("DELETE", f"/api/v1/namespaces/{release.namespace}")


def test_a_router_can_only_be_given_what_the_operator_has(lab: Lab, tmp_path: Path) -> None:
    """Without `watch` on pods the API server refuses the router's Role: `escalate` is not granted."""
    values, arguments = SCOPES["namespaces"](lab.namespace)
    release = release_for(lab, values)
    try:
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{lab.namespace}/roles/{release.name}"
        rules = lab.api.get(path)["rules"]
        for rule in rules:
            if "pods" in rule["resources"]:
                rule["verbs"] = ["list"]
        lab.api.request("PATCH", path, {"rules": rules}, MERGE)
        with OperatorProcess(release.token_kubeconfig(tmp_path), tmp_path / "operator.log", *arguments):
            lab.create()
            condition = lab.until_condition("Progressing", "False", "ApplyRefused")
            assert "Role qwen-router" in condition["message"]
            assert "attempting to grant RBAC permissions not currently held" in condition["message"]
            assert not lab.exists(lab.ref("Role", "qwen-router"))
            assert lab.exists(lab.ref("StatefulSet", "qwen-decode")), "one refused child doesn't keep the others back"
    finally:
        release.uninstall()
        lab.api.request("DELETE", f"/api/v1/namespaces/{release.namespace}")


@pytest.mark.parametrize(
    ("role", "verb", "what", "allowed"),
    [
        ("view", "get", "pdd", True),
        ("view", "watch", "pdd", True),
        ("view", "create", "pdd", False),
        ("view", "update", "pdd/scale", False),
        ("edit", "get", "pdd", True),
        ("edit", "create", "pdd", True),
        ("edit", "patch", "pdd", True),
        ("edit", "delete", "pdd", True),
        ("edit", "patch", "pdd/scale", True),
        ("edit", "patch", "pdd/status", False),
        ("edit", "update", "pdd/finalizers", False),
        ("admin", "deletecollection", "pdd", True),
        ("admin", "patch", "pdd/status", False),
    ],
)
def test_people_get_rights_with_their_roles(people: Lab, role: str, verb: str, what: str, allowed: bool) -> None:
    resource, _, sub = what.partition("/")
    words = ["auth", "can-i", verb, resource.replace("pdd", "pddeployments.pdserving.dev")]
    more = [f"--subresource={sub}"] if sub else []
    account = f"--as=system:serviceaccount:{people.namespace}:{role}"
    ask = [*words, *more, "-n", people.namespace, account]
    eventually(
        f"{role} {verb} {what}: {allowed}",
        lambda: people.cluster.kubectl(*ask, check=False).strip() == ("yes" if allowed else "no"),
        30,
    )


@pytest.fixture(scope="module")
def people(light_cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A namespace with an account for each of Kubernetes' own roles, while the chart is installed."""
    folder = tmp_path_factory.mktemp("people")
    lab = Lab(light_cluster, f"people-{folder.name[-4:]}".lower().replace("_", "-"), folder)
    release = release_for(lab, {})
    for role in ("view", "edit", "admin"):
        lab.cluster.kubectl("-n", lab.namespace, "create", "serviceaccount", role)
        account = f"--serviceaccount={lab.namespace}:{role}"
        lab.cluster.kubectl("-n", lab.namespace, "create", "rolebinding", role, f"--clusterrole={role}", account)
    yield lab
    release.uninstall()
    lab.api.request("DELETE", f"/api/v1/namespaces/{release.namespace}")
    lab.close()
