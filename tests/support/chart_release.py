"""A release of the operator's chart on an embedded cluster, installed by the real helm, and the operator as a process
that holds the token of the release's account.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pdctl.core.cluster.audit import AuditEvent
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.charts import CHART, DEVELOPMENT, combined
from support.clusters import eventually, exists, make_namespace
from support.operator_lab import Lab
from support.operator_process import OperatorProcess

DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pddeployments.pdserving.dev"
SERVED = "/apis/pdserving.dev/v1alpha1/pddeployments"
DEFINITION_UNKNOWN = "cannot find RESTMapping for APIVersion pdserving.dev/v1alpha1 Kind PDDeployment"
"""OwnerReferencesPermissionEnforcement learns of a new definition up to half a minute late. Until then it refuses every
child, whatever the rights are, and the operator tries again."""


class Release:
    """``values`` are laid over those of the development images. Nothing is done before `install`.

    The name follows the namespace, since a release has objects of the whole cluster: other tests have releases, too.
    """

    def __init__(
        self, cluster: EmbeddedCluster, namespace: str, values: Mapping[str, Any] | None = None, name: str | None = None
    ) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.name = name or f"pd-operator-{hashlib.sha256(namespace.encode()).hexdigest()[:6]}"
        self.values = combined(DEVELOPMENT, values or {})

    @property
    def account(self) -> str:
        """The operator, as the API server names it in its audit log."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    def install(self, *more: str, chart: Path = CHART) -> str:
        """`helm install`, in a namespace that exists. Returns what helm says, the notes included.

        Raises:
            ClusterError: helm or the API server refuses.
        """
        said = self._helm("install", *more, chart=chart)
        self.until_served()
        return said

    def upgrade(self, values: Mapping[str, Any], *more: str, chart: Path = CHART) -> str:
        """`helm upgrade` with all values given anew."""
        self.values = combined(DEVELOPMENT, values)
        return self._helm("upgrade", *more, chart=chart)

    def uninstall(self) -> str:
        """`helm uninstall`; waits until the objects are gone."""
        return self.cluster.helm("uninstall", self.name, "--namespace", self.namespace, "--wait")

    def until_served(self) -> None:
        """Wait until PDDeployments are served, if the definition is there."""
        if exists(self.cluster.api, DEFINITION):
            eventually("definition is served", lambda: exists(self.cluster.api, SERVED))

    def manifest(self) -> str:
        """What helm has applied, as YAML."""
        return self.cluster.helm("get", "manifest", self.name, "--namespace", self.namespace)

    def token_kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig with a token of the operator's account and nothing else."""
        token = self.cluster.kubectl("-n", self.namespace, "create", "token", self.name).strip()
        authority = base64.b64encode((self.cluster.layout.pki / "ca.crt").read_bytes()).decode("ascii")
        path = folder / "account.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": self.cluster.api.server, "certificate-authority-data": authority}}
            ],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config), encoding="ascii")
        return path

    def _helm(self, command: str, *more: str, chart: Path) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(self.values, file)
            file.flush()
            where = ("--namespace", self.namespace, "--values", file.name)
            return self.cluster.helm(command, self.name, str(chart), *where, *more)


class TenantLab(Lab):
    """A lab where the chart has brought the definition, in whatever version; ``labels`` are the namespace's."""

    def __init__(
        self, cluster: EmbeddedCluster, namespace: str, folder: Path, labels: dict[str, str] | None = None
    ) -> None:
        # Not the base class's: that one applies the definition of this checkout.
        self.cluster, self.namespace, self._folder = cluster, namespace, folder
        self.api = cluster.api
        self._processes: list[OperatorProcess] = []
        make_namespace(self.api, namespace, labels)


def refusals(events: Iterable[AuditEvent]) -> list[AuditEvent]:
    """Those that were refused for want of a right."""
    return [one for one in events if one.code in (401, 403) and DEFINITION_UNKNOWN not in one.message]


def without_definition(cluster: EmbeddedCluster) -> None:
    """Remove the definition, and with it every PDDeployment, as on a cluster that never had it."""
    cluster.kubectl("delete", "crd", "pddeployments.pdserving.dev", "--ignore-not-found", "--timeout=120s")
    eventually("definition is gone", lambda: not exists(cluster.api, DEFINITION))
