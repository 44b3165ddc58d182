"""Rendered children on a real API server: taken, kept as they were sent, and within the Pod Security standards.

Only a real server knows its defaults, which empty values it drops, and what it admits.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_operator.core.observed_kinds import kind_named
from pd_operator.core.parse import parse_deployment
from pd_operator.core.render_children import RenderContext, render_children
from pd_operator.core.render_resources import amount
from pdctl.shell.cluster.api import APPLY, Api, ApiError
from support.clusters import make_namespace
from support.pddeployments import EXAMPLES, edited, example, smallest
from support.spec_edits import IMAGE, TABLE, Edit

CONTEXT = RenderContext("", "r.example/pd-router:1", "r.example/pd-connector:1")
NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))]


def child_key(child: dict[str, Any]) -> str:
    return f"{child['kind']} {child['metadata']['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_children_are_accepted_and_applying_them_again_changes_nothing(
    api: Api, place: str, namespace: str, name: str
) -> None:
    raw = edited(example(name), ("metadata.namespace", namespace))
    owner = api.request("POST", place, raw)
    context = RenderContext(owner["metadata"]["uid"], CONTEXT.router_image, CONTEXT.connector_image)
    children = render_children(parse_deployment(owner), context)
    first = [applied(api, child) for child in children]
    second = [applied(api, child) for child in children]
    assert [one["metadata"]["resourceVersion"] for one in second if not status_moves(one)] == [
        one["metadata"]["resourceVersion"] for one in first if not status_moves(one)
    ]
    assert {one["metadata"]["generation"] for one in second if status_moves(one)} == {1}
    for child, stored in zip(children, second, strict=True):
        assert covers(stored, child), f"{child['kind']} {child['metadata']['name']}"


EDGES: list[tuple[str, list[Edit]]] = [
    ("empty variable", [("spec.engine.env", [{"name": "EMPTY", "value": ""}])]),
    ("empty toleration", [("spec.decode.pod.tolerations", [{"key": "a", "value": ""}])]),
    ("no sleep", [("spec.engine.preStopSeconds", 0)]),
    ("no engines", [("spec.decode.replicas", 0), ("spec.prefill.replicas", 0), ("spec.router.replicas", 0)]),
    ("nothing asked for", [("spec.router.resources", {"requests": {"cpu": 0, "memory": 0}, "limits": {"memory": 0}})]),
    ("empty texts", [("spec.router.pod", {"labels": {"a": ""}, "annotations": {"b": ""}, "nodeSelector": {"c": ""}})]),
    ("partition 0", [("spec.decode.updateStrategy", {"partition": 0})]),
    ("ended at once", [("spec.engine.shutdownTimeoutSeconds", 0), ("spec.engine.preStopSeconds", 0)]),
]
"""Zeros and empty texts, which servers like to leave out."""

SETTINGS = [(row[0], [*row[3], (f"spec.{row[0]}", row[1])]) for row in TABLE] + EDGES
BASE = {child_key(child): child for child in render_children(parse_deployment(edited(smallest(), IMAGE)), CONTEXT)}


@pytest.mark.parametrize("edits", [row[1] for row in SETTINGS], ids=[row[0] for row in SETTINGS])
def test_every_field_that_is_sent_is_kept(api: Api, edits: list[Edit]) -> None:
    """A server that dropped one would be sent it again in every pass."""
    for child in render_children(parse_deployment(edited(edited(smallest(), IMAGE), *edits)), CONTEXT):
        if child != BASE.get(child_key(child)):
            metadata = {key: value for key, value in child["metadata"].items() if key != "ownerReferences"}
            sent = {**child, "metadata": metadata}
            assert covers(applied(api, sent, "&dryRun=All"), sent), child_key(child)


def applied(api: Api, child: dict[str, Any], more: str = "") -> Any:
    kind, metadata = kind_named(child["kind"]), child["metadata"]
    assert child["apiVersion"] == kind.api_version
    path = f"{kind.root}/namespaces/{metadata['namespace']}/{kind.plural}/{metadata['name']}"
    query = f"fieldManager=pd-operator&force=true&fieldValidation=Strict{more}"
    return api.request("PATCH", f"{path}?{query}", child, APPLY)


def status_moves(stored: dict[str, Any]) -> bool:
    """Controllers write these objects' status meanwhile."""
    return stored["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget")


def covers(stored: Any, sent: Any) -> bool:
    """Is everything that was sent in what the server keeps? What it drops would be sent in vain each time."""
    if isinstance(sent, dict):
        return isinstance(stored, dict) and all(key in stored and covers(stored[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return len(stored) == len(sent) and all(map(covers, stored, sent))
    return json.dumps(stored) == json.dumps(sent) or same_quantity(stored, sent)


def same_quantity(stored: Any, sent: Any) -> bool:
    """The server writes quantities in its own way: 1024Mi is 1Gi."""
    try:
        return amount(str(stored)) == amount(str(sent))
    except ValueError:
        return False


def pod_of(part: str, *edits: Edit) -> dict[str, Any]:
    """A pod from the template of one part."""
    raw = edited(smallest(), IMAGE, *edits)
    [found] = [
        child["spec"]["template"]
        for child in render_children(parse_deployment(raw), CONTEXT)
        if child["kind"] in ("StatefulSet", "Deployment") and child["metadata"]["labels"]["pdserving.dev/role"] == part
    ]
    # Admission looks for the account first; it is the router's own, made with it.
    spec = {key: value for key, value in found["spec"].items() if key != "serviceAccountName"}
    return {"metadata": {**found["metadata"], "name": part}, "spec": spec}


@pytest.mark.parametrize(
    ("part", "edits", "standard"),
    [
        ("router", [], "restricted"),
        ("prefill", [("spec.engine.securityProfile", "Restricted"), ("spec.engine.runAsUser", 1000)], "restricted"),
        ("decode", [("spec.engine.securityProfile", "Restricted")], "restricted"),
        ("decode", [("spec.nodeProfile", "CPU")], "baseline"),
        ("decode", [], "privileged"),
        ("decode", [("spec.engine.securityProfile", "Privileged")], "privileged"),
    ],
)
def test_pods_pass_the_strictest_standard_that_they_can(
    api: Api, namespace: str, part: str, edits: list[Edit], standard: str
) -> None:
    pod = pod_of(part, *edits)
    admitted = [level for level in ("restricted", "baseline", "privileged") if admits(api, namespace, level, pod)]
    assert admitted[0] == standard


def admits(api: Api, namespace: str, level: str, pod: dict[str, Any]) -> bool:
    """Does a namespace of that Pod Security level take the pod? Any other refusal is an error."""
    name = f"{namespace}-{level}"
    make_namespace(api, name, {"pod-security.kubernetes.io/enforce": level})
    try:
        api.request("POST", f"/api/v1/namespaces/{name}/pods?dryRun=All&fieldValidation=Strict", pod)
    except ApiError as error:
        if "violates PodSecurity" not in str(error):
            raise
        return False
    finally:
        api.request("DELETE", f"/api/v1/namespaces/{name}")
    return True
