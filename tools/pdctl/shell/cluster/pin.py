"""Write the go.mod and go.sum files of the cluster's programs anew: `python -m pdctl.shell.cluster.pin`.

For whoever raises a version in `core.cluster.binaries`; nothing else calls it. `k8s.io/kubernetes` can't be required as
it is: its go.mod points to staging folders, so each of those modules is replaced by its published version.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from pdctl.core.cluster.binaries import BINARIES, ETCD_VERSION, HELM_VERSION, KUBERNETES_VERSION
from pdctl.shell.cluster.places import GO_SOURCES

STAGING_VERSION = f"v0.{KUBERNETES_VERSION.partition('.')[2]}"


def main() -> None:
    """All modules that have requirements."""
    _pin_kubernetes()
    _pin_dns()
    _pin_tools("etcd", f"v{ETCD_VERSION}")
    _pin_tools("helm", f"v{HELM_VERSION}")


def _pin_kubernetes() -> None:
    info = json.loads(_go(GO_SOURCES, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES_VERSION}"))
    upstream = Path(info["GoMod"]).read_text(encoding="utf-8")
    staging = re.findall(r"^\s*(k8s\.io/\S+) => \./staging", upstream, re.MULTILINE)
    tools = [binary.package for binary in BINARIES if binary.module == "kubernetes" and "/cmd/" in binary.package]
    lines = [
        *_head("kubernetes", upstream),
        f"require k8s.io/kubernetes v{KUBERNETES_VERSION}",
        *_block("replace", (f"{name} => {name} {STAGING_VERSION}" for name in staging)),
        *_block("tool", tools),
    ]
    _write_and_tidy("kubernetes", lines)


def _pin_dns() -> None:
    """The name server takes the versions of everything that it shares with Kubernetes from there."""
    kubernetes = (GO_SOURCES / "kubernetes" / "go.mod").read_text(encoding="utf-8")
    net = re.search(r"^\s*golang\.org/x/net (\S+)", kubernetes, re.MULTILINE)
    assert net is not None
    staging = (f"k8s.io/{name} {STAGING_VERSION}" for name in ("api", "apimachinery", "client-go"))
    lines = [*_head("dns", kubernetes), *_block("require", (f"golang.org/x/net {net[1]}", *staging))]
    _write_and_tidy("dns", lines)


def _pin_tools(module: str, version: str) -> None:
    """A module that is nothing but another one's programs."""
    folder = GO_SOURCES / module
    (folder / "go.sum").unlink(missing_ok=True)
    (folder / "go.mod").write_text(f"module pdserving.dev/cluster/{module}\n", encoding="utf-8")
    packages = [binary.package for binary in BINARIES if binary.module == module]
    _go(folder, "get", "-tool", *(f"{package}@{version}" for package in packages))


def _head(module: str, upstream: str) -> list[str]:
    version = re.search(r"^go (\S+)", upstream, re.MULTILINE)
    assert version is not None
    return [f"module pdserving.dev/cluster/{module}", "", f"go {version[1]}", ""]


def _block(keyword: str, lines: Iterable[str]) -> list[str]:
    return ["", f"{keyword} (", *(f"\t{line}" for line in lines), ")"]


def _write_and_tidy(module: str, lines: list[str]) -> None:
    folder = GO_SOURCES / module
    (folder / "go.sum").unlink(missing_ok=True)
    (folder / "go.mod").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _go(folder, "mod", "tidy")


def _go(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GOWORK": "off"}
    return subprocess.run(
        ["go", *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
