"""Pods of one PDDeployment, as the cluster tells them, to engines that join, restart, change and leave.

Separate from what lists and watches: here is decided what counts as an engine, which pod owns an address, and which
process a handle's memory belongs to; what an event means never depends on how it arrived. The rules:

* An engine is its pod (uid) and one start of the pod's `engine` container. Either may change behind one name or one
  address, so a pod with another uid, role, generation or address leaves and joins, and another start of the container
  restarts: what handles name is then gone (EL-01, EN-06).
* Leaving and restarting come before joining in every batch, so that a purge is never behind new traffic.
* The newest pod owns a name and an address; an older one that still claims either is no engine (a hostNetwork pod, an
  address that was given out again).
* A list is the truth. Between two lists, an event that is older than what is known about its pod is ignored, whatever
  the order in which events come.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
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

ADDED: Final = "ADDED"
MODIFIED: Final = "MODIFIED"
DELETED: Final = "DELETED"

REMEMBERED_DEAD: Final = 1024
"""Pods that left and are remembered until the next list, so that a late event does not bring them back."""

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


@dataclass(frozen=True, slots=True)
class Left:
    """The engine is gone, or its name is another engine's now: purge its handles, forget it."""

    name: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine's process is gone: purge its handles before anything else is sent there."""

    name: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The engine is another one in nothing but `ready` and `draining`."""

    pod: EnginePod


@dataclass(frozen=True, slots=True)
class Joined:
    """A new engine. Nothing of that name is there: what was has left before."""

    pod: EnginePod


@dataclass(frozen=True, slots=True)
class Refused:
    """A pod cannot be an engine; told once for each reason."""

    pod: UnusablePod


Change = Left | Restarted | Changed | Joined | Refused
_ORDER: Final = {Left: 0, Restarted: 1, Changed: 2, Joined: 3, Refused: 4}


@dataclass(frozen=True, slots=True)
class _Known:
    version: int | None
    pod: EnginePod | UnusablePod | None


class PodSet:
    """The engines of one PDDeployment. Work per event does not grow with the number of pods."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._known: dict[str, _Known] = {}
        self._claims: dict[object, set[str]] = {}
        self._told: dict[str, EnginePod | UnusablePod] = {}
        self._dead: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Number of engines."""
        return sum(isinstance(pod, EnginePod) for pod in self._told.values())

    def engines(self) -> dict[str, EnginePod]:
        """The engines by name."""
        return {pod.name: pod for pod in self._told.values() if isinstance(pod, EnginePod)}

    def unusable(self) -> list[UnusablePod]:
        """Pods that should be engines and cannot be."""
        return [pod for pod in self._told.values() if isinstance(pod, UnusablePod)]

    def replace(self, raws: Iterable[Mapping[str, Any]]) -> list[Change]:
        """The whole truth: every pod that there is. What is absent has left."""
        self._dead.clear()
        touched = set(self._known)
        self._known.clear()
        self._claims.clear()
        for raw in raws:
            uid = _text(_mapping(raw.get("metadata")).get("uid"))
            if uid and uid not in self._known:
                self._known[uid] = _Known(_version(raw), read_pod(raw, self._deployment))
                self._claim(uid, self._known[uid].pod)
                touched.add(uid)
        return self._settle(touched)

    def apply(self, kind: str, raw: Mapping[str, Any]) -> list[Change]:
        """One event about one pod. Doubled and late events change nothing."""
        uid = _text(_mapping(raw.get("metadata")).get("uid"))
        version = _version(raw)
        known = self._known.get(uid)
        last = known.version if known is not None else self._dead.get(uid)
        if not uid or (version is not None and last is not None and version <= last):
            return []
        before = known.pod if known is not None else None
        if kind == DELETED:
            self._known.pop(uid, None)
            after = None
            if version is not None:
                self._dead[uid] = version
                while len(self._dead) > REMEMBERED_DEAD:
                    self._dead.popitem(last=False)
        else:
            after = read_pod(raw, self._deployment)
            self._known[uid] = _Known(version, after)
        if before == after:
            return []
        rivals = self._rivals(before) | self._rivals(after)
        self._unclaim(uid, before)
        self._claim(uid, after)
        return self._settle({uid} | rivals)

    # -- who owns a name and an address --------------------------------------------------------------
    def _claim(self, uid: str, pod: EnginePod | UnusablePod | None) -> None:
        for claim in _claims(pod):
            self._claims.setdefault(claim, set()).add(uid)

    def _unclaim(self, uid: str, pod: EnginePod | UnusablePod | None) -> None:
        for claim in _claims(pod):
            self._claims[claim].discard(uid)
            if not self._claims[claim]:
                del self._claims[claim]

    def _rivals(self, pod: object) -> set[str]:
        return {uid for claim in _claims(pod) for uid in self._claims.get(claim, ())}

    def _effective(self, uid: str) -> EnginePod | UnusablePod | None:
        """What a pod counts as, given everybody else's claims."""
        known = self._known.get(uid)
        pod = known.pod if known is not None else None
        if not isinstance(pod, EnginePod):
            return pod
        for rival in self._rivals(pod):
            other = self._known[rival].pod
            if isinstance(other, EnginePod) and (other.created, other.uid) > (pod.created, pod.uid):
                what = "name" if other.name == pod.name else f"address {pod.host}:{pod.port}"
                return UnusablePod(pod.name, pod.uid, f"its {what} belongs to the newer pod {other.name}")
        return pod

    def _settle(self, uids: Iterable[str]) -> list[Change]:
        """Compare what the pods count as with what was told, and tell the difference."""
        changes: list[Change] = []
        for uid in sorted(uids):
            before, after = self._told.get(uid), self._effective(uid)
            if after is None:
                self._told.pop(uid, None)
            else:
                self._told[uid] = after
            changes.extend(_difference(before, after))
        changes.sort(key=lambda change: _ORDER[type(change)])
        return changes


def _difference(before: EnginePod | UnusablePod | None, after: EnginePod | UnusablePod | None) -> Iterator[Change]:
    if before == after:
        return
    if isinstance(before, EnginePod) and isinstance(after, EnginePod) and before.is_same_engine(after):
        # A start that was not known may be the one that answered already, unless the pod had not been ready.
        if before.process != after.process and (before.process or before.ready):
            yield Restarted(after.name)
        if (before.ready, before.draining) != (after.ready, after.draining):
            yield Changed(after)
        return
    if isinstance(before, EnginePod):
        yield Left(before.name)
    if isinstance(after, EnginePod):
        yield Joined(after)
    elif after is not None:
        yield Refused(after)


def _claims(pod: object) -> Iterator[object]:
    if isinstance(pod, EnginePod):
        yield pod.name
        yield pod.host, pod.port


# -- reading one pod -------------------------------------------------------------------------------------
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


def _version(raw: Mapping[str, Any]) -> int | None:
    """Resource versions of one kind can be compared (guaranteed from Kubernetes 1.35, true before for etcd)."""
    text = _text(_mapping(raw.get("metadata")).get("resourceVersion"))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 40 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, Mapping))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
