"""Raw object → `PDDeployment`, or every problem at once.

Separate from the models because reading is lenient where an API server is (an empty value means "not set"), and because
the cross-field rules run even when some fields are wrong: a person wants one list, not one error per attempt.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import ValidationError

from pd_operator.core import rules
from pd_operator.core.model import API_VERSION, PDDeployment
from pd_operator.core.problems import Location, Problem, SpecError, path_text, problem_of, shown
from pd_wire import names

UnknownFields = Literal["refuse", "ignore"]
_STAND_IN: Final = "stand-in"
MAX_DEPTH: Final = 128
"""Levels of objects and lists that are looked into; a deployment has about ten. Also what ends an object in itself."""


def parse_deployment(value: Any, *, unknown_fields: UnknownFields = "refuse") -> PDDeployment:
    """Read a PDDeployment object as YAML or an API server gives it.

    Args:
        value: the whole object, with apiVersion and kind.
        unknown_fields: "refuse" for files that people write, where an unknown field is a typing error; "ignore" for
            objects from a cluster, which may be newer than this program.

    Raises:
        SpecError: with every problem that could be found.
    """
    if not isinstance(value, Mapping):
        raise SpecError([Problem(path_text(()), f"must be an object with apiVersion, kind, …, got {shown(value)}")])
    raw = _without_nulls(value)
    # A file that was written by `kubectl get -o yaml` has one; it is an answer, never a wish.
    raw.pop("status", None)
    try:
        deployment = _validated(raw, unknown_fields)
    except ValidationError as error:
        problems = [problem_of(detail, PDDeployment) for detail in error.errors(include_url=False)]
        problems += _rule_problems_of_the_rest(raw, error, problems)
        raise SpecError(problems, _name(raw)) from None
    problems = rules.check(deployment)
    if problems:
        raise SpecError(problems, deployment.metadata.name)
    return deployment


def _validated(raw: Mapping[str, Any], unknown_fields: UnknownFields) -> PDDeployment:
    if unknown_fields == "refuse":
        return PDDeployment.model_validate(raw)
    return PDDeployment.model_validate(raw, extra="ignore")


def _without_nulls(value: Any, location: Location = ()) -> Any:
    """Drop keys without a value, as an API server does before it fills in defaults."""
    if len(location) > MAX_DEPTH:
        raise SpecError([Problem(path_text(location[:1]), f"is nested more than {MAX_DEPTH} levels deep")])
    if isinstance(value, Mapping):
        # YAML reads some keys as numbers or booleans; here they are unknown fields like any other.
        return {
            str(key): _without_nulls(item, (*location, str(key))) for key, item in value.items() if item is not None
        }
    if isinstance(value, list | tuple):
        return [_without_nulls(item, (*location, index)) for index, item in enumerate(value)]
    return value


def _rule_problems_of_the_rest(raw: dict[str, Any], error: ValidationError, already: list[Problem]) -> list[Problem]:
    """Run the cross-field rules on what is left when the faulty fields are taken out."""
    rest = copy.deepcopy(raw)
    for detail in error.errors(include_url=False):
        _repair(rest, tuple(detail["loc"]), missing=detail["type"] == "missing")
    try:
        deployment = _validated(rest, "refuse")
    except ValidationError:
        return []
    taken = {problem.path for problem in already}
    return [problem for problem in rules.check(deployment) if problem.path not in taken]


def _repair(rest: dict[str, Any], location: Location, *, missing: bool) -> None:
    """Remove the value at a location (a whole list for one bad entry), or put a stand-in where one is missing."""
    if location[-1] == "[key]":
        location = location[:-1]
    for depth, part in enumerate(location):
        if isinstance(part, int):
            location, missing = location[:depth], False
            break
    parent: Any = rest
    for part in location[:-1]:
        parent = parent.get(part) if isinstance(parent, dict) else None
    if not isinstance(parent, dict):
        return
    last = location[-1]
    if missing or last in ("apiVersion", "kind", "metadata", "name", "model", "spec"):
        parent[last] = _stand_in(str(last))
    else:
        parent.pop(last, None)


def _stand_in(field: str) -> Any:
    known: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": _STAND_IN},
        "model": {"name": _STAND_IN},
        "spec": {"model": {"name": _STAND_IN}},
    }
    return known.get(field, _STAND_IN)


def _name(raw: Mapping[str, Any]) -> str:
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""
