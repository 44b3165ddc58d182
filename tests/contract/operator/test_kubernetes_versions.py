"""What is rendered is valid in every Kubernetes version that is supported, without a field that a version lacks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

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
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: path.parent.name)
def test_what_lies_beside_the_examples(path: Path, version: str) -> None:
    documents = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_sample_server_is_the_one_of_the_sample() -> None:
    """Equal names, keys and ports; and what the server says of itself is what handles need."""
    deployment_, service, policy = yaml.safe_load_all((EXAMPLES / "shared-store" / "valkey.yaml").read_text("utf-8"))
    store = example("shared-store")["spec"]["router"]["handleStore"]["valkey"]
    host, port = store["url"].removeprefix("valkey://").split(":")
    assert (service["metadata"]["name"], str(service["spec"]["ports"][0]["port"])) == (host, port)
    pod = deployment_["spec"]["template"]
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= pod["metadata"]["labels"].items()
    secrets = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert [(one["secretName"], [item["key"] for item in one["items"]]) for one in secrets] == [
        (store["passwordSecretRef"]["name"], [store["passwordSecretRef"]["key"]])
    ]
    [command] = pod["spec"]["containers"][0]["args"]
    assert "--maxmemory-policy volatile-ttl" in command
    assert '--save "" --appendonly no' in command


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
