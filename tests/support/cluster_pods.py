"""A deployment whose pods are objects of a real API server. No kubelet: their status is written as one would.

Separate from `PodDeployment`, whose API server is a fake: here are only the differences, so that the same moves can be
made against both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from pdctl.shell.cluster.api import MERGE
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.clusters import make_namespace
from support.deployment import Spec
from support.fake_api_server import Pod
from support.fake_engine import FakeEngine
from support.pod_deployment import PodDeployment

ACCOUNT = "router"
GRACE_SECONDS = 600


class ClusterPods:
    """Puts pods into a namespace, under the names and uids of the test; the server gives its own uids."""

    def __init__(self, cluster: EmbeddedCluster, namespace: str) -> None:
        self._api = cluster.api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._uids: dict[str, str] = {}

    def put(self, pod: Pod) -> None:
        """Create the pod, or make the one of that name equal; another uid is another pod."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if self._uids.get(name, uid) != uid:
            self.delete(name)
        if name not in self._uids:
            self._api.request("POST", self._pods, _created(pod))
            self._uids[name] = uid
        labels = {"metadata": {"labels": pod["metadata"]["labels"]}}
        self._api.request("PATCH", f"{self._pods}/{name}", labels, MERGE)
        self._api.request("PATCH", f"{self._pods}/{name}/status", {"status": _status(pod["status"])}, MERGE)
        if "deletionTimestamp" in pod["metadata"]:
            self._api.request("DELETE", f"{self._pods}/{name}", {"gracePeriodSeconds": GRACE_SECONDS})

    def delete(self, name: str) -> None:
        """Remove the object at once, as the kubelet does when all containers have ended."""
        self._api.request("DELETE", f"{self._pods}/{name}", {"gracePeriodSeconds": 0})
        del self._uids[name]

    async def stop(self) -> None:
        """The server is somebody else's."""


def _created(pod: Pod) -> dict[str, Any]:
    containers = [{**container, "image": "none"} for container in pod["spec"]["containers"]]
    metadata = {"name": pod["metadata"]["name"], "labels": pod["metadata"]["labels"]}
    # Bound to a node that nobody has: otherwise a deletion would remove the pod at once.
    spec = {"nodeName": "nowhere", "terminationGracePeriodSeconds": GRACE_SECONDS, "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _status(status: Mapping[str, Any]) -> dict[str, Any]:
    filler = {"image": "none", "imageID": "", "restartCount": 0, "ready": True}
    containers = [
        {**filler, **item} for item in status["containerStatuses"] if item["state"].get("running") != {"startedAt": "x"}
    ]
    return {"podIP": None, "podIPs": None, **status, "containerStatuses": containers}


class ClusterPodDeployment(PodDeployment):
    """The router uses a service account that may do what the operator's Role for it allows."""

    def __init__(self, spec: Spec, cluster: EmbeddedCluster, namespace: str, verbs: str = "list,watch") -> None:
        super().__init__(spec)
        self.cluster, self.namespace, self._verbs = cluster, namespace, verbs
        self.api = ClusterPods(cluster, namespace)  # type: ignore[assignment]
        self.begun = 0
        """Where the audit log was before."""

    @property
    def user(self) -> str:
        """The router, as the API server's audit log names it."""
        return f"system:serviceaccount:{self.namespace}:{ACCOUNT}"

    async def start(self, *, ready: bool = True, api: bool = True) -> None:
        """Make the namespace and the account, then as always."""
        self.begun = self.cluster.audit_position()
        make_namespace(self.cluster.api, self.namespace)
        kubectl = self.cluster.kubectl
        kubectl("-n", self.namespace, "create", "serviceaccount", ACCOUNT)
        kubectl("-n", self.namespace, "create", "role", ACCOUNT, f"--verb={self._verbs}", "--resource=pods")
        account = f"--serviceaccount={self.namespace}:{ACCOUNT}"
        kubectl("-n", self.namespace, "create", "rolebinding", ACCOUNT, f"--role={ACCOUNT}", account)
        for engine in self.engines:
            await engine.start()
        for engine in (self.prefill, self.decode):
            self.join(engine)
        self.kubeconfig_path.write_text(self._kubeconfig())
        hosts = [word for engine in self.engines for word in ("--allow-handle-host", engine.connector.host)]
        await self.start_router(self.kubeconfig_path, ready=ready, more=hosts)

    def pod(self, engine: FakeEngine, **fields: Any) -> Pod:
        """As always, with one address: a real server allows one per family."""
        return super().pod(engine, **{"ips": [], **fields})

    def _kubeconfig(self) -> str:
        token = self.cluster.kubectl("-n", self.namespace, "create", "token", ACCOUNT).strip()
        authority = base64.b64encode((self.cluster.layout.pki / "ca.crt").read_bytes()).decode()
        here = {"server": self.cluster.api.server, "certificate-authority-data": authority}
        return json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": here}],
                "users": [{"name": "me", "user": {"token": token}}],
            }
        )
