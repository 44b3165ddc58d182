"""CEL rules about pods: keys of maps, tolerations, node conditions, resources, update strategies."""

from __future__ import annotations

from typing import Final

from pd_operator.core.cel import Rule, rule, text, words
from pd_operator.core.fields import PATTERN_SENTENCES, QUALIFIED_NAME, RESOURCE_NAME
from pd_operator.core.rules_pod import (
    BYTES,
    CLAIM_SOURCES,
    CONTROLLERS_LABELS,
    HUGE,
    LONG_PREFIX,
    NO_BYTES,
    NO_QUOTA,
    NOT_PAGES,
    NOT_WHOLE,
    OWN_LABELS,
    PART_OF_A_BYTE,
    PREFIX_LIMIT,
    QUOTA,
    RESOURCE_PREFIX_LIMIT,
    SET_FOR_YOU,
    WHOLE,
)

_BOTH: Final = "!has(self.requests) || !has(self.limits)"
_COMPARED: Final = "quantity(string(self.requests[key])).compareTo(quantity(string(self.limits[key])))"
_DEVICE: Final = 'key.contains("/") || key.startsWith("hugepages-")'


def key_rules(field: str) -> list[Rule]:
    """On a map: a structural schema has no word for the form of its keys."""
    if field in ("requests", "limits"):
        names = f"keys must be {PATTERN_SENTENCES[RESOURCE_NAME]}"
        return [
            rule(f"self.all(key, key.matches({text(RESOURCE_NAME)}))", names),
            rule(f"!self.exists(key, key.startsWith({text(QUOTA)}))", NO_QUOTA),
            _short("self.all(key, {})", "key", RESOURCE_PREFIX_LIMIT),
        ]
    form = rule(f"self.all(key, key.matches({text(QUALIFIED_NAME)}))", "keys must be such as name or example.com/name")
    short = _short("self.all(key, {})", "key")
    if field != "labels":
        return [form, short]
    ours = " || ".join(f"key.startsWith({text(prefix)})" for prefix in OWN_LABELS)
    return [form, short, rule(f"!self.exists(key, key in {words(CONTROLLERS_LABELS)} || {ours})", SET_FOR_YOU)]


def _short(where: str, key: str, limit: int = PREFIX_LIMIT, field: str = "") -> Rule:
    return rule(where.format(f'{key}.indexOf("/") <= {limit}'), LONG_PREFIX.format(limit), field)


def toleration_rules() -> list[Rule]:
    """On each toleration."""
    return [
        rule('self.operator != "Exists" || !has(self.value) || self.value == ""',
             "must be left out with operator Exists", "value"),
        rule('self.operator != "Equal" || has(self.key)', "is required with operator Equal", "key"),
        rule('!has(self.tolerationSeconds) || (has(self.effect) && self.effect == "NoExecute")',
             "may be set with effect NoExecute only", "tolerationSeconds"),
        _short("!has(self.key) || {}", "self.key", field="key"),
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
        _short("{}", "self.key", field="key"),
    ]  # fmt: skip


def resources_rules() -> list[Rule]:
    """On requests and limits together."""
    return [
        *(_whole_rules("requests")),
        *(_whole_rules("limits")),
        rule(f"{_BOTH} || self.requests.all(key, !(key in self.limits) || {_COMPARED} <= 0)",
             "must be at most the limit", "requests"),
        rule(f"{_BOTH} || self.requests.all(key, !(key in self.limits) || !({_DEVICE}) || {_COMPARED} == 0)",
             "devices and huge pages must be requested in the amount of their limit, or be left out", "requests"),
    ]  # fmt: skip


def _whole_rules(side: str) -> list[Rule]:
    value = f"string(self.{side}[key])"
    return [
        rule(f"!has(self.{side}) || self.{side}.all(key, !({_DEVICE}) || {value}.matches({text(WHOLE)}))", NOT_WHOLE,
             side),
        rule(f"!has(self.{side}) || self.{side}.all(key, !(key in {words(BYTES)}) || "
             f"!{value}.matches({text(PART_OF_A_BYTE)}))", NO_BYTES, side),
        rule(f"!has(self.{side}) || self.{side}.all(key, !key.startsWith({text(HUGE)}) || "
             f"quantity({value}).asInteger() % quantity(key.substring({len(HUGE)})).asInteger() == 0)",
             NOT_PAGES, side),
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
