"""What is wrong with a PDDeployment, in words that name the field and the value allowed.

Separate from parsing because both the schema's findings and the cross-field rules end here, and because the same words
go to a terminal and into a condition.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pd_operator.core.choices import NOTES
from pd_operator.core.fields import PATTERN_SENTENCES

SHOWN: Final = 60
"""Longest piece of a user's value that an error repeats."""
LONGEST_KEY: Final = 317
"""Longest key that a path repeats in full: a Kubernetes key with a domain."""

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing to change: the YAML path, and what is wrong with the value allowed in the same sentence."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class SpecError(ValueError):
    """A PDDeployment that may not be started. Holds every problem, in the order of the file's paths."""

    def __init__(self, problems: Iterable[Problem], name: str = "") -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        self.name = name
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.problems)
        what = f"PDDeployment {self.name}" if self.name else "this PDDeployment"
        lines = [f"{count} problem{'s' if count != 1 else ''} in {what}:"]
        for problem in self.problems:
            lines += [f"  {problem.path}", f"      {problem.message}"]
        return "\n".join(lines)


def path_text(location: Location) -> str:
    """`("spec", "decode", "env", 0)` → `spec.decode.env[0]`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        # A key may have any length when no schema limits it.
        name = part if len(part) <= LONGEST_KEY else f"{part[: LONGEST_KEY - 1]}…"
        text += f".{name}" if text else name
    return text or "(the whole document)"


def problem_of(error: ErrorDetails, root: type[BaseModel]) -> Problem:
    """One finding of pydantic as a problem in our words."""
    location = tuple(error["loc"])
    of_key = bool(location) and location[-1] == "[key]"
    if of_key:
        location = location[:-1]
    path = path_text(location)
    if error["type"] == "extra_forbidden":
        return Problem(path, _unknown_field(location, root))
    allowed = allowed_values(_key_annotation(location, root) if of_key else _annotation_at(location, root))
    if of_key:
        return Problem(path, f"the key must be {allowed}, got {shown(error['input'])}")
    if error["type"] == "missing":
        return Problem(path, f"is required: {allowed}")
    quotes = "; put it in quotes" if error["type"] == "string_type" and isinstance(error["input"], int | float) else ""
    return Problem(path, f"must be {allowed}, got {shown(error['input'])}{quotes}")


def shown(value: Any) -> str:
    """A user's value, short and on one line."""
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def allowed_values(annotation: Any) -> str:
    """What a field accepts, as a phrase that follows "must be"."""
    base, constraints = _unwrap(annotation)
    if isinstance(base, type) and issubclass(base, StrEnum):
        note = NOTES.get(base)
        words = _one_of([str(member.value) for member in base])
        return f"{words} ({note})" if note else words
    if get_origin(base) is Literal:
        return _one_of([str(value) for value in get_args(base)])
    if isinstance(base, type) and issubclass(base, BaseModel):
        fields = [field_alias(name, info) for name, info in base.model_fields.items()]
        return f"an object with {', '.join(fields)}"
    if base is bool:
        return "true or false"
    if base is int:
        return _integer_range(constraints)
    if base is str:
        return _text_range(constraints)
    if get_origin(base) is tuple:
        most = constraints.get("max_length")
        return f"a list of at most {most} entries" if most else "a list"
    if get_origin(base) is dict:
        most = constraints.get("max_length")
        return f"an object of at most {most} texts" if most else "an object of texts"
    return "another value"


def _one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else "one of " + ", ".join(words)


def _integer_range(constraints: Mapping[str, Any]) -> str:
    least, most = constraints.get("ge"), constraints.get("le")
    if least is not None and most is not None:
        return f"an integer from {least} to {most}"
    return "an integer"


def _text_range(constraints: Mapping[str, Any]) -> str:
    pattern = constraints.get("pattern")
    what = PATTERN_SENTENCES[pattern] if pattern else "text"
    most = constraints.get("max_length")
    least = " and not empty" if constraints.get("min_length") else ""
    return f"{what} ({f'at most {most} characters' if most else 'any length'}{least})"


def field_alias(name: str, info: FieldInfo) -> str:
    """The name of a field in YAML."""
    return info.alias or name


def _unwrap(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """Take `Annotated` and `| None` off a type and collect the constraints met on the way."""
    constraints: dict[str, Any] = {}
    while True:
        if isinstance(annotation, FieldInfo):
            constraints |= _constraints(annotation.metadata)
            annotation = annotation.annotation
        elif get_origin(annotation) is Annotated:
            for extra in annotation.__metadata__:
                constraints |= _constraints(extra.metadata if isinstance(extra, FieldInfo) else [extra])
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            annotation = next(arg for arg in get_args(annotation) if arg is not NoneType)
        else:
            return annotation, constraints


def _constraints(metadata: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        for name in ("ge", "le", "min_length", "max_length", "pattern"):
            value = getattr(item, name, None)
            if value is not None:
                found[name] = value
    return found


def _annotation_at(location: Location, root: type[BaseModel]) -> Any:
    """The type of the field at a location, with its constraints still attached."""
    current: Any = root
    for part in location:
        base, _ = _unwrap(current)
        if isinstance(base, type) and issubclass(base, BaseModel):
            matches = [info for name, info in base.model_fields.items() if part in (name, field_alias(name, info))]
            if not matches:
                return None
            current = matches[0]
        elif get_origin(base) is tuple:
            current = get_args(base)[0]
        elif get_origin(base) is dict:
            current = get_args(base)[1]
        else:
            return None
    return current


def _key_annotation(location: Location, root: type[BaseModel]) -> Any:
    """The type of the keys of the map that a location's last part lies in."""
    base, _ = _unwrap(_annotation_at(location[:-1], root))
    return get_args(base)[0] if get_origin(base) is dict else None


def _unknown_field(location: Location, root: type[BaseModel]) -> str:
    word = str(location[-1])
    base, _ = _unwrap(_annotation_at(location[:-1], root))
    siblings = [field_alias(name, info) for name, info in base.model_fields.items()]
    near = difflib.get_close_matches(word, siblings, n=1, cutoff=0.7)
    if near:
        return f"unknown field; did you mean {near[0]}?"
    elsewhere = [path for path in _all_paths(root) if path.rpartition(".")[2] == word]
    if elsewhere:
        return f"unknown field here; did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown field; known here: {', '.join(siblings)}"


def _all_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, info in model.model_fields.items():
        path = f"{prefix}{field_alias(name, info)}"
        paths.append(path)
        base, _ = _unwrap(info)
        if get_origin(base) is tuple:
            base, _ = _unwrap(get_args(base)[0])
            path += "[]"
        if isinstance(base, type) and issubclass(base, BaseModel):
            paths += _all_paths(base, f"{path}.")
    return paths
