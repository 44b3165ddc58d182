"""The connector against the scheduler code of the oldest, the installed and the newest supported vLLM release.

The same cases run on each, so a failure that shows on one release only says what moved in it. Cases whose name begins
with `case_stock` show that vLLM's own class still has the fault that a guard is there for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.vllm_sources import fetch
from support.vllm_worker import Worker, case_names

RELEASES = {"0.29.0": "0.29.0", "0.32.0": None, "0.33.0": "0.33.0"}
"""Release -> what to fetch; the installed one needs nothing."""
CASES = [(file, name) for file in sorted(Path(__file__).parent.glob("cases/*.py")) for name in case_names(file)]


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> Iterator[dict[str, Worker]]:
    """One process per release that a selected test wants, all loading at once. The first run downloads two wheels."""
    selected = {item.callspec.params.get("release") for item in request.session.items if hasattr(item, "callspec")}
    started = {
        release: Worker(fetch(wanted) if wanted else None)
        for release, wanted in RELEASES.items()
        if release in selected
    }
    yield started
    for worker in started.values():
        worker.close()


# Loading vLLM takes seconds, and on a busy machine a minute or two.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_the_release_loads(workers: dict[str, Worker], release: str) -> None:
    assert workers[release].version == release


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file.stem}-{name[5:]}" for file, name in CASES])
def test_case(workers: dict[str, Worker], release: str, file: Path, name: str) -> None:
    workers[release].run(file, name)
