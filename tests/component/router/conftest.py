"""Deployments for router tests: real router process, real sockets, fake engines.

Starting a router costs about a second, so equal specs share one deployment for the whole run, and a test that breaks
engines gives it back healed. Whatever a test does, its deployment must be clean afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.deployment import Deployment, Spec
from support.pod_deployment import PodDeployment

Deploy = Callable[..., Awaitable[Deployment]]

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All router tests run in one event loop, in which the shared engines live."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_deployments() -> AsyncIterator[dict[Spec, Deployment]]:
    """Deployments by spec, started on first use."""
    running: dict[Spec, Deployment] = {}
    yield running
    for deployment in running.values():
        await deployment.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def deploy(shared_deployments: dict[Spec, Deployment]) -> AsyncIterator[Deploy]:
    """``await deploy(spec)`` gives a running deployment.

    ``breaks=True``: the test kills engines or makes them fail often; they are restarted after it. ``fresh=True``: the
    test ends the router, so it gets one of its own.
    """
    used: list[Deployment] = []
    own: list[Deployment] = []
    broken: list[Deployment] = []

    async def make(spec: Spec | None = None, *, breaks: bool = False, fresh: bool = False) -> Deployment:
        spec = spec or Spec()
        if fresh:
            deployment = Deployment(spec)
            own.append(deployment)
            await deployment.start()
        else:
            if spec not in shared_deployments:
                deployment = Deployment(spec)
                await deployment.start()
                shared_deployments[spec] = deployment
            deployment = shared_deployments[spec]
            deployment.reset()
            await deployment.wait_ready(len(deployment.engines))
            await deployment.wait_versions()
            if breaks:
                broken.append(deployment)
        used.append(deployment)
        return deployment

    yield make
    try:
        for deployment in used:
            await deployment.check()
    finally:
        for deployment in own:
            await deployment.stop()
        for deployment in used:
            deployment.reset()
        for deployment in broken:
            await deployment.heal()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_pods() -> AsyncIterator[PodDeployment]:
    deployment = PodDeployment(Spec(prefills=3, decodes=3))
    await deployment.start()
    yield deployment
    await deployment.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def pods(shared_pods: PodDeployment) -> AsyncIterator[PodDeployment]:
    """One pod per role, fresh; clean afterwards."""
    await shared_pods.restore()
    yield shared_pods
    await shared_pods.api.start()
    await shared_pods.check()


@pytest_asyncio.fixture(loop_scope="session")
async def start_pods() -> AsyncIterator[Callable[..., Awaitable[PodDeployment]]]:
    """Deployments of a test's own."""
    made: list[PodDeployment] = []

    async def make(spec: Spec | None = None, **how: Any) -> PodDeployment:
        deployment = PodDeployment(spec or Spec())
        made.append(deployment)
        await deployment.start(**how)
        return deployment

    yield make
    try:
        for deployment in made:
            await deployment.check()
    finally:
        for deployment in made:
            await deployment.stop()
