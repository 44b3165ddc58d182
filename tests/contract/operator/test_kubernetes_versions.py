"""What is rendered is valid in every Kubernetes version that is supported, without a field that a version lacks."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
import pytest

from pd_operator.core.crd import custom_resource_definition
from pd_operator.core.problems import SpecError
from pd_operator.core.render_children import RenderContext, render_children
from support.pddeployments import EXAMPLES, deployment, edited, example, smallest
from support.spec_edits import IMAGE, TABLE

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1", "Always", ("pull",))
WITHOUT_CLAIMS = ("1.30",)
"""Its claims had another form and were an alpha feature; the field's own words ask for a newer one."""

each_version = pytest.mark.parametrize("version", VERSIONS)


def children(raw: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return render_children(deployment(base=raw), CONTEXT)


@each_version
@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_examples(name: str, version: str) -> None:
    for child in children(example(name)):
        kubernetes_validate.validate(child, version, strict=True)


@each_version
def test_all_fields_at_once(version: str) -> None:
    raw = with_all_fields()
    if version in WITHOUT_CLAIMS:
        raw = edited(raw, *((f"spec.{role}.pod.resourceClaims", []) for role in ("prefill", "decode")))
    for child in children(raw):
        kubernetes_validate.validate(child, version, strict=True)


@functools.cache
def with_all_fields() -> dict[str, Any]:
    """An object with every edit of the table that goes with those before it."""
    raw = edited(smallest(), IMAGE)
    left_out = 0
    for field, value, _, first in TABLE:
        more = edited(raw, *first, (f"spec.{field}", value))
        try:
            deployment(base=more)
        except SpecError:
            left_out += 1
        else:
            raw = more
    assert left_out < len(TABLE) // 4
    return raw


@each_version
def test_the_definition(version: str) -> None:
    kubernetes_validate.validate(custom_resource_definition(), version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    [child, *_] = children(example("cpu-tiny"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**child, "sort": 1}, VERSIONS[-1], strict=True)
