"""Requests and limits: how a user's amounts and the profile's come together."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.render_resources import amount, cores, is_device, merged
from pd_operator.core.spec_pod import Resources

REQUESTS = {"cpu": "8", "memory": "50Gi"}
LIMITS = {"memory": "50Gi", "nvidia.com/gpu": "1", "hugepages-2Mi": "640Mi"}
DEVICES = {"nvidia.com/gpu": "1", "hugepages-2Mi": "640Mi"}


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        ("2", 2),
        ("0", 0),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        ("2k", 2000),
        ("3M", 3_000_000),
        ("1Ki", 1024),
        ("2Gi", 2 * 1024**3),
        ("1Ti", 1024**4),
    ],
)
def test_amount(quantity: str, value: int | str) -> None:
    assert amount(quantity) == Decimal(value)


@pytest.mark.parametrize("quantity", ["", "five", "1GB", "-1", "1e3"])
def test_what_is_no_quantity(quantity: str) -> None:
    with pytest.raises(ValueError, match=r"not a quantity|Invalid|ConversionSyntax"):
        amount(quantity)


@pytest.mark.parametrize(
    ("wanted", "requests", "limits"),
    [
        ({}, {**REQUESTS, **DEVICES}, LIMITS),
        ({"requests": {"cpu": 4}}, {**REQUESTS, **DEVICES, "cpu": "4"}, LIMITS),
        # A default limit may not forbid a larger request.
        ({"requests": {"memory": "60Gi"}}, {**REQUESTS, **DEVICES, "memory": "60Gi"}, DEVICES),
        # A default request may not be above a smaller limit; Kubernetes then requests the limit.
        ({"limits": {"memory": "10Gi"}}, {"cpu": "8", **DEVICES}, {**LIMITS, "memory": "10Gi"}),
        ({"limits": {"cpu": 12}}, {**REQUESTS, **DEVICES}, {**LIMITS, "cpu": "12"}),
        # A device is written once, in either place.
        ({"limits": {"nvidia.com/gpu": 2}}, {**REQUESTS, **DEVICES, "nvidia.com/gpu": "2"},
         {**LIMITS, "nvidia.com/gpu": "2"}),
        ({"requests": {"nvidia.com/gpu": 2}}, {**REQUESTS, **DEVICES, "nvidia.com/gpu": "2"},
         {**LIMITS, "nvidia.com/gpu": "2"}),
        ({"limits": {"example.com/nic": 4}}, {**REQUESTS, **DEVICES, "example.com/nic": "4"},
         {**LIMITS, "example.com/nic": "4"}),
        # 0 takes a resource out.
        ({"limits": {"hugepages-2Mi": 0}}, {**REQUESTS, "nvidia.com/gpu": "1"},
         {"memory": "50Gi", "nvidia.com/gpu": "1"}),
        ({"limits": {"nvidia.com/gpu": "0"}}, {**REQUESTS, "hugepages-2Mi": "640Mi"},
         {"memory": "50Gi", "hugepages-2Mi": "640Mi"}),
        ({"requests": {"cpu": 0}}, {"memory": "50Gi", **DEVICES}, LIMITS),
    ],
)  # fmt: skip
def test_merged(wanted: dict[str, Any], requests: dict[str, str], limits: dict[str, str]) -> None:
    assert merged(REQUESTS, LIMITS, Resources.model_validate(wanted)) == {"requests": requests, "limits": limits}


def test_without_anything_there_is_nothing() -> None:
    assert merged({}, {}, Resources()) == {}


quantities = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "example.com/nic", "hugepages-2Mi"]),
    st.integers(0, 100).map(str) | st.integers(1, 100).map(lambda number: f"{number}Gi"),
)


@given(quantities, quantities)
@settings(deadline=None)
def test_what_is_rendered_is_what_kubernetes_accepts(requests: dict[str, str], limits: dict[str, str]) -> None:
    """For every wish that the rules let through: requests within limits, devices equal, nothing at zero."""
    agreed = {
        name: limits[name] if name in limits and (is_device(name) or amount(limits[name]) < amount(value)) else value
        for name, value in requests.items()
    }
    found = merged(REQUESTS, LIMITS, Resources(requests=agreed, limits=limits))
    asked, most = found.get("requests", {}), found.get("limits", {})
    for name in asked.keys() & most.keys():
        assert amount(asked[name]) <= amount(most[name])
    for name in filter(is_device, {**asked, **most}):
        assert asked[name] == most[name]
    assert all(amount(value) > 0 for value in (*asked.values(), *most.values()))


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({}, 1),
        ({"requests": {"cpu": "400m"}}, 1),
        ({"requests": {"cpu": "3"}}, 3),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2500m"}}, 2),
    ],
)
def test_cores(resources: dict[str, dict[str, str]], count: int) -> None:
    assert cores(resources) == count
