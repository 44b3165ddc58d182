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
from support.spec_edits import ALL, BY_HEADER, ENGINES, IMAGE, NOBODY, SHARED, TABLE, D, Edit, P, R

CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1")
NOT_ALONE = {"router.auth.tenantFrom", "router.handleStore.type"}
"""Fields that only change together with another."""


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


@pytest.mark.parametrize(
    ("field", "value"), [("decoderBlocksTTLSeconds", 300), ("routerTTLSeconds", 60), ("recomputeThresholdTokens", 7)]
)
def test_without_reuse_its_limits_restart_nothing(field: str, value: int) -> None:
    off = ("spec.kvTransfer.bidirectional", "Disabled")
    edit = (f"spec.kvTransfer.{field}", value)
    assert changed(templates(deployment(IMAGE, off)), templates(deployment(IMAGE, off, edit))) == NOBODY
    assert changed(templates(deployment(IMAGE)), templates(deployment(IMAGE, edit))) != NOBODY


def test_another_source_of_tenants_restarts_routers() -> None:
    value = deployment(IMAGE)
    assert changed(templates(value), templates(deployment(IMAGE, BY_HEADER))) == {R}


def test_another_store_restarts_routers() -> None:
    value = deployment(IMAGE)
    assert changed(templates(value), templates(deployment(IMAGE, SHARED))) == {R}


def test_every_field_is_in_the_table() -> None:
    named = {row[0] for row in TABLE} | NOT_ALONE
    assert named == set(leaves(PDDeploymentSpec))


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{field_alias(name, info)}"
        inner = [one for one in (info.annotation, *get_args(info.annotation)) if is_model(one)]
        is_list = get_origin(info.annotation) is tuple
        if inner and not is_list and not path.lower().endswith("secretref"):
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
