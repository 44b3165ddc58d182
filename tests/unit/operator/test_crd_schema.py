"""From models to structural schemas: each construct, and what is refused because Kubernetes could not check it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from pd_operator.core.cel import rule, text, words
from pd_operator.core.crd_schema import NotStructural, Rule, Schema, structural_schema
from pd_operator.core.spec_pod import Quantity


class Colour(StrEnum):
    RED = "Red"
    BLUE = "Blue"


class Inner(BaseModel):
    """Inner words."""

    name: str = Field(max_length=5, description="Its name.")
    size: int = Field(default=3, ge=1, le=9, description="Its size.")


def schema_of(annotation: Any, **field: Any) -> Schema:
    """The schema of one field of that type."""

    class Holder(BaseModel):
        it: annotation = Field(**field)

    found = structural_schema(Holder)["properties"]["it"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("annotation", "field", "schema"),
    [
        (str, {"max_length": 5}, {"type": "string", "maxLength": 5}),
        (str, {"default": "a", "max_length": 5}, {"type": "string", "maxLength": 5, "default": "a"}),
        (int | None, {"default": None, "ge": 1}, {"type": "integer", "minimum": 1}),
        (Colour, {"default": Colour.RED}, {"type": "string", "enum": ["Red", "Blue"], "default": "Red"}),
        (Literal["v1"], {}, {"type": "string", "enum": ["v1"]}),
        (bool, {"default": True}, {"type": "boolean", "default": True}),
        (
            tuple[str, ...],
            {"default": (), "max_length": 4},
            {
                "type": "array",
                "items": {"type": "string"},
                "maxItems": 4,
                "default": [],
                "x-kubernetes-list-type": "atomic",
            },
        ),
        (
            dict[str, str],
            {"default": {}, "max_length": 4},
            {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 4, "default": {}},
        ),
        (
            Quantity,
            {},
            {
                "x-kubernetes-int-or-string": True,
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "minimum": 0,
                "minLength": 1,
                "maxLength": 32,
                "pattern": r"^[0-9]+(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$",
            },
        ),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),  # the same in each process of a parallel run
)
def test_field(annotation: Any, field: dict[str, Any], schema: Schema) -> None:
    assert schema_of(annotation, **field) == schema


def test_a_model_is_written_out_with_its_words() -> None:
    assert schema_of(Inner) == {
        "description": "Inner words.",
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"description": "Its name.", "type": "string", "maxLength": 5},
            "size": {"description": "Its size.", "type": "integer", "default": 3, "minimum": 1, "maximum": 9},
        },
    }


def test_the_fields_words_win_over_the_models() -> None:
    assert schema_of(Inner, description="Outer words.")["description"] == "Outer words."


def test_a_default_object_is_complete_since_rules_are_tried_on_it() -> None:
    assert schema_of(Inner, default=Inner(name="a"))["default"] == {"name": "a", "size": 3}


def test_a_list_of_named_objects_merges_by_name() -> None:
    found = schema_of(Annotated[tuple[Inner, ...], Field(max_length=3)])
    assert (found["x-kubernetes-list-type"], found["x-kubernetes-list-map-keys"]) == ("map", ["name"])


def test_defaults_can_be_left_out() -> None:
    found = structural_schema(Inner, defaults=False)
    assert "default" not in found["properties"]["size"]


@pytest.mark.parametrize(
    ("annotation", "field", "words"),
    [
        (int, {"default": 480, "ge": 20, "le": 86400}, "Default 480; 20 to 86400."),
        (int | None, {"default": None, "ge": 0, "le": 9}, "From 0 to 9."),
        (bool, {"default": False}, "Default false."),
        (Colour, {"default": Colour.RED}, "Default Red."),
        (str, {"default": "/models", "max_length": 9}, "Default /models."),
        (str, {"default": "", "max_length": 9}, ""),
        (str, {"max_length": 9}, ""),
        (Inner, {"default": Inner(name="a")}, ""),
    ],
)
def test_descriptions_can_end_with_default_and_bounds(annotation: Any, field: dict[str, Any], words: str) -> None:
    class Holder(BaseModel):
        it: annotation = Field(description="It.", **field)

    def said(**how: Any) -> str:
        return str(structural_schema(Holder, **how)["properties"]["it"]["description"])

    assert said(numbers=True) == f"It. {words}".strip()
    assert said() == "It."


def test_rules_are_put_on_every_object_of_their_model() -> None:
    class Outer(BaseModel):
        one: Inner = Field()
        many: tuple[Inner, ...] = Field(max_length=2)

    def rules(model: str, schema: Schema) -> list[Rule]:
        return [rule("self.size > 1", "is small", "size")] if model == "Inner" else []

    found = structural_schema(Outer, rules)
    wanted = [{"rule": "self.size > 1", "message": "is small", "fieldPath": ".size"}]
    assert found["properties"]["one"]["x-kubernetes-validations"] == wanted
    assert found["properties"]["many"]["items"]["x-kubernetes-validations"] == wanted
    assert "x-kubernetes-validations" not in found


@pytest.mark.parametrize(
    ("annotation", "field"),
    [
        (int | str, {}),
        (Any, {}),
        (float, {}),
        (int, {"multiple_of": 5}),
        (dict[str, int | str], {}),
        (dict[str, Any], {}),
        (tuple[int, str], {}),
        (Inner | Colour, {}),
        (int, {"gt": 3}),
    ],
    ids=str,
)
def test_what_a_server_could_not_check_is_refused(annotation: Any, field: dict[str, Any]) -> None:
    with pytest.raises(NotStructural, match=r"^it"):
        schema_of(annotation, **field)


def test_texts_of_cel() -> None:
    assert text('a"b\\') == '"a\\"b\\\\"'
    assert words(["b", "a"]) == '["a", "b"]'
