"""The models stay within what a structural Kubernetes schema can say, since a definition is generated from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from pd_operator.core.fields import PATTERN_SENTENCES
from pd_operator.core.model import PDDeployment
from pd_operator.core.status_model import Condition

FOREIGN_WORDS = {"Dtype", "Backend", "Device", "NodeProfile"}
"""Enumerations that keep another program's spelling."""

SCHEMA = PDDeployment.model_json_schema(by_alias=True)


def nodes(node: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property with its path; references resolved, `X | None` seen as X, list entries under `[]`."""
    node = resolved(node)
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    for entry in (node.get("additionalProperties"), *node.get("patternProperties", {}).values()):
        if isinstance(entry, dict):
            yield from nodes(entry, f"{path}.*")


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    while True:
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            node = {**SCHEMA["$defs"][name], **{key: value for key, value in node.items() if key != "$ref"}}
        elif "anyOf" in node:
            [only] = [option for option in node["anyOf"] if option.get("type") != "null"]
            node = {**only, **{key: value for key, value in node.items() if key != "anyOf"}}
        else:
            return node


ALL = list(nodes())
SPEC = [(path, node) for path, node in ALL if path.startswith("spec")]


@pytest.mark.parametrize(("path", "node"), ALL, ids=[path for path, _ in ALL])
def test_one_plain_type(path: str, node: dict[str, Any]) -> None:
    assert node.get("type") in {"object", "array", "string", "integer", "boolean"}, node


@pytest.mark.parametrize(("path", "node"), SPEC, ids=[path for path, _ in SPEC])
def test_described_and_bounded(path: str, node: dict[str, Any]) -> None:
    if not path.endswith(("[]", ".*")):
        assert node.get("description"), "becomes documentation"
    match node["type"]:
        case "integer":
            assert node["minimum"] >= 0
            assert node["maximum"] > node["minimum"]
        case "string" if "enum" not in node and "const" not in node:
            assert node["maxLength"] > 0
        case "array":
            assert node["maxItems"] > 0
        case "object" if node.get("additionalProperties") or node.get("patternProperties"):
            assert node["maxProperties"] > 0


def test_names_are_camel_case() -> None:
    for path, _ in ALL:
        for part in re.findall(r"[^.\[\]*]+", path):
            assert re.fullmatch(r"[a-z][A-Za-z0-9]*", part), path


def test_words_are_camel_case() -> None:
    for name, definition in SCHEMA["$defs"].items():
        if "enum" in definition and name not in FOREIGN_WORDS:
            assert all(re.fullmatch(r"[A-Z][A-Za-z0-9]*", word) for word in definition["enum"]), name


WITHOUT_KEY = ("tolerations[]", "nodeMatchExpressions[]")
"""Kubernetes itself has no key for these."""


def test_lists_of_objects_are_keyed_by_name() -> None:
    entries = [(f"{path}[]", resolved(node["items"])) for path, node in ALL if node["type"] == "array"]
    assert entries
    for path, entry in entries:
        keyed = entry["type"] == "string" or "name" in entry.get("required", [])
        assert keyed or path.endswith(WITHOUT_KEY), path


def test_every_pattern_has_a_sentence() -> None:
    patterns = {node["pattern"] for _, node in ALL if "pattern" in node}
    assert patterns <= set(PATTERN_SENTENCES)


TYPE_OF_A_CONDITION = re.compile(Condition.model_json_schema()["properties"]["type"]["pattern"])


@pytest.mark.parametrize("word", ["Ready", "A", "1st", "Pods-Ready.v2_b", "example.com/Audited", "a.b-c.example/x"])
def test_conditions_of_others_may_have_any_type_that_kubernetes_takes(word: str) -> None:
    assert TYPE_OF_A_CONDITION.search(word)


@pytest.mark.parametrize("word", ["", "Ready-", "-Ready", "/Ready", "Example.com/Ready", "a/b/C", "a b", "Ready:Now"])
def test_other_types_of_conditions_are_refused(word: str) -> None:
    assert not TYPE_OF_A_CONDITION.search(word)
