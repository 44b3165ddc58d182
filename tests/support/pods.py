"""Pod objects as a kubelet writes them, cut down to what matters here plus some of what doesn't."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pd_wire import names

_numbers = itertools.count(1)


def make_pod(
    name: str,
    role: str = "decode",
    *,
    deployment: str = "tiny",
    uid: str | None = None,
    generation: str | None = "g1",
    ip: str | None = "10.0.0.1",
    ips: Sequence[str] = (),
    port: int = 8000,
    port_name: str = "http",
    container: str = "engine",
    start: int | None = 1,
    ready: bool = True,
    deleting: bool = False,
    phase: str = "Running",
    created: str = "2026-11-30T10:00:00Z",
    version: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One pod. ``start`` numbers the starts of its container, None when it does not run; ``ips`` are more addresses."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "default",
        "uid": uid if uid is not None else f"uid-{name}-{next(_numbers)}",
        "creationTimestamp": created,
        "labels": {
            "app.kubernetes.io/name": "pd-operator",
            names.LABEL_DEPLOYMENT: deployment,
            names.LABEL_ROLE: role,
            **({} if generation is None else {names.LABEL_GENERATION: generation}),
            **(labels or {}),
        },
    }
    if version is not None:
        metadata["resourceVersion"] = str(version)
    if deleting:
        metadata |= {"deletionTimestamp": "2026-11-30T11:00:00Z", "deletionGracePeriodSeconds": 30}
    state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
    if start is not None:
        state = {"running": {"startedAt": f"2026-11-30T10:{start % 60:02}:00Z"}}
    ports = [
        {"name": "nixl", "containerPort": 5600, "protocol": "TCP"},
        {"name": port_name, "containerPort": port, "protocol": "TCP"},
    ]
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containerStatuses": [
            {"name": "sidecar", "containerID": "containerd://side", "state": {"running": {"startedAt": "x"}}},
            {"name": container, "containerID": f"containerd://{start}" if start else "", "state": state},
        ],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}, *({"ip": other} for other in ips)]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "sidecar", "ports": []}, {"name": container, "ports": ports}]},
        "status": status,
    }
