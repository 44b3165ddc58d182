"""Folders: the assets that come with this package, the cache of built programs, the state of running clusters."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import pdctl
from pdctl.core.cluster.layout import Layout

ASSETS: Final = Path(pdctl.__file__).parent / "cluster_assets"
GO_SOURCES: Final = ASSETS / "go"
_TRIES: Final = 100


class ClusterError(Exception):
    """Something about an embedded cluster that can't go on, in words for the user."""


def home() -> Path:
    """The user's home folder.

    Raises:
        ClusterError: HOME is set and empty, which would mean the root folder.
    """
    if os.environ.get("HOME") == "":
        raise ClusterError("HOME is empty; set it to a folder that can be written to, or unset it")
    return Path.home()


def cache_folder() -> Path:
    """Built programs; safe to delete while no cluster runs."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "pd-operator" / "cluster"


def state_folder() -> Path:
    """One folder per cluster that is up."""
    base = os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state"
    return Path(base) / "pd-operator" / "cluster"


def layout_of(name: str) -> Layout:
    """Where the cluster of this name lives."""
    return Layout(name, state_folder() / name)


def make_state(layout: Layout) -> None:
    """Make the cluster's own folder.

    Raises:
        FileExistsError: it is there.
        OSError: it can't be made.
    """
    for _ in range(_TRIES):
        # What was the last cluster may be on its way out, and take the folder above along.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            layout.state.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            layout.state.mkdir(mode=0o700)
            return
    layout.state.mkdir(parents=True, mode=0o700)


def read_sources() -> dict[str, bytes]:
    """The Go modules' files: path relative to `GO_SOURCES` → content."""
    return {
        str(path.relative_to(GO_SOURCES)): path.read_bytes() for path in sorted(GO_SOURCES.rglob("*")) if path.is_file()
    }
