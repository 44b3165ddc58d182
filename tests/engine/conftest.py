"""One pair at a time, shared by all tests that want the same one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.engine_pair import Pairs


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pairs]:
    """The pairs of this run; the last one is stopped at its end."""
    made = Pairs(tmp_path_factory.mktemp)
    yield made
    await made.stop()
