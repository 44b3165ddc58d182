"""The custom resource definition on a cluster, and where its objects live."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pd_operator.core.crd import PLURAL
from pd_operator.core.model import API_VERSION
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.clusters import eventually

FILE: Final = Path(__file__).parents[2] / "crds" / "pddeployments.yaml"


def define(cluster: EmbeddedCluster) -> None:
    """Install the committed definition and wait until its kind is served. Harmless when it is there already."""
    cluster.kubectl("apply", "--server-side", "-f", str(FILE))
    eventually("the kind is served", lambda: cluster.api.get(f"/apis/{API_VERSION}/{PLURAL}"))


def objects_in(namespace: str) -> str:
    """Path of a namespace's PDDeployments."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
