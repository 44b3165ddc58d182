"""PDDeployment objects for tests: the shipped examples, a smallest one, and edits by YAML path."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Final

import yaml

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
REMOVED: Final = object()
"""As the value of an edit: take the field out."""


def example(name: str) -> dict[str, Any]:
    """The raw object in `examples/<name>.yaml`."""
    value = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def smallest() -> dict[str, Any]:
    """The least that a user has to write."""
    return {
        "apiVersion": "pdserving.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": "qwen"},
        "spec": {"model": {"name": "Qwen/Qwen3-32B"}},
    }


def edited(raw: dict[str, Any], *edits: tuple[str, Any]) -> dict[str, Any]:
    """A copy with values set at YAML paths such as `spec.engine.env[0].value`; missing objects on the way are made."""
    result = copy.deepcopy(raw)
    for path, value in edits:
        parts: list[str | int] = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
        here: Any = result
        for part in parts[:-1]:
            here = here[part] if isinstance(part, int) else here.setdefault(part, {})
        if value is REMOVED:
            del here[parts[-1]]
        else:
            here[parts[-1]] = value
    return result


def deployment(*edits: tuple[str, Any], base: dict[str, Any] | None = None) -> PDDeployment:
    """The smallest deployment (or ``base``) with edits, parsed."""
    return parse_deployment(edited(smallest() if base is None else base, *edits))


def flag_table(argv: tuple[str, ...]) -> dict[str, list[str]]:
    """Each flag with its values, in order; fails on a flag that stands twice."""
    table: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if word.startswith("-"):
            assert word not in table, f"{word} stands twice"
            flag = word
            table[flag] = []
        elif flag:
            table[flag].append(word)
    return table
