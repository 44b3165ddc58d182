"""CEL rules about pods: keys of maps, tolerations, node conditions, resources, update strategies."""

from __future__ import annotations

from typing import Final

from pd_operator.core.cel import Rule, rule, text
from pd_operator.core.fields import QUALIFIED_NAME
from pd_operator.core.rules_pod import CLAIM_SOURCES, OWN_LABELS

_BOTH: Final = "!has(self.requests) || !has(self.limits)"
_COMPARED: Final = "quantity(string(self.requests[key])).compareTo(quantity(string(self.limits[key])))"
_DEVICE: Final = 'key.contains("/") || key.startsWith("hugepages-")'


def key_rules(field: str) -> list[Rule]:
    """On a map: a structural schema has no word for the form of its keys."""
    form = rule(f"self.all(key, key.matches({text(QUALIFIED_NAME)}))", "keys must be such as name or example.com/name")
    if field != "labels":
        return [form]
    ours = " || ".join(f"key.startsWith({text(prefix)})" for prefix in OWN_LABELS)
    return [form, rule(f"!self.exists(key, {ours})", f"keys that begin with {' or '.join(OWN_LABELS)} are set for you")]


def toleration_rules() -> list[Rule]:
    """On each toleration."""
    return [
        rule('self.operator != "Exists" || !has(self.value) || self.value == ""',
             "must be left out with operator Exists", "value"),
        rule('self.operator != "Equal" || has(self.key)', "is required with operator Equal", "key"),
        rule('!has(self.tolerationSeconds) || (has(self.effect) && self.effect == "NoExecute")',
             "may be set with effect NoExecute only", "tolerationSeconds"),
    ]  # fmt: skip


def node_requirement_rules() -> list[Rule]:
    """On each condition on a node's label."""
    some, none = "(has(self.values) && self.values.size() > 0)", "(!has(self.values) || self.values.size() == 0)"
    number = '(has(self.values) && self.values.size() == 1 && self.values[0].matches("^[0-9]+$"))'
    return [
        rule(f'!(self.operator in ["In", "NotIn"]) || {some}', "must not be empty with operator In or NotIn", "values"),
        rule(f'!(self.operator in ["Exists", "DoesNotExist"]) || {none}',
             "must be left out with operator Exists or DoesNotExist", "values"),
        rule(f'!(self.operator in ["Gt", "Lt"]) || {number}', "must be one whole number with operator Gt or Lt",
             "values"),
    ]  # fmt: skip


def resources_rules() -> list[Rule]:
    """On requests and limits together."""
    return [
        rule(f"{_BOTH} || self.requests.all(key, !(key in self.limits) || {_COMPARED} <= 0)",
             "must be at most the limit", "requests"),
        rule(f"{_BOTH} || self.requests.all(key, !(key in self.limits) || !({_DEVICE}) || {_COMPARED} == 0)",
             "devices and huge pages must be requested in the amount of their limit, or be left out", "requests"),
    ]  # fmt: skip


def resource_claim_rules() -> list[Rule]:
    """On a claim of devices."""
    template, claim = (f"has(self.{source})" for source in CLAIM_SOURCES)
    return [rule(f"{template} != {claim}", f"exactly one of {', '.join(CLAIM_SOURCES)} must be set")]


def update_strategy_rules() -> list[Rule]:
    """On an update strategy."""
    return [
        rule(f'self.type != "OnDelete" || !has(self.{field})', "must be left out with type OnDelete", field)
        for field in ("partition", "maxUnavailable")
    ]
