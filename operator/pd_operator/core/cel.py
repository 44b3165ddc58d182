"""Words of CEL, the language of rules in a custom resource definition: texts, lists of texts, one rule."""

from __future__ import annotations

import json
from collections.abc import Iterable

Rule = dict[str, str]
"""An entry of `x-kubernetes-validations`."""


def rule(expression: str, message: str, field: str = "") -> Rule:
    """One rule; ``field`` is what the error names, seen from the object that the rule is on."""
    return {"rule": expression, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def words(texts: Iterable[str]) -> str:
    """A list of texts, sorted, so that equal sets give equal rules."""
    return "[" + ", ".join(text(one) for one in sorted(texts)) + "]"


def text(value: str) -> str:
    """A text with the same characters; JSON and CEL escape alike."""
    return json.dumps(value)


def compared(quantity: str) -> str:
    """How a quantity compares to nothing: -1, 0 or 1."""
    return f'{quantity}.compareTo(quantity("0"))'
