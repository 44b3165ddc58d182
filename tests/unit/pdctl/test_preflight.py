"""What an interpreter lacks, and what to change."""

from dataclasses import replace

import pytest

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pdctl.core.preflight import EnginePython, engine_python_problems

GOOD = EnginePython("/x/python", "0.32.1+cpu", "1.5.1", True)


def deployment(connector: str = "Verified", version: str | None = None) -> PDDeployment:
    return parse_deployment(
        {
            "apiVersion": "pdserving.dev/v1alpha1",
            "kind": "PDDeployment",
            "metadata": {"name": "x"},
            "spec": {
                "model": {"name": "m"},
                "nodeProfile": "CPU",
                "engine": {"vllmVersion": version},
                "kvTransfer": {"connector": connector},
            },
        }
    )


def test_nothing_is_wrong_with_a_good_one():
    assert engine_python_problems(deployment(), GOOD) == ()
    assert engine_python_problems(deployment(version="0.32.0"), GOOD) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"connector": False}, ("pd_connector is not installed for /x/python", "spec.kvTransfer.connector to Stock")),
        ({"vllm": None}, ("vLLM is not installed", "--engine-python")),
        ({"vllm": "0.28.4"}, ("vLLM 0.28.4", "0.29 to 0.33")),
        ({"vllm": "0.34.0"}, ("vLLM 0.34.0", "0.29 to 0.33")),
        ({"vllm": "unknown"}, ("vLLM unknown", "not supported")),
        ({"nixl": None}, ("NIXL is not installed",)),
    ],
)
def test_each_lack_is_named_with_a_way_out(change, words):
    (problem,) = engine_python_problems(deployment(), replace(GOOD, **change))
    assert all(word in problem for word in words)


def test_another_version_than_the_files_is_named():
    (problem,) = engine_python_problems(deployment(version="0.33.0"), GOOD)
    assert "spec.engine.vllmVersion is 0.33.0 and vLLM 0.32.1+cpu is installed" in problem
    assert "0.32 or leave it out" in problem


def test_the_stock_connector_needs_no_plugin():
    assert engine_python_problems(deployment("Stock"), replace(GOOD, connector=False)) == ()


def test_all_problems_come_at_once():
    assert len(engine_python_problems(deployment(), EnginePython("p", None, None, False))) == 3
