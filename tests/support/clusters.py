"""Embedded clusters for tests: names that tell whose they are, and waiting on what a cluster shows."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdctl.shell.cluster.api import Api, ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster, known_clusters
from pdctl.shell.cluster.start import Wishes

T = TypeVar("T")
_NAME = re.compile(r"t[a-z]*-(?P<pid>[0-9]+)")


def cluster_for_tests(kind: str, wishes: Wishes | None = None) -> EmbeddedCluster:
    """A cluster, not yet up, whose name holds this process's number: test runs side by side don't meet."""
    return EmbeddedCluster(f"t{kind}-{os.getpid()}", wishes, say=lambda text: print(text, file=sys.stderr))


def remove_abandoned() -> None:
    """End clusters of test runs that were killed."""
    for name in known_clusters():
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match['pid']}").exists():
            EmbeddedCluster(name).down()


def eventually(what: str, look: Callable[[], T], seconds: float = 120.0) -> T:
    """Call ``look`` until what it returns is true, and return that; an API error means "not yet".

    The limit is long because it only matters where a test fails.
    """
    deadline = time.monotonic() + seconds
    problem: ApiError | None = None
    while True:
        try:
            if found := look():
                return found
        except ApiError as error:
            problem = error
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s" + (f" ({problem})" if problem else ""))
        time.sleep(0.1)


def make_namespace(api: Api, name: str, labels: dict[str, str] | None = None) -> None:
    """A namespace that is ready for pods: its default service account is there."""
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels or {}}})
    eventually("service account", lambda: exists(api, f"/api/v1/namespaces/{name}/serviceaccounts/default"))


def exists(api: Api, path: str) -> bool:
    """Is there an object? Any refusal but "not found" is an error."""
    try:
        api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True
