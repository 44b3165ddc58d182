"""One pod object from the API → an engine, a pod that cannot be one, or nothing of ours.

Separate from the set of pods (`core/pods.py`): here is what is read out of one object, there what a change of it means.
Whatever the object's shape, reading it raises nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_wire.names import (
    ENGINE_CONTAINER,
    HTTP_PORT,
    LABEL_DEPLOYMENT,
    LABEL_GENERATION,
    LABEL_ROLE,
    ROLE_DECODE,
    ROLE_PREFILL,
)

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_GENERATION: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class EnginePod:
    """A pod that is an engine. `process` names one start of its container, "" while none is known to run.

    `hosts` are all its addresses; a handle may name any of them. `ready` is the pod's Ready condition; `draining` is
    set once the pod is being deleted, and is never unset.
    """

    name: str
    uid: str
    created: str
    role: str
    generation: str
    host: str
    port: int
    hosts: frozenset[str]
    process: str
    ready: bool
    draining: bool

    def is_same_engine(self, other: EnginePod) -> bool:
        """Whether a member of the fleet stays the one that it was, apart from its process."""
        return (self.name, self.uid, self.role, self.generation, self.host, self.port, self.hosts) == (
            other.name,
            other.uid,
            other.role,
            other.generation,
            other.host,
            other.port,
            other.hosts,
        )


@dataclass(frozen=True, slots=True)
class UnusablePod:
    """A running pod with the right labels that cannot be an engine, and why: somebody made it wrongly."""

    name: str
    uid: str
    why: str


def read_pod(raw: Mapping[str, Any], deployment: str) -> EnginePod | UnusablePod | None:
    """What a pod is: an engine, one that cannot be, or (None) none of ours or none now. Never raises."""
    metadata, spec, status = (_mapping(raw.get(part)) for part in ("metadata", "spec", "status"))
    labels = _mapping(metadata.get("labels"))
    role = labels.get(LABEL_ROLE)
    if labels.get(LABEL_DEPLOYMENT) != deployment or role not in (ROLE_PREFILL, ROLE_DECODE):
        return None
    name, uid = _text(metadata.get("name")), _text(metadata.get("uid"))
    if not name or _text(status.get("phase")) in _ENDED:
        return None  # the address of one that ended may be somebody else's already
    generation, port = labels.get(LABEL_GENERATION), _port(spec)
    if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
        return UnusablePod(name, uid, f"its label {LABEL_GENERATION} is missing or no label value")
    if isinstance(port, str):
        return UnusablePod(name, uid, port)
    hosts = _hosts(status)
    if not hosts:
        return None
    fault = next((fault for host in hosts if (fault := _address_fault(host)) is not None), None)
    if fault is not None:
        return UnusablePod(name, uid, fault)
    return EnginePod(
        name=name,
        uid=uid,
        created=_text(metadata.get("creationTimestamp")),
        role=role,
        generation=generation,
        host=hosts[0],
        port=port,
        hosts=frozenset(hosts),
        process=_process(status),
        ready=_ready(status),
        draining=metadata.get("deletionTimestamp") is not None,
    )


def identity_of(raw: Mapping[str, Any]) -> tuple[str, int | None]:
    """The pod's uid ("" when it has none), and its resource version as a number where it is one.

    Versions of one kind can be compared: guaranteed from Kubernetes 1.35, true before for etcd.
    """
    metadata = _mapping(raw.get("metadata"))
    text = _text(metadata.get("resourceVersion"))
    version = int(text) if text.isascii() and text.isdigit() and len(text) < 40 else None
    return _text(metadata.get("uid")), version


def _port(spec: Mapping[str, Any]) -> int | str:
    """The port of the engine's HTTP server, or what is wrong."""
    engine = next((item for item in _mappings(spec.get("containers")) if item.get("name") == ENGINE_CONTAINER), None)
    if engine is None:
        return f"it has no container named {ENGINE_CONTAINER}"
    port = next((item for item in _mappings(engine.get("ports")) if item.get("name") == HTTP_PORT), None)
    if port is None:
        return f"its container {ENGINE_CONTAINER} has no port named {HTTP_PORT}"
    number = port.get("containerPort")
    if type(number) is not int or not 0 < number < 65536 or port.get("protocol", "TCP") != "TCP":
        return f"its port {HTTP_PORT} is not a TCP port"
    return number


def _hosts(status: Mapping[str, Any]) -> list[str]:
    """All addresses of the pod, the primary one first; empty while it has none."""
    primary = _text(status.get("podIP"))
    others = [_text(item.get("ip")) for item in _mappings(status.get("podIPs"))]
    return [primary, *(ip for ip in others if ip and ip != primary)] if primary else []


def _address_fault(host: str) -> str | None:
    """Why an address is no engine's. Loopback is allowed: a node of one machine may have nothing else."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "its address is no IP address"
    if address.is_unspecified or address.is_multicast or address.is_link_local:
        return f"its address {host} is not one that a peer can connect to"
    return None


def _process(status: Mapping[str, Any]) -> str:
    for container in _mappings(status.get("containerStatuses")):
        if container.get("name") == ENGINE_CONTAINER:
            running = _mapping(container.get("state")).get("running")
            if isinstance(running, Mapping):
                return f"{_text(container.get('containerID'))}@{_text(running.get('startedAt'))}"
    return ""


def _ready(status: Mapping[str, Any]) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in _mappings(status.get("conditions"))
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, Mapping))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
