"""Pods of one PDDeployment, as the cluster tells them, to engines that join, restart, change and leave.

Separate from what lists and watches: here is decided which pod owns an address, and which process a handle's memory
belongs to; what an event means never depends on how it arrived. The rules:

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

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_router.core.engine_pod import EnginePod, UnusablePod, identity_of, read_pod

ADDED: Final = "ADDED"
MODIFIED: Final = "MODIFIED"
DELETED: Final = "DELETED"

REMEMBERED_DEAD: Final = 1024
"""Pods that left and are remembered until the next list, so that a late event does not bring them back."""


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
            uid, version = identity_of(raw)
            if uid and uid not in self._known:
                self._known[uid] = _Known(version, read_pod(raw, self._deployment))
                self._claim(uid, self._known[uid].pod)
                touched.add(uid)
        return self._settle(touched)

    def apply(self, kind: str, raw: Mapping[str, Any]) -> list[Change]:
        """One event about one pod. Doubled and late events change nothing."""
        uid, version = identity_of(raw)
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
