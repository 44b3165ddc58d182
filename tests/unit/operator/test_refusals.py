"""One row per rule: a bad edit of the smallest deployment → the YAML path, and words that say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pd_operator.core import rules
from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import SpecError
from support.bad_specs import (
    ARGUMENTS,
    NEIGHBOURS,
    PODS,
    RULES,
    SCHEMA,
    SHARED_ARGUMENTS,
    VARIABLES,
    Edit,
    bad_specs,
    env,
    refused_entry,
)
from support.pddeployments import deployment, edited, smallest


def refusal(edits: list[Edit]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_deployment(edited(smallest(), *edits))
    return caught.value


def assert_refused(edits: list[Edit], path: str, words: str) -> None:
    error = refusal(edits)
    messages = [problem.message for problem in error.problems if problem.path == path]
    assert messages, f"no problem at {path}: {error}"
    assert any(words in message for message in messages), str(error)


@pytest.mark.parametrize(("edits", "path", "words"), [row[1:] for row in SCHEMA], ids=[row[0] for row in SCHEMA])
def test_field_alone(edits: list[Edit], path: str, words: str) -> None:
    assert_refused(edits, path, words)


@pytest.mark.parametrize(("edits", "path", "words"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_fields_together(edits: list[Edit], path: str, words: str) -> None:
    assert_refused(edits, path, words)


@pytest.mark.parametrize(("edits", "path", "words"), [row[1:] for row in PODS], ids=[row[0] for row in PODS])
def test_pod_settings(edits: list[Edit], path: str, words: str) -> None:
    assert_refused(edits, path, words)


@pytest.mark.parametrize("place", ["engine", "prefill", "decode"])
@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=[row[0][0][:40] for row in ARGUMENTS])
def test_argument_that_is_rendered(place: str, arguments: list[str], words: str) -> None:
    path = f"spec.{place}.extraArgs[{refused_entry(arguments)}]"
    assert_refused([(f"spec.{place}.extraArgs", arguments)], path, words)


@pytest.mark.parametrize("place", ["engine", "prefill", "decode"])
def test_word_that_no_flag_takes(place: str) -> None:
    path = f"spec.{place}.extraArgs"
    assert_refused([(path, ["--seed", "1", "other"])], f"{path}[2]", "'other' is no flag and no flag's value")


@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("arguments", SHARED_ARGUMENTS, ids=lambda arguments: arguments[0])
def test_argument_that_both_roles_need(place: str, arguments: list[str]) -> None:
    path = f"spec.{place}.extraArgs"
    assert_refused([(path, arguments)], f"{path}[0]", "both roles need the same; use spec.engine.extraArgs")
    assert arguments[0] in deployment(("spec.engine.extraArgs", arguments)).spec.engine.extra_args


@pytest.mark.parametrize("place", ["engine", "prefill", "decode"])
@pytest.mark.parametrize(("variables", "words"), VARIABLES, ids=[f"{row[0][0]['name']}" for row in VARIABLES])
def test_variable(place: str, variables: list[dict[str, Any]], words: str) -> None:
    assert_refused([(f"spec.{place}.env", variables)], f"spec.{place}.env[0]", words)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT"])
def test_variable_that_both_roles_need(name: str) -> None:
    assert_refused([("spec.decode.env", env(name))], "spec.decode.env[0]", "use spec.engine.env")
    assert deployment(("spec.engine.env", env(name))).spec.engine.env[0].name == name


@pytest.mark.parametrize("edits", [row[1] for row in NEIGHBOURS], ids=[row[0] for row in NEIGHBOURS])
def test_neighbours_of_refused_values_are_accepted(edits: list[Edit]) -> None:
    assert deployment(*edits).spec.model.name == "Qwen/Qwen3-32B"


def test_every_rule_has_a_row_that_it_refuses() -> None:
    parsed = [value for bad in bad_specs() if (value := _without_rules(bad.edits)) is not None]
    silent = [rule.__name__ for rule in rules.RULES if not any(list(rule(value)) for value in parsed)]
    assert silent == []


def _without_rules(edits: list[Edit]) -> PDDeployment | None:
    """The deployment as the rules see it, or None when its fields alone are wrong."""
    try:
        return PDDeployment.model_validate(edited(smallest(), *edits))
    except ValidationError:
        return None
