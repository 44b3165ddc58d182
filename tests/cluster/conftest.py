"""One light and one full cluster for the whole session, started when a test first asks for them.

A missing machine part (root, namespaces, cgroups, Go) fails these tests with the reason; they are never skipped.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from pdctl.core.cluster.nodes import NODE_TYPES
from pdctl.shell.cluster.api import Api
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.start import Wishes
from support.clusters import cluster_for_tests, make_namespace, remove_abandoned
from support.definition import define, objects_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a session pays for starting a cluster, on a fresh machine even for building it."""
    for item in items:
        if "tests/cluster" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def no_abandoned_clusters() -> None:
    """A killed run can't clean up after itself."""
    remove_abandoned()


@pytest.fixture(scope="session")
def light_cluster() -> Iterator[EmbeddedCluster]:
    """API server and controllers. Tests keep apart by namespaces of their own."""
    with cluster_for_tests("light", Wishes(light=True)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def full_cluster() -> Iterator[EmbeddedCluster]:
    """Two nodes that look like p5en.48xlarge: whatever a sample asks for is scheduled and started."""
    with cluster_for_tests("full", Wishes(nodes=NODE_TYPES["p5en.48xlarge"])) as cluster:
        yield cluster


@pytest.fixture
def namespace() -> str:
    """A name for a namespace of this test's own."""
    return f"test-{uuid.uuid4().hex[:10]}"


@pytest.fixture(scope="module")
def defined_cluster(light_cluster: EmbeddedCluster) -> EmbeddedCluster:
    """The light cluster, with today's definition of PDDeployment."""
    define(light_cluster)
    return light_cluster


@pytest.fixture
def api(defined_cluster: EmbeddedCluster) -> Api:
    """Its API."""
    return defined_cluster.api


@pytest.fixture
def place(api: Api, namespace: str) -> Iterator[str]:
    """Path of a fresh namespace's PDDeployments."""
    make_namespace(api, namespace)
    yield objects_in(namespace)
    api.request("DELETE", f"/api/v1/namespaces/{namespace}")
