"""On a fresh machine the first of these tests builds helm, and with it everything else of the embedded cluster."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Room for that."""
    for item in items:
        if "tests/contract/chart" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))
