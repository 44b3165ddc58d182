"""pydantic model → structural OpenAPI schema, as a custom resource definition wants it.

Separate from `crd` because it knows Kubernetes' rules for schemas and nothing about PDDeployments. It refuses what such
a schema cannot say instead of leaving it out, so that a model never promises more than an API server checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from pd_operator.core.cel import Rule

Schema = dict[str, Any]
Rules = Callable[[str, Schema], list[Rule]]
"""Name of a model, its schema → `x-kubernetes-validations` of every object of that model."""

ORDER: Final = ("description", "type", "default", "enum", "format", "pattern", "minimum", "maximum")
KEPT: Final = frozenset(
    {
        *ORDER,
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "maxProperties",
        "required",
        "items",
        "properties",
        "additionalProperties",
        "anyOf",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-validations",
    }
)
TYPES: Final = ("object", "array", "string", "integer", "boolean")
DROPPED: Final = frozenset({"title", "$defs", "propertyNames", "uniqueItems"})
"""Said elsewhere, or not sayable: length and pattern of a map's keys become rules."""

INT_OR_STRING: Final = "x-kubernetes-int-or-string"


class NotStructural(ValueError):
    """A model says something that a structural schema cannot."""


def structural_schema(
    model: type[BaseModel], rules: Rules | None = None, *, defaults: bool = True, numbers: bool = False
) -> Schema:
    """The schema of a model's objects.

    Args:
        model: the whole object's model.
        rules: rules per model, by the model's class name.
        defaults: carry default values, so that an API server fills them in.
        numbers: end each description with default and bounds, for `kubectl explain`, which shows neither.

    Raises:
        NotStructural: the model cannot be said, with the path in the message.
    """
    raw = model.model_json_schema(by_alias=True)
    builder = _Builder(raw.get("$defs", {}), rules or (lambda name, schema: []), defaults, numbers)
    return builder.build(raw, model.__name__, "")


class _Builder:
    def __init__(self, definitions: Mapping[str, Schema], rules: Rules, defaults: bool, numbers: bool) -> None:
        self._definitions = definitions
        self._rules = rules
        self._defaults = defaults
        self._numbers = numbers

    def build(self, node: Schema, name: str, path: str) -> Schema:
        """One node with everything below it. ``name`` is its model's, empty for a plain value."""
        node, name = self._resolved(node, name, path)
        self._refuse_unknown_words(node, path)
        if node.get(INT_OR_STRING):
            return _ordered(_int_or_string(node))
        result = {key: value for key, value in node.items() if key in KEPT and key not in ("default", "anyOf")}
        if "const" in node:
            result["enum"] = [node["const"]]
        if result.get("type") not in TYPES:
            raise NotStructural(f"{path or name}: no single type that an API server knows, or a floating-point number")
        self._children(node, result, path)
        self._default(node, result)
        if self._numbers and "description" in result:
            result["description"] += _numbers(result)
        if result["type"] == "array":
            result.setdefault("x-kubernetes-list-type", "map" if _keyed_by_name(result["items"]) else "atomic")
            if result["x-kubernetes-list-type"] == "map":
                result.setdefault("x-kubernetes-list-map-keys", ["name"])
        found = self._rules(name, result) if name else []
        if found:
            result["x-kubernetes-validations"] = [*result.get("x-kubernetes-validations", []), *found]
        return _ordered(result)

    def _resolved(self, node: Schema, name: str, path: str) -> tuple[Schema, str]:
        """References inlined and `X | None` seen as X; what stands beside them wins."""
        while True:
            beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "allOf")}
            if "$ref" in node:
                name = node["$ref"].rpartition("/")[2]
                node = {**self._definitions[name], **beside}
            elif "anyOf" in node:
                options = [option for option in node["anyOf"] if option.get("type") != "null"]
                if len(options) != 1:
                    raise NotStructural(f"{path}: more than one type")
                node = {**options[0], **beside}
            else:
                return node, name

    def _refuse_unknown_words(self, node: Schema, path: str) -> None:
        unknown = set(node) - KEPT - DROPPED - {"const", "patternProperties"}
        if unknown:
            raise NotStructural(f"{path}: {', '.join(sorted(unknown))} cannot be said in a structural schema")

    def _children(self, node: Schema, result: Schema, path: str) -> None:
        if "properties" in node:
            result["properties"] = {
                key: self.build(child, "", f"{path}.{key}" if path else key)
                for key, child in node["properties"].items()
            }
            # `additionalProperties: false` is how a structural schema prunes anyway.
            result.pop("additionalProperties", None)
        elif result["type"] == "object":
            result["additionalProperties"] = self.build(_map_values(node, path), "", f"{path}.*")
        if "items" in node:
            result["items"] = self.build(node["items"], "", f"{path}[]")

    def _default(self, node: Schema, result: Schema) -> None:
        value = node.get("default")
        if not self._defaults or value is None:
            return
        # Written out in full, since rules are tried on a default before the fields' own are filled in.
        result["default"] = _without_nothing(value)


def _numbers(node: Schema) -> str:
    """Default and bounds as a sentence with a space before it, or nothing."""
    default, said = node.get("default"), []
    if isinstance(default, bool | int):
        said = [f"default {json.dumps(default)}"]
    elif isinstance(default, str) and default:
        said = [f"default {default}"]
    if "minimum" in node and "maximum" in node:
        said.append(f"{'' if said else 'from '}{node['minimum']} to {node['maximum']}")
    sentence = "; ".join(said)
    return f" {sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    return [_without_nothing(one) for one in value] if isinstance(value, list) else value


def _map_values(node: Schema, path: str) -> Schema:
    options = [*node.get("patternProperties", {}).values()]
    if isinstance(node.get("additionalProperties"), dict):
        options.append(node["additionalProperties"])
    if len(options) != 1:
        raise NotStructural(f"{path}: values of the map have no single type")
    value: Schema = options[0]
    return value


def _int_or_string(node: Schema) -> Schema:
    kept = {key: value for key, value in node.items() if key in KEPT and key not in ("type", "anyOf", "default")}
    # Numbers of the same kind as the texts that the pattern lets through.
    return {**kept, "minimum": 0, "anyOf": [{"type": "integer"}, {"type": "string"}]}


def _keyed_by_name(entry: Schema) -> bool:
    return entry.get("type") == "object" and "name" in entry.get("required", ())


def _ordered(node: Schema) -> Schema:
    """Words for people first, so that the file reads well; fields stay in the model's order."""
    first: Schema = {key: node[key] for key in ORDER if key in node}
    return {**first, **{key: node[key] for key in sorted(node) if key not in first}}
