"""PDDeployments that really serve, on a full embedded cluster: the operator from its chart, real routers, and fake
engines as the engines' image. One namespace per object of this class.

Separate from `operator_lab`, where a test plays the kubelets: here pods run, and what is watched is their identity, the
routers' own view, and what the operator's ServiceAccount has written.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from pdctl.core.cluster.audit import AuditEvent
from pdctl.core.cluster.images import OPERATOR_IMAGE
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving_image import FAKE_IMAGE, TESTS, load_fake_engine
from support.clusters import eventually, make_namespace
from support.pddeployments import edited

SYSTEM_NAMESPACE: Final = "pd-system"
RELEASE: Final = "pd-operator"
OPERATOR_USER: Final = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{RELEASE}"
CHART: Final = TESTS.parent / "charts" / "pd-operator"
PATIENCE: Final = 420.0
"""Seconds for a rollout; it takes 30 on an idle machine."""

ROLES: Final = ("prefill", "decode", "router")
WORKLOADS: Final = {"prefill": "statefulsets", "decode": "statefulsets", "router": "deployments"}
_ROOTS: Final = {
    "pddeployments": "/apis/pdserving.dev/v1alpha1",
    **dict.fromkeys(("statefulsets", "deployments", "replicasets", "controllerrevisions"), "/apis/apps/v1"),
}
QUICK: Final[dict[str, Any]] = {
    "apiVersion": "pdserving.dev/v1alpha1",
    "kind": "PDDeployment",
    "metadata": {"name": "tiny"},
    "spec": {
        "nodeProfile": "CPU",
        "model": {"name": "example/tiny", "servedName": "tiny", "maxModelLen": 65536},
        "engine": {
            "image": FAKE_IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "startupTimeoutSeconds": 600,
            "preStopSeconds": 4,
            "shutdownTimeoutSeconds": 6,
        },
        # P forgets, so that what turn 2 saves comes from D.
        "prefill": {
            "prefixCaching": False,
            "minReadySeconds": 0,
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        },
        "decode": {"minReadySeconds": 0, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}},
        "router": {
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            "timeouts": {"drainSeconds": 20},
        },
    },
}
"""A pair of fake engines whose pods start and end within seconds."""


@dataclass(frozen=True, slots=True)
class Role:
    """One workload and its pods. ``pods``: name → (uid, restarts of all containers); ``revisions``: names of its
    ControllerRevisions or ReplicaSets."""

    uid: str
    generation: int
    resource_version: str
    pods: dict[str, tuple[str, int]]
    revisions: frozenset[str]


class Serving:
    """A namespace with a judge, and the PDDeployments in it. Leaving the context begins the end of all of it."""

    def __init__(self, cluster: EmbeddedCluster, namespace: str) -> None:
        self.cluster, self.namespace, self.api = cluster, namespace, cluster.api
        install_operator(cluster)
        load_fake_engine(cluster)
        self._judge = ""

    def __enter__(self) -> Serving:
        make_namespace(self.api, self.namespace)
        self._judge = self._start_judge()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kubectl("delete", "pdd", "--all", "--wait=false")
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false")

    # --- users ------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin, check=check)

    def get(self, plural: str, name: str) -> dict[str, Any]:
        """An object of the namespace. Raises ApiError."""
        found: dict[str, Any] = self.api.get(f"{self._path(plural)}/{name}")
        return found

    def list(self, plural: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of the namespace, by labels. Raises ApiError."""
        query = f"?labelSelector={quote(selector)}" if selector else ""
        items: list[dict[str, Any]] = self.api.get(self._path(plural) + query)["items"]
        return items

    def _path(self, plural: str) -> str:
        return f"{_ROOTS.get(plural, '/api/v1')}/namespaces/{self.namespace}/{plural}"

    def apply(self, raw: dict[str, Any]) -> None:
        """`kubectl apply -f`."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(raw))

    def start(self, *edits: tuple[str, Any], name: str = "tiny") -> dict[str, Any]:
        """Apply a quick pair with edits; returns what was applied. Ready is somebody else's question."""
        raw = edited(QUICK, ("metadata.name", name), *edits)
        self.apply(raw)
        return raw

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        """`kubectl patch` of the spec."""
        self.kubectl("patch", "pdd", name, "--type", "merge", "-p", json.dumps({"spec": spec}))

    # --- looking ----------------------------------------------------------------------------------

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """A condition on the newest spec, empty when there is none."""
        raw = self.get("pddeployments", name)
        conditions = raw.get("status", {}).get("conditions", [])
        found: dict[str, Any] = next((one for one in conditions if one["type"] == kind), {})
        return found if found.get("observedGeneration") == raw["metadata"]["generation"] else {}

    def until_condition(self, name: str, kind: str, status: str) -> dict[str, Any]:
        """Wait for a verdict on the newest spec."""

        def look() -> dict[str, Any] | None:
            found = self.condition(name, kind)
            return found if found.get("status") == status else None

        try:
            return eventually(f"{kind} of {name} is {status}", look, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def describe(self) -> str:
        """What a person would look at when something does not come."""
        return self.kubectl("get", "pdd,pods,events", "-o", "wide", check=False)

    def pods(self, name: str, role: str | None = None) -> list[dict[str, Any]]:
        """Pods of a PDDeployment that exist, the ending ones with them."""
        selector = f"pdserving.dev/pddeployment={name}" + (f",pdserving.dev/role={role}" if role else "")
        return self.list("pods", selector)

    def role(self, name: str, role: str) -> Role:
        """A workload as it is."""
        workload = self.get(WORKLOADS[role], f"{name}-{role}")
        history = "replicasets" if role == "router" else "controllerrevisions"
        selector = f"pdserving.dev/pddeployment={name},pdserving.dev/role={role}"
        metadata = workload["metadata"]
        return Role(
            metadata["uid"],
            metadata["generation"],
            metadata["resourceVersion"],
            {pod["metadata"]["name"]: (pod["metadata"]["uid"], _restarts(pod)) for pod in self.pods(name, role)},
            frozenset(one["metadata"]["name"] for one in self.list(history, selector)),
        )

    def roles(self, name: str = "tiny") -> dict[str, Role]:
        """All three."""
        return {role: self.role(name, role) for role in ROLES}

    def until_settled(self, name: str = "tiny") -> None:
        """Wait until nothing is under way: all said in the status, every workload rolled out, no pod ending.

        The status is of the latest edit; straight after one the workloads are still as they were.
        """
        for _ in range(2):  # what the workloads do meanwhile may show in the status once more
            self.until_condition(name, "Ready", "True")
            self.until_condition(name, "Progressing", "False")
            for role in ROLES:
                self.until_rolled_out(name, role)

    def until_rolled_out(self, name: str, role: str) -> None:
        """Wait until a workload has exactly the pods that it wants, all of them new and ready."""

        def look() -> bool:
            workload = self.get(WORKLOADS[role], f"{name}-{role}")
            wanted, status = workload["spec"]["replicas"], workload["status"]
            counts = [status.get(key, 0) for key in ("replicas", "readyReplicas", "updatedReplicas")]
            seen = status.get("observedGeneration") == workload["metadata"]["generation"]
            current = status.get("currentRevision") == status.get("updateRevision")
            return seen and current and counts == [wanted] * 3 and len(self.pods(name, role)) == wanted

        try:
            eventually(f"{name}-{role} is rolled out", look, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def service_url(self, name: str = "tiny") -> str:
        """Where clients go."""
        service = self.get("services", f"{name}-router")["spec"]
        return f"http://{service['clusterIP']}:{service['ports'][0]['port']}"

    def router_status(self, name: str = "tiny") -> list[dict[str, Any]]:
        """`/status` of every router pod that is ready and not ending."""
        found = []
        for pod in self.pods(name, "router"):
            if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
                found.append(json.loads(self.fetch(f"http://{pod['status']['podIP']}:9000/status")))
        return found

    def funnel(self, key: str, name: str = "tiny") -> int:
        """A count of the routers' funnel, over all routers that run now."""
        return sum(int(status["funnel"][key]) for status in self.router_status(name))

    def until_engines(self, prefill: int, decode: int, name: str = "tiny") -> None:
        """Wait until every router sees exactly these numbers of engines, all ready, none draining."""
        wanted = {"prefill": prefill, "decode": decode}

        def look() -> bool:
            views = self.router_status(name)
            return bool(views) and all(_counts(view) == wanted for view in views)

        eventually(f"routers see {wanted}", look, PATIENCE)

    def fetch(self, url: str) -> str:
        """GET from inside the cluster's network."""
        argv = ["curl", "-sS", "--fail", "--noproxy", "*", "-m", "20", "--retry", "5", "--retry-all-errors", url]
        return self.cluster.run(self.cluster.inside(argv))

    def run_client(self, *argv: str) -> str:
        """A Python program of the tests, inside the cluster's network."""
        environment = ["env", f"PYTHONPATH={_PATHS}", "NO_PROXY=*"]
        return self.cluster.run(self.cluster.inside([*environment, sys.executable, *argv]))

    # --- the judge --------------------------------------------------------------------------------

    def judgement(self) -> dict[str, Any]:
        """What the judge has to say about every engine so far."""
        found: dict[str, Any] = json.loads(self.fetch(f"http://{self._judge}/report"))
        return found

    def _start_judge(self) -> str:
        labels = {"app": "judge"}
        container = {
            "name": "judge",
            "image": FAKE_IMAGE,
            "command": ["python", "-m", "support.cluster_serving_judge"],
            "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "judge", "labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "judge"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
        }
        self.apply({"apiVersion": "v1", "kind": "List", "items": [pod, service]})
        self.kubectl("wait", "--for=condition=Ready", "pod/judge", "--timeout=300s")
        return f"{self.get('pods', 'judge')['status']['podIP']}:8000"

    # --- the operator -----------------------------------------------------------------------------

    def operator_pods(self) -> list[dict[str, Any]]:
        """Those that are not ending: one, or none for a moment."""
        selector = quote(f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component!=test")
        found = self.api.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector={selector}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def resynced(self, times: int = 1) -> None:
        """Wait for complete looks of the operator that begin after this call, and for what they lead to."""
        before = self._operator_metric("pd_operator_resyncs_total")
        wanted = before + times + 1
        eventually("resyncs", lambda: self._operator_metric("pd_operator_resyncs_total") >= wanted, PATIENCE)
        eventually("operator at rest", lambda: self._operator_metric("pd_operator_waiting") == 0, PATIENCE)

    def operator_writes(self, since: int) -> list[AuditEvent]:
        """What the operator's account wrote or tried to write, anywhere, since a position of the audit log."""
        events = self.cluster.audit_events(since)
        return [event for event in events if event.user == OPERATOR_USER and event.is_write and event.answered]

    def template_writes(self, since: int, name: str = "tiny") -> dict[str, int]:
        """How often the operator wrote each workload of a PDDeployment."""
        writes = [one for one in self.operator_writes(since) if one.namespace == self.namespace]
        return {
            role: sum(one.resource == f"{WORKLOADS[role]}.apps" and one.name == f"{name}-{role}" for one in writes)
            for role in ROLES
        }

    def _operator_metric(self, name: str) -> float:
        [pod] = self.operator_pods()
        text = self.fetch(f"http://{pod['status']['podIP']}:8081/metrics")
        lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    # --- load -------------------------------------------------------------------------------------

    @contextmanager
    def load(self, folder: Path, name: str = "tiny", talks: int = 4) -> Iterator[LoadProcess]:
        """Conversations side by side until the block ends."""
        report = folder / "load.json"
        client = ["-m", "support.cluster_serving_load", "--url", self.service_url(name), "--model", "tiny"]
        client += ["--talks", str(talks), "--report", str(report)]
        environment = ["env", f"PYTHONPATH={_PATHS}", "NO_PROXY=*"]
        argv = self.cluster.inside([*environment, sys.executable, *client])
        with (folder / "load.log").open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield LoadProcess(process, report)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


class LoadProcess:
    """A running load."""

    def __init__(self, process: subprocess.Popen[bytes], report: Path) -> None:
        self._process, self._report = process, report

    def report(self) -> dict[str, Any]:
        """Counts of turns so far, and every error that a client saw."""
        assert self._process.poll() is None, "the load has ended by itself"
        try:
            found: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"errors": []}
        return found

    def more_turns(self, count: int) -> None:
        """Wait for so many more answers; an error of a client ends the wait."""
        wanted = self.report().get("turns", 0) + count

        def look() -> bool:
            report = self.report()
            assert report["errors"] == []
            return bool(report.get("turns", 0) >= wanted)

        eventually(f"{count} more turns", look, PATIENCE)


_PATHS: Final = ":".join(str(TESTS.parent / folder) for folder in ("tests", "connector", "router", "operator", "tools"))


def install_operator(cluster: EmbeddedCluster) -> None:
    """Install the chart with helm, or leave the release as it is, and wait for the operator."""
    registry, tag = OPERATOR_IMAGE.partition("/")[0], OPERATOR_IMAGE.rpartition(":")[2]
    values = {
        "image.registry": registry,
        "image.tag": tag,
        "children.imagePullPolicy": "IfNotPresent",
        # Nobody wants to wait for conditions here, and quiet resyncs are to be proven.
        "operator.routerPollSeconds": "2",
        "operator.resyncSeconds": "2",
    }
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    # The schema allows no resyncs as close as these.
    where = (
        "--skip-schema-validation",
        "--namespace",
        SYSTEM_NAMESPACE,
        "--create-namespace",
        "--wait",
        "--timeout",
        "7m",
    )
    cluster.helm("upgrade", "--install", RELEASE, str(CHART), *where, *settings)


def is_ready(pod: dict[str, Any]) -> bool:
    """Is a pod's condition Ready true? A pod that was just made has no conditions."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


def _restarts(pod: dict[str, Any]) -> int:
    statuses = (pod["status"].get(key, []) for key in ("initContainerStatuses", "containerStatuses"))
    return sum(status["restartCount"] for several in statuses for status in several)


def _counts(view: dict[str, Any]) -> dict[str, int]:
    """Engines by role; -1 for a role of which one is not ready or draining."""
    counts = {"prefill": 0, "decode": 0}
    for engine in view["engines"]:
        counts[engine["role"]] += 1
    for engine in view["engines"]:
        if not engine["ready"] or engine["draining"]:
            counts[engine["role"]] = -1
    return counts
