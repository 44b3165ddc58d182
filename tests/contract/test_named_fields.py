"""Fields of a PDDeployment and flags that the pages on running it name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pd_operator.core.crd import custom_resource_definition
from pd_router.__main__ import build_parser

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
PAGES = ["observability.md", "runbook.md"]


def exists(path: str) -> bool:
    node: Any = SCHEMA
    for part in path.split("."):
        node = node.get("items", node).get("properties", {}).get(part)
        if node is None:
            return False
    return True


def fields(text: str) -> set[str]:
    return {word.rstrip(".") for word in re.findall(r"`(spec\.[A-Za-z.]+)", text)}


@pytest.mark.parametrize("page", PAGES)
def test_fields_exist(page: str) -> None:
    named = fields((DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > 3
    assert {path for path in named if not exists(path)} == set()


def test_a_wrong_field_would_be_found() -> None:
    assert fields("x `spec.router.tracing.samplingRatio`, `spec.router: {}`") == {
        "spec.router.tracing.samplingRatio",
        "spec.router",
    }
    assert not exists("spec.router.tracing.samplingRatio")
    assert exists("spec.router.tracing.samplingPercent")


def test_flags_of_the_router_exist() -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    text = (DOCS / "observability.md").read_text(encoding="utf-8")
    router = text.partition("## Log")[2]
    named = set(re.findall(r"`(--[a-z-]+)", router)) - {"--otlp-traces-endpoint"}  # vLLM's
    assert {"--log-format", "--otlp-endpoint", "--trace-sampling-ratio"} <= named <= known
