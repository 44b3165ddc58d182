"""Which edit restarts which pods. Every field of the spec stands in the table; a new one must be placed.

A pod restarts when its template changes, and only then, so that is what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from pd_operator.core.model import PDDeployment, PDDeploymentSpec
from pd_operator.core.problems import field_alias
from pd_operator.core.render_children import RenderContext, cluster_generation, render_children
from support.pddeployments import deployment, edited, smallest

Edit = tuple[str, Any]

IMAGE: Edit = ("spec.engine.image", "r.example/vllm:v0.32.0")
CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1")
SECRET = {"name": "hub", "key": "token"}

P, D, R = "prefill", "decode", "router"
ENGINES = {P, D}
ALL = {P, D, R}
NOBODY: set[str] = set()

CUSTOM: tuple[Edit, ...] = (("spec.nodeProfile", "Custom"), ("spec.customProfile", {}))
UNEQUAL: tuple[Edit, ...] = (("spec.kvTransfer.bidirectional", "Disabled"),)
RESTRICTED: tuple[Edit, ...] = (("spec.engine.securityProfile", "Restricted"),)
LISTED: tuple[Edit, ...] = (("spec.model.source", {"persistentVolumeClaim": {"claimName": "a"}}),)
EMPTY: tuple[Edit, ...] = (("spec.model.source", {"emptyDir": {}}),)

Row = tuple[str, Any, set[str], tuple[Edit, ...]]

TABLE: list[Row] = [
    ("model.name", "Qwen/Qwen3-8B", ALL, ()),
    ("model.servedName", "chat", ALL, ()),
    ("model.revision", "abc", ENGINES, ()),
    ("model.maxModelLen", 4096, ENGINES, ()),
    ("model.dtype", "float16", ENGINES, ()),
    ("model.source.download", "Forbidden", ENGINES, ()),
    ("model.source.tokenSecretRef", SECRET, ENGINES, ()),
    ("model.source.persistentVolumeClaim.claimName", "b", ENGINES, LISTED),
    ("model.source.persistentVolumeClaim.readOnly", True, ENGINES, LISTED),
    ("model.source.emptyDir.sizeLimitGiB", 10, ENGINES, EMPTY),
    ("model.source.hostPath.path", "/mnt/b", ENGINES, (("spec.model.source", {"hostPath": {"path": "/mnt/a"}}),)),
    ("model.source.mountPath", "/weights", ENGINES, EMPTY),
    ("engine.image", "r.example/vllm:v0.33.0", ENGINES, ()),
    ("engine.imagePullPolicy", "Always", ENGINES, ()),
    ("engine.vllmVersion", "0.32.0", ENGINES, ()),
    ("engine.maxNumSeqs", 4, ENGINES, ()),
    ("engine.blockSize", 32, ENGINES, ()),
    ("engine.gpuMemoryUtilizationPercent", 80, ENGINES, ()),
    ("engine.startupTimeoutSeconds", 600, ENGINES, ()),
    ("engine.shutdownTimeoutSeconds", 60, ENGINES, ()),
    ("engine.preStopSeconds", 1, ENGINES, ()),
    ("engine.sharedMemoryGiB", 1, ENGINES, ()),
    ("engine.securityProfile", "Privileged", ENGINES, ()),
    ("engine.runAsUser", 1000, ENGINES, RESTRICTED),
    ("engine.hostNetwork", "Enabled", ENGINES, ()),
    ("engine.selfTest", "Disabled", ENGINES, ()),
    ("engine.extraArgs", ["--enforce-eager"], ENGINES, ()),
    ("engine.env", [{"name": "A", "value": "b"}], ENGINES, ()),
    ("nodeProfile", "CPU", ENGINES, ()),
    ("customProfile.device", "CPU", ENGINES, CUSTOM),
    ("customProfile.acceleratorsPerNode", 4, NOBODY, CUSTOM),
    ("customProfile.defaultBackend", "LIBFABRIC", ENGINES, CUSTOM),
    ("router.replicas", 3, NOBODY, ()),
    ("router.handleStore.maxBytes", 1 << 20, {R}, ()),
    ("router.handleStore.maxEntries", 5, {R}, ()),
    ("router.auth.tenantFrom", "Header", {R}, ()),
    ("router.auth.anonymous", "Allowed", {R}, ()),
    ("router.limits.maxBodyBytes", 2048, {R}, ()),
    ("router.limits.maxInflight", 5, {R}, ()),
    ("router.limits.maxQueue", 5, {R}, ()),
    *((f"router.timeouts.{name}Seconds", 7, {R}, ()) for name in
      ("queue", "connect", "prefill", "pull", "firstByte", "idle", "answer", "drain")),
    ("router.image", "r.example/pd-router:2", {R}, ()),
    ("router.resources.requests", {"cpu": 2}, {R}, ()),
    ("router.resources.limits", {"cpu": 2}, {R}, ()),
    ("router.podDisruptionBudget", "Disabled", NOBODY, ()),
    ("router.service.type", "NodePort", NOBODY, ()),
    ("router.service.port", 8080, NOBODY, ()),
    ("router.service.annotations", {"a": "b"}, NOBODY, ()),
    ("router.service.sessionAffinity", "ClientIP", NOBODY, ()),
    ("kvTransfer.bidirectional", "Disabled", ALL, ()),
    ("kvTransfer.decoderBlocksTTLSeconds", 120, ALL, ()),
    ("kvTransfer.routerTTLSeconds", 60, {R}, ()),
    ("kvTransfer.recomputeThresholdTokens", 128, ALL, ()),
    ("kvTransfer.backend", "LIBFABRIC", ENGINES, CUSTOM),
    ("kvTransfer.connector", "Stock", ENGINES, ()),
    ("kvTransfer.connectorImage", "r.example/pd-connector:2", ENGINES, ()),
    ("kvTransfer.loadFailurePolicy", "Recompute", ENGINES, ()),
    ("kvTransfer.leaseDurationSeconds", 60, ENGINES, ()),
    ("kvTransfer.extraConfig", [{"name": "num_threads", "value": "4"}], ENGINES, ()),
    ("topology.zone", "Any", ENGINES, ()),
    ("topology.hosts", "Any", ENGINES, ()),
    ("networkPolicy.mode", "Disabled", NOBODY, ()),
    ("networkPolicy.monitoringNamespaces", ["monitoring"], NOBODY, ()),
    ("imagePullSecrets", [{"name": "pull"}], ALL, ()),
    *((f"{part}.pod.{name}", value, {part}, ()) for part in (P, D, R) for name, value in (
        ("labels", {"team": "x"}),
        ("annotations", {"a": "b"}),
        ("nodeSelector", {"pool": "x"}),
        ("nodeMatchExpressions", [{"key": "a", "operator": "Exists"}]),
        ("tolerations", [{"key": "a", "operator": "Exists"}]),
        ("priorityClassName", "high"),
        ("runtimeClassName", "nvidia"),
    )),
    *((f"{role}.{name}", value, who and {role}, ()) for role in (P, D) for name, value, who in (
        ("replicas", 4, NOBODY),
        ("scaling", "External", NOBODY),
        ("maxNumSeqs", 2, ALL),
        ("prefixCaching", False, ALL),
        ("extraArgs", ["--enforce-eager"], ALL),
        ("env", [{"name": "A", "value": "b"}], ALL),
        ("resources.requests", {"cpu": 7}, ALL),
        ("resources.limits", {"memory": "500Gi"}, ALL),
        ("pod.serviceAccountName", "engines", ALL),
        ("updateStrategy.type", "OnDelete", NOBODY),
        ("updateStrategy.partition", 1, NOBODY),
        ("updateStrategy.maxUnavailable", 2, NOBODY),
        ("minReadySeconds", 0, NOBODY),
        ("podDisruptionBudget", "Disabled", NOBODY),
    )),
    # Both roles count in the generation, since each reads what the other wrote.
    ("prefill.tensorParallelSize", 2, ENGINES, UNEQUAL),
    ("decode.tensorParallelSize", 2, ENGINES, UNEQUAL),
]  # fmt: skip
"""Field, new value, whose pods restart, and what must be set before."""

ONE_VALUE = {"router.handleStore.type"}
"""Fields that have one legal value today."""


def templates(value: PDDeployment, context: RenderContext = CONTEXT) -> dict[str, Any]:
    """Pod template by role."""
    return {
        child["metadata"]["labels"]["pdserving.dev/role"]: child["spec"]["template"]
        for child in render_children(value, context)
        if child["kind"] in ("StatefulSet", "Deployment")
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    assert before.keys() == after.keys() == {P, D, R}
    return {role for role in before if before[role] != after[role]}


@pytest.mark.parametrize(("field", "value", "who", "first"), TABLE, ids=[row[0] for row in TABLE])
def test_an_edit_restarts(field: str, value: Any, who: set[str], first: tuple[Edit, ...]) -> None:
    before = edited(smallest(), IMAGE, *first)
    after = edited(before, (f"spec.{field}", value))
    assert changed(templates(deployment(base=before)), templates(deployment(base=after))) == who


@pytest.mark.parametrize(("field", "value", "who", "first"), TABLE, ids=[row[0] for row in TABLE])
def test_both_roles_get_a_new_generation_together(
    field: str, value: Any, who: set[str], first: tuple[Edit, ...]
) -> None:
    """A role that restarts alone must keep its generation, or the router would never pair it again."""
    before = deployment(base=edited(smallest(), IMAGE, *first))
    after = deployment(base=edited(smallest(), IMAGE, *first, (f"spec.{field}", value)))
    if cluster_generation(before, CONTEXT) != cluster_generation(after, CONTEXT):
        assert who >= ENGINES


def test_every_field_is_in_the_table() -> None:
    named = {row[0] for row in TABLE} | ONE_VALUE
    assert named == set(leaves(PDDeploymentSpec))


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{field_alias(name, info)}"
        inner = [one for one in (info.annotation, *get_args(info.annotation)) if is_model(one)]
        is_list = get_origin(info.annotation) is tuple
        if inner and not is_list and not path.endswith("tokenSecretRef"):
            yield from leaves(inner[0], f"{path}.")
        else:
            yield path


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ({"uid": "uid-2"}, NOBODY),
        ({"operator_namespace": "operators"}, NOBODY),
        ({"router_image": "r.example/pd-router:2"}, {R}),
        ({"connector_image": "r.example/pd-connector:2"}, ENGINES),
        ({"image_pull_policy": "Always"}, ALL),
        ({"image_pull_secrets": ("pull",)}, ALL),
    ],
)
def test_another_installation_restarts(change: dict[str, Any], who: set[str]) -> None:
    value = deployment(IMAGE)
    assert changed(templates(value), templates(value, replace(CONTEXT, **change))) == who


def test_pinned_images_make_restarts_the_users_choice() -> None:
    value = deployment(
        IMAGE, ("spec.router.image", "r.example/r:1"), ("spec.kvTransfer.connectorImage", "r.example/c:1")
    )
    newer = replace(CONTEXT, router_image="r.example/pd-router:2", connector_image="r.example/pd-connector:2")
    assert changed(templates(value), templates(value, newer)) == NOBODY


def test_a_new_connector_is_a_new_generation() -> None:
    """Proofs of two releases must not meet."""
    value = deployment(IMAGE)
    newer = replace(CONTEXT, connector_image="r.example/pd-connector:2")
    assert cluster_generation(value, CONTEXT) != cluster_generation(value, newer)


def test_the_stock_connector_has_no_image() -> None:
    value = deployment(IMAGE, ("spec.kvTransfer.connector", "Stock"))
    newer = replace(CONTEXT, connector_image="r.example/pd-connector:2")
    assert cluster_generation(value, CONTEXT) == cluster_generation(value, newer)
    assert changed(templates(value), templates(value, newer)) == NOBODY


@pytest.mark.parametrize("edit", [("metadata.labels", {"a": "b"}), ("metadata.annotations", {"a": "b"})])
def test_metadata_of_the_object_restarts_nobody(edit: Edit) -> None:
    assert changed(templates(deployment(IMAGE)), templates(deployment(IMAGE, edit))) == NOBODY


def test_writing_a_default_out_restarts_nobody() -> None:
    spelled = deployment(IMAGE).model_dump(mode="json", by_alias=True)
    assert templates(deployment(base=spelled)) == templates(deployment(IMAGE))
