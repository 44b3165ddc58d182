"""The real operator against a real API server, one namespace per test: what users do, what kubelets would do, and what
the audit log says that the operator has written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from pd_operator.core.observed_kinds import CHILD_KINDS, DEPLOYMENTS, PODS, Kind, Ref, kind_named
from pdctl.core.cluster.audit import AuditEvent
from pdctl.shell.cluster.api import APPLY, MERGE, ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.api_faults import FaultProxy
from support.clusters import eventually, exists, make_namespace
from support.operator_process import ROOT, OperatorProcess
from support.pddeployments import edited, smallest

JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
AGENTS: Final = ("pd-operator", "kopf/")
ADMIN_PORT: Final = 9000


class Lab:
    """A namespace, and everything that a test does in it. `folder` takes logs and kubeconfigs."""

    def __init__(self, cluster: EmbeddedCluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self._folder = cluster, namespace, folder
        self.api = cluster.api
        cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "pddeployments.yaml"))
        served = f"/apis/{DEPLOYMENTS.group}/{DEPLOYMENTS.version}/{DEPLOYMENTS.plural}"
        eventually("definition is served", lambda: exists(self.api, served))
        make_namespace(self.api, namespace)
        self._processes: list[OperatorProcess] = []

    def close(self) -> None:
        """End every operator and start the deletion of the namespace."""
        for process in self._processes:
            process.kill()
        self.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}")

    # --- operators -------------------------------------------------------------------------------

    def operator(self, *arguments: str, url: str | None = None, start: bool = True) -> OperatorProcess:
        """An operator for this namespace only; `url` leads it through a proxy."""
        number = len(self._processes)
        kubeconfig = self.cluster.kubeconfig
        if url is not None:
            kubeconfig = self._folder / f"kubeconfig-{number}"
            kubeconfig.write_text(_kubeconfig(url), encoding="ascii")
        log = self._folder / f"operator-{number}.log"
        process = OperatorProcess(kubeconfig, log, "--namespace", self.namespace, *arguments)
        self._processes.append(process)
        if start:
            process.start()
        return process

    @contextlib.contextmanager
    def proxy(self) -> Iterator[FaultProxy]:
        """A proxy with faults before this cluster's API server, in a thread of its own."""
        tls = ssl.create_default_context(cafile=str(self.cluster.layout.pki / "ca.crt"))
        tls.load_cert_chain(self.cluster.layout.pki / "admin.crt", self.cluster.layout.pki / "admin.key")
        proxy = FaultProxy(self.api.server, tls)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result(30)
        try:
            yield proxy
        finally:
            asyncio.run_coroutine_threadsafe(proxy.__aexit__(), loop).result(30)
            asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()

    # --- users -----------------------------------------------------------------------------------

    def deployment(self, *edits: tuple[str, Any], name: str = "qwen") -> dict[str, Any]:
        """A valid PDDeployment with edits."""
        base = edited(smallest(), ("metadata.namespace", self.namespace), ("metadata.name", name))
        return edited(base, ("spec.engine.image", "vllm/vllm-openai:v0.32.0"), *edits)

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Server-side apply as a user does."""
        path = self.path(Ref(raw["kind"], self.namespace, raw["metadata"]["name"]))
        answer = self.api.request("PATCH", f"{path}?fieldManager=user&force=true", raw, APPLY)
        assert isinstance(answer, dict)
        return answer

    def create(self, *edits: tuple[str, Any], name: str = "qwen") -> dict[str, Any]:
        """Apply a valid PDDeployment."""
        return self.apply(self.deployment(*edits, name=name))

    def patch(self, ref: Ref, patch: Any, content_type: str = MERGE, sub: str = "") -> dict[str, Any]:
        """Edit by hand."""
        answer = self.api.request("PATCH", f"{self.path(ref)}{sub}?fieldManager=kubectl-edit", patch, content_type)
        assert isinstance(answer, dict)
        return answer

    def delete(self, ref: Ref) -> None:
        """Delete in the background, as kubectl does."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self.api.request("DELETE", self.path(ref), options)

    # --- looking ---------------------------------------------------------------------------------

    def ref(self, kind: str, name: str = "qwen") -> Ref:
        """An address in the namespace."""
        return Ref(kind, self.namespace, name)

    def path(self, ref: Ref) -> str:
        """Its path."""
        kind = kind_named(ref.kind)
        return f"{kind.root}/namespaces/{ref.namespace}/{kind.plural}/{ref.name}"

    def get(self, ref: Ref) -> dict[str, Any]:
        """The object."""
        answer = self.api.get(self.path(ref))
        assert isinstance(answer, dict)
        return answer

    def exists(self, ref: Ref) -> bool:
        """Is it there?"""
        return exists(self.api, self.path(ref))

    def list(self, kind: Kind) -> list[dict[str, Any]]:
        """All objects of a kind in the namespace."""
        return list(self.api.get(f"{kind.root}/namespaces/{self.namespace}/{kind.plural}")["items"])

    def children(self, name: str = "qwen") -> dict[Ref, dict[str, Any]]:
        """Every object that a PDDeployment controls."""
        return {
            Ref(kind.name, self.namespace, raw["metadata"]["name"]): raw
            for kind in CHILD_KINDS
            for raw in self.list(kind)
            if any(
                owner["kind"] == DEPLOYMENTS.name and owner["name"] == name
                for owner in raw["metadata"].get("ownerReferences", [])
            )
        }

    def condition(self, kind: str, name: str = "qwen") -> dict[str, Any]:
        """A condition, empty when there is none."""
        status = self.get(self.ref("PDDeployment", name)).get("status", {})
        return next((one for one in status.get("conditions", []) if one["type"] == kind), {})

    def until_condition(self, kind: str, status: str, reason: str | None = None, name: str = "qwen") -> dict[str, Any]:
        """Wait for a verdict, and for a reason if one is given, on the newest spec."""

        def look() -> dict[str, Any] | None:
            raw = self.get(self.ref("PDDeployment", name))
            found = self.condition(kind, name)
            current = found.get("observedGeneration") == raw["metadata"]["generation"]
            return found if current and found["status"] == status and reason in (None, found["reason"]) else None

        return eventually(f"{kind} of {name} is {status} ({reason})", look)

    def settled(self, operator: OperatorProcess, *names: str) -> None:
        """Wait until the operator has judged the newest specs and has nothing to do."""

        def look() -> bool:
            for name in names or ("qwen",):
                raw = self.get(self.ref("PDDeployment", name))
                if raw.get("status", {}).get("observedGeneration") != raw["metadata"]["generation"]:
                    return False
            return operator.metric("pd_operator_waiting") == 0

        eventually("operator is at rest", look)

    def resynced(self, operator: OperatorProcess, times: int = 2) -> None:
        """Wait for complete looks that begin after this call, and for the reconciles that they cause."""
        before = operator.metric("pd_operator_resyncs_total")
        eventually("resyncs", lambda: operator.metric("pd_operator_resyncs_total") >= before + times + 1)
        eventually("operator is at rest", lambda: operator.metric("pd_operator_waiting") == 0)

    def writes(self, since: int) -> list[AuditEvent]:
        """What operators have written into the namespace since a position of the audit log."""
        return [
            event
            for event in self.cluster.audit_events(since)
            if event.namespace == self.namespace
            and event.is_write
            and event.answered
            and event.user_agent.startswith(AGENTS)
        ]

    def written(self, since: int) -> list[str]:
        """The same as `verb resource name`, without statuses and Events."""
        left_out = ("events", "pddeployments.pdserving.dev/status")
        plain = [one for one in self.writes(since) if one.resource not in left_out]
        return sorted(f"{one.verb} {one.resource.partition('.')[0]} {one.name}" for one in plain)

    # --- kubelets --------------------------------------------------------------------------------

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """Pods of the namespace, of one role."""
        return [raw for raw in self.list(PODS) if role in (None, raw["metadata"]["labels"].get("pdserving.dev/role"))]

    def report(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        """A pod's status as a kubelet reports it. Raises ApiError when another pod has its name by now."""
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        self.patch(self.ref("Pod", pod["metadata"]["name"]), body, STRATEGIC, "/status")

    def make_ready(self, ip: str = "127.0.0.1") -> None:
        """Every pod that exists runs and is ready, at an address of this machine."""
        for pod in self.pods():
            conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")]
            with contextlib.suppress(ApiError):
                self.report(pod, {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions})

    def serve(self, name: str = "qwen", ip: str = "127.0.0.1") -> None:
        """Play kubelet until the PDDeployment is ready."""

        def look() -> bool:
            self.make_ready(ip)
            raw = self.get(self.ref("PDDeployment", name))
            ready = self.condition("Ready", name)
            return ready.get("status") == "True" and ready["observedGeneration"] == raw["metadata"]["generation"]

        eventually(f"{name} is ready", look)

    def until_ready(self, role: str, ready: str, name: str = "qwen") -> None:
        """Play kubelet until the status counts that many, such as ``2/2``: Ready is true before all of them are up."""

        def look() -> bool:
            self.make_ready()
            status = self.get(self.ref("PDDeployment", name)).get("status", {})
            return bool(status.get(role, {}).get("ready") == ready)

        eventually(f"{role} of {name} is {ready}", look)


@contextlib.contextmanager
def router_at(ip: str, answer: Callable[[], dict[str, Any]]) -> Iterator[list[str]]:
    """A router's admin port on a loopback address. Yields the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(answer()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer((ip, ADMIN_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


async def _end_tasks() -> None:
    """Cancel what still runs in this loop, such as watches that nobody reads any more."""
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _kubeconfig(url: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )
