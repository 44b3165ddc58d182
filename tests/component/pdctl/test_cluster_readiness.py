"""Waiting for a cluster's start: a daemon that ends once is started again, one that keeps ending fails the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.core.cluster.layout import Layout
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.readiness import ENDS_FORGIVEN, Waiter


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A cluster that exists on paper, with one node."""
    made = Layout("paper", tmp_path)
    made.node_folder(0).mkdir(parents=True)
    made.logs.mkdir(parents=True)
    (made.logs / "kubelet.log").write_text("no runtime\n")
    return made


def ends(layout: Layout, *names: str) -> None:
    text = "".join(f"{name} ended with 1\n" for name in names)
    (layout.node_folder(0) / "ended").write_text(text)


def wait(layout: Layout) -> None:
    looks = iter((False, False, True))
    Waiter(layout, 1, lambda _text: None).until("something", lambda: next(looks))


def test_a_daemon_that_comes_back_is_forgiven(layout: Layout) -> None:
    ends(layout, *["kubelet"] * ENDS_FORGIVEN, "kube-proxy")
    wait(layout)


def test_a_daemon_that_keeps_ending_fails_the_start_with_its_log(layout: Layout) -> None:
    ends(layout, *["kubelet"] * (ENDS_FORGIVEN + 1))
    with pytest.raises(ClusterError, match=r"(?s)kubelet ended with 1.*kubelet\.log: no runtime"):
        wait(layout)
