"""The committed definition is the models': generated anew it is the same file, and every word has a reader.

What an API server makes of it is tried in `tests/cluster/test_crd.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator.core.crd import custom_resource_definition
from pd_operator.core.reasons import ConditionType
from pdctl.core.manifests import crd_text
from pdctl.core.reference import reference_text

ROOT = Path(__file__).parents[3]
FILE = ROOT / "crds" / "pddeployments.yaml"

VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]

ALLOWED = {
    "description", "type", "default", "enum", "format", "pattern", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "maxProperties", "required", "items", "properties", "additionalProperties", "anyOf",
    "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip
PAGE = reference_text()
MOST_BYTES = 200_000
"""`kubectl apply` keeps a copy of the object in an annotation, and all annotations share 262144 bytes."""


def nodes(node: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node below spec and status with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}.*")


ALL = [(path, node) for path, node in nodes() if path.startswith(("spec", "status"))]
EVERY_NODE = pytest.mark.parametrize(("path", "node"), ALL, ids=[path for path, _ in ALL])


def test_the_file_is_what_the_models_say() -> None:
    assert FILE.read_text(encoding="utf-8") == crd_text(), "run `make crds`"


def test_the_page_of_fields_is_what_the_models_say() -> None:
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference_text(), "run `make crds`"


@EVERY_NODE
def test_the_page_names_every_field(path: str, node: dict[str, Any]) -> None:
    if path.endswith(("[]", ".*")):
        return
    block, _, field = path.partition(".")
    if block == "spec" and "." in field:
        field = field.partition(".")[2]
    assert f"\n| `{field}` | " in PAGE or f"\n## `{path}`\n" in PAGE


def test_the_object_is_small_enough_for_kubectl_apply() -> None:
    """Which keeps a copy of it, without white space, in an annotation."""
    assert len(json.dumps(custom_resource_definition(), separators=(",", ":"))) < MOST_BYTES


def test_the_text_is_the_object() -> None:
    assert yaml.safe_load(crd_text()) == custom_resource_definition()


@EVERY_NODE
def test_structural(path: str, node: dict[str, Any]) -> None:
    assert set(node) <= ALLOWED
    assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string"))
    assert node.get("type") in (None, "object", "array", "string", "integer", "boolean")


@EVERY_NODE
def test_described_for_explain(path: str, node: dict[str, Any]) -> None:
    if not path.endswith(("[]", ".*")):
        assert node["description"].endswith((".", "?")), "a sentence"


@EVERY_NODE
def test_bounded_so_that_rules_have_a_cost(path: str, node: dict[str, Any]) -> None:
    match node.get("type"):
        case "string" if "enum" not in node:
            assert node["maxLength"] > 0
        case "integer":
            assert node["maximum"] > node["minimum"] >= 0
        case "array":
            assert node["maxItems"] > 0
        case "object" if "additionalProperties" in node:
            assert node["maxProperties"] > 0


@EVERY_NODE
def test_lists_merge_by_name_where_they_have_one(path: str, node: dict[str, Any]) -> None:
    if node.get("type") != "array":
        return
    keys = {"map": ["name"], "atomic": None, "set": None}
    if path == "status.conditions":
        keys["map"] = ["type"]
    assert node.get("x-kubernetes-list-map-keys") == keys[node["x-kubernetes-list-type"]]
    if "name" in node["items"].get("properties", {}):
        assert node["x-kubernetes-list-type"] == "map"


@EVERY_NODE
def test_rules_say_what_is_wrong(path: str, node: dict[str, Any]) -> None:
    for rule in node.get("x-kubernetes-validations", ()):
        assert set(rule) <= {"rule", "message", "fieldPath"}
        assert "\n" not in rule["message"]
        if "fieldPath" in rule:
            assert field_at(node, rule["fieldPath"]) is not None


def field_at(node: dict[str, Any], path: str) -> dict[str, Any] | None:
    here: dict[str, Any] | None = node
    for part in path.removeprefix(".").split("."):
        here = (here or {}).get("properties", {}).get(part)
    return here


def test_every_column_and_path_leads_to_a_field() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"]
        if path.startswith(".metadata"):
            continue
        plain = re.sub(r"\[\?\(@\.type==\"(\w+)\"\)\]", "", path)
        node = SCHEMA
        for part in plain.removeprefix(".").split("."):
            node = node.get("items", node)
            node = node["properties"][part]
        assert node["type"] in ("string", "integer"), path
    for path in VERSION["subresources"]["scale"].values():
        assert field_at(SCHEMA, path) is not None, path


def test_columns_name_conditions_that_exist() -> None:
    text = " ".join(column["jsonPath"] for column in VERSION["additionalPrinterColumns"])
    named = set(re.findall(r"@\.type==\"(\w+)\"", text))
    assert named
    assert named <= {str(one.value) for one in ConditionType}


def test_columns_in_the_order_in_which_people_read_them() -> None:
    shown = [column["name"] for column in VERSION["additionalPrinterColumns"] if not column.get("priority")]
    assert shown == ["Ready", "Model", "Prefill", "Decode", "Router", "Bidirectional", "Age"]


def test_status_has_no_defaults_since_absent_means_not_seen_yet() -> None:
    assert [path for path, node in ALL if path.startswith("status") and "default" in node] == []
