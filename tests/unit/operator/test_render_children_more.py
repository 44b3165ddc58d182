"""What a platform adds to engines' pods: volumes, claims of devices, a scheduler of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.render_children import RenderContext, render_children
from support.pddeployments import deployment
from support.spec_edits import Edit

CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1")
IMAGE: Edit = ("spec.engine.image", "vllm/vllm-openai:v0.32.0")
BOTH = pytest.mark.parametrize("role", ["prefill", "decode"])


def pod(role: str, *edits: Edit) -> dict[str, Any]:
    """A role's pod spec."""
    [found] = [
        child["spec"]["template"]["spec"]
        for child in render_children(deployment(IMAGE, *edits), CONTEXT)
        if child["kind"] in ("StatefulSet", "Deployment") and child["metadata"]["name"] == f"qwen-{role}"
    ]
    assert isinstance(found, dict)
    return found


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Items of a list that is merged by name."""
    found = {item["name"]: {key: value for key, value in item.items() if key != "name"} for item in items}
    assert len(found) == len(items)
    return found


SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "config map": ({"configMap": {"name": "template"}}, {"configMap": {"name": "template"}}),
    "secret": ({"secret": {"name": "ca"}}, {"secret": {"secretName": "ca"}}),
    "claim": ({"persistentVolumeClaim": {"name": "kernels"}}, {"persistentVolumeClaim": {"claimName": "kernels"}}),
    "space": ({"emptyDir": {}}, {"emptyDir": {}}),
    "bounded space": ({"emptyDir": {"sizeLimitGiB": 5}}, {"emptyDir": {"sizeLimit": "5Gi"}}),
    "folder of the node": ({"hostPath": {"path": "/mnt"}}, {"hostPath": {"path": "/mnt", "type": "Directory"}}),
}


@BOTH
@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES)
def test_a_volume_is_seen_by_the_engine_and_by_its_self_test(
    role: str, case: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    given, rendered = case
    made = pod(role, ("spec.engine.volumes", [{"name": "more", "mountPath": "/more", **given}]))
    assert by_name(made["volumes"])["more"] == rendered
    [engine], (bring, test) = made["containers"], made["initContainers"]
    for container in (engine, test):
        assert by_name(container["volumeMounts"])["more"] == {"mountPath": "/more"}
    assert "more" not in by_name(bring["volumeMounts"])


def test_a_volume_is_mounted_read_only_when_asked() -> None:
    volume = {"name": "more", "mountPath": "/more", "readOnly": True, "emptyDir": {}}
    [engine] = pod("decode", ("spec.engine.volumes", [volume]))["containers"]
    assert by_name(engine["volumeMounts"])["more"] == {"mountPath": "/more", "readOnly": True}


def test_volumes_stand_beside_the_operators_own_and_the_weights() -> None:
    volumes = [{"name": name, "mountPath": f"/{name}", "emptyDir": {}} for name in ("a", "b")]
    made = pod("decode", ("spec.engine.volumes", volumes), ("spec.model.source.emptyDir", {}))
    assert set(by_name(made["volumes"])) == {"shm", "cache", "connector", "model", "a", "b"}


@BOTH
def test_devices_of_a_claim_are_for_the_engine_and_its_self_test(role: str) -> None:
    claims = [
        {"name": "nics", "resourceClaimTemplateName": "efa"},
        {"name": "shared", "resourceClaimName": "one"},
    ]
    edits: list[Edit] = [
        (f"spec.{role}.pod.resourceClaims", claims),
        (f"spec.{role}.resources.limits", {"vpc.amazonaws.com/efa": 0}),
    ]
    made = pod(role, *edits)
    assert made["resourceClaims"] == claims
    [engine], (bring, test) = made["containers"], made["initContainers"]
    for container in (engine, test):
        assert container["resources"]["claims"] == [{"name": "nics"}, {"name": "shared"}]
        assert "vpc.amazonaws.com/efa" not in container["resources"]["limits"]
    assert "claims" not in bring["resources"]
    other = "decode" if role == "prefill" else "prefill"
    assert "resourceClaims" not in pod(other, *edits)


@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
def test_another_scheduler(part: str) -> None:
    assert pod(part, (f"spec.{part}.pod.schedulerName", "volcano"))["schedulerName"] == "volcano"
    assert "schedulerName" not in pod(part)
