"""For every layer: a skipped test fails the run, and property tests have no deadline.

A skip hides a missing part of the machine, which the project's own files must install; a deadline per example measures
the neighbours on a shared machine and not the code.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a run with skips into a failed one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter is not None else 0
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{skipped} skipped: a skip counts as a failure here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
