"""The fields of a PDDeployment as a page for people, from the same schema that an API server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pd_operator.core.crd import custom_resource_definition

HEADER: Final = """# Fields of a PDDeployment

Generated from the models by `make crds`; do not edit. `kubectl explain pdd.spec` says the same in a terminal. A field
without a default is unset until you set it, or required where it says so.
"""


def reference_text() -> str:
    """The page: one table per block of the spec, then the rules over several fields, then the status."""
    schema = custom_resource_definition(numbers=False)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    parts = [HEADER]
    spec = schema["spec"]
    plain = {name: node for name, node in spec["properties"].items() if "properties" not in node}
    parts.append(_section("spec", {**spec, "properties": plain}))
    parts += [_section(f"spec.{name}", node) for name, node in spec["properties"].items() if "properties" in node]
    parts.append(_section("status", schema["status"]))
    return "\n".join(parts)


def _section(path: str, node: dict[str, Any]) -> str:
    rows = [_row(path, field, one, required) for field, one, required in _fields(node, "")]
    lines = [
        f"## `{path}`",
        "",
        node["description"],
        "",
        "| field | type | default | what |",
        "|---|---|---|---|",
        *rows,
    ]
    rules = [f"- {text}" for text in _rules(node, path)]
    return "\n".join([*lines, *(["", "Refused by the API server:", "", *rules] if rules else []), ""])


def _fields(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field below a node with its path from there, and whether its object must have it."""
    for name, child in node.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield path, child, name in node.get("required", ())
        yield from _fields(child, f"{path}.")
        yield from _fields(child.get("items", {}), f"{path}[].")


def _row(path: str, field: str, node: dict[str, Any], required: bool) -> str:
    default = "required" if required else "" if "properties" in node else _default(node)
    return f"| `{field}` | {_type(node)} | {default} | {_cell(node['description'])} |"


def _default(node: dict[str, Any]) -> str:
    return f"`{json.dumps(node['default'])}`" if node.get("default") not in (None, {}, []) else ""


def _type(node: dict[str, Any]) -> str:
    if "enum" in node:
        return " \\| ".join(f"`{word}`" for word in node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return "amount"
    if node["type"] == "integer":
        return f"integer, {node['minimum']} to {node['maximum']}"
    if node["type"] == "array":
        return f"list of at most {node['maxItems']}"
    if "additionalProperties" in node:
        return f"map of at most {node['maxProperties']}"
    return {"string": "text", "boolean": "true or false", "object": "object"}[node["type"]]


def _rules(node: dict[str, Any], path: str) -> Iterator[str]:
    """Every rule below a node, with the field that it names."""
    for rule in node.get("x-kubernetes-validations", ()):
        yield f"`{path}{rule.get('fieldPath', '')}`: {_cell(rule['message'])}"
    for name, child in node.get("properties", {}).items():
        yield from _rules(child, f"{path}.{name}")
    for inner in (node.get("items"), node.get("additionalProperties")):
        if inner:
            yield from _rules(inner, f"{path}[]")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
