"""Which programs the cluster needs, from which pinned Go modules, and the key of the folder that holds them.

Separate from building, so that tests and CI can compute the cache key without Go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

KUBERNETES_VERSION: Final = "1.37.2"
ETCD_VERSION: Final = "3.7.3"
HELM_VERSION: Final = "3.22.0"
KEY_LENGTH: Final = 12

_KUBERNETES_STAMPS: Final = (
    f"k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}",
    f"k8s.io/component-base/version.gitMajor={KUBERNETES_VERSION.split('.')[0]}",
    f"k8s.io/component-base/version.gitMinor={KUBERNETES_VERSION.split('.')[1]}",
    "k8s.io/component-base/version.gitTreeState=clean",
    f"k8s.io/client-go/pkg/version.gitVersion=v{KUBERNETES_VERSION}",
)
"""A build from the module proxy knows no git tag; without these the programs report v0.0.0-master."""

_HELM_STAMPS: Final = (
    f"helm.sh/helm/v3/internal/version.version=v{HELM_VERSION}",
    # What `helm template` and `helm lint` take a cluster for; without these it is v1.20.0, which charts may refuse.
    *(
        f"helm.sh/helm/v3/{package}.k8sVersion{part}={number}"
        for package in ("pkg/chartutil", "pkg/lint/rules")
        for part, number in zip(("Major", "Minor"), KUBERNETES_VERSION.split("."), strict=False)
    ),
)


@dataclass(frozen=True, slots=True)
class Binary:
    """One program: ``module`` is the folder of its go.mod below the assets, ``package`` what is built there."""

    name: str
    module: str
    package: str
    stamps: tuple[str, ...] = ()

    @property
    def linker_flags(self) -> str:
        """The value of `-ldflags`."""
        return " ".join(("-s", "-w", *(f"-X {stamp}" for stamp in self.stamps)))


def _kubernetes(name: str) -> Binary:
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_STAMPS)


BINARIES: Final = (
    *(Binary(name, "node", f"./{name}") for name in ("pause", "forward", "hostmounts")),
    Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubectl"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Binary("devplugin", "kubernetes", "./devplugin"),
    Binary("dns", "dns", "."),
    Binary("helm", "helm", "helm.sh/helm/v3/cmd/helm", _HELM_STAMPS),
)
"""In build order: the small ones first, then the API server, which compiles most of what the others share."""


def module_key(module: str, sources: Mapping[str, bytes]) -> str:
    """Changes when the module's sources or the way its programs are built change.

    ``sources`` maps paths relative to the assets' Go folder to contents; those of other modules don't count.
    """
    digest = hashlib.sha256()
    for binary in BINARIES:
        if binary.module == module:
            digest.update(repr(binary).encode())
    for path in sorted(sources):
        if path.startswith(f"{module}/"):
            digest.update(f"{path}\0{len(sources[path])}\0".encode() + sources[path])
    return digest.hexdigest()[:KEY_LENGTH]


def cluster_key(sources: Mapping[str, bytes]) -> str:
    """The key of the whole set of programs."""
    modules = sorted({binary.module for binary in BINARIES})
    joined = "\n".join(f"{module} {module_key(module, sources)}" for module in modules)
    return hashlib.sha256(joined.encode()).hexdigest()[:KEY_LENGTH]
