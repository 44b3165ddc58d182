"""What the API server last said about everything that is ours, cut down to facts.

Three sources feed it: watch events, the answers to our own writes (so that a reconcile never decides on what was before
its last write), and complete lists. The lists are what makes it trustworthy: kopf lists again after a gap in a watch,
but nobody tells about objects that vanished during the gap. Memory only; a restart fills it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pd_operator.core.observed import Child, Observed, observe_child, resource_version
from pd_operator.core.observed_kinds import DEPLOYMENTS, PODS, Kind, Ref
from pd_operator.core.observed_pods import Pod, observe_pod
from pd_operator.core.observed_router import RouterAnswer
from pd_operator.shell.wakeups import Key
from pd_wire import names

Fact = Child | Pod | Mapping[str, Any]


class Mirror:
    """PDDeployments, their children and pods. `see` and `list_of` return whom a change concerns."""

    def __init__(self) -> None:
        self._deployments: dict[Key, Mapping[str, Any]] = {}
        self._children: dict[Key, dict[Ref, Child]] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._owner_of: dict[Ref, Key] = {}
        self._unconfirmed: dict[Ref, int] = {}

    def see(self, kind: Kind, raw: Mapping[str, Any], *, gone: bool = False) -> Key | None:
        """Take in a watch event or the answer to a write. The key to wake, None when nothing of interest changed."""
        ref = _ref(kind, raw)
        if self._unconfirmed.get(ref, 0) <= resource_version(raw):
            self._unconfirmed.pop(ref, None)
        if gone:
            return self._drop(ref, str(raw["metadata"].get("uid", "")))
        return self._take(kind, ref, raw)

    def listed(self, kind: Kind, namespace: str | None, items: Iterable[Mapping[str, Any]], version: int) -> set[Key]:
        """Take in a complete list. Objects that are not on it are gone, unless they were seen after it was made."""
        present: set[Ref] = set()
        woken: set[Key] = set()
        for raw in items:
            ref = _ref(kind, raw)
            present.add(ref)
            known = self._version(ref)
            key = self._take(kind, ref, raw)
            if key is not None:
                woken.add(key)
            if resource_version(raw) > known:
                self._unconfirmed[ref] = resource_version(raw)
        for ref in [ref for ref in self._owner_of if ref.kind == kind.name and ref not in present]:
            if (namespace is None or ref.namespace == namespace) and self._version(ref) <= version:
                key = self._drop(ref, None)
                if key is not None:
                    woken.add(key)
        return woken

    def gone(self, ref: Ref, uid: str) -> None:
        """The server has no such object any more, although no watch has told."""
        self._drop(ref, uid)

    def take_unconfirmed(self, namespace: str | None = None) -> tuple[Ref, ...]:
        """Changes that the previous lists brought and that no watch has brought since, of one namespace or of all;
        forgets them."""
        missed = tuple(ref for ref in self._unconfirmed if namespace in (None, ref.namespace))
        for ref in missed:
            del self._unconfirmed[ref]
        return missed

    def forget_namespace(self, namespace: str) -> set[Key]:
        """Nobody can tell any more what is in a namespace. The keys of all that were known there."""
        refs = [ref for ref in self._owner_of if ref.namespace == namespace]
        return {key for ref in refs if (key := self._drop(ref, None)) is not None}

    def deployment(self, key: Key) -> Mapping[str, Any] | None:
        """The raw PDDeployment, None when it is gone."""
        return self._deployments.get(key)

    def keys(self) -> tuple[Key, ...]:
        """Every PDDeployment."""
        return tuple(self._deployments)

    def child_uids(self) -> frozenset[str]:
        """The uids of all children."""
        return frozenset(child.uid for children in self._children.values() for child in children.values())

    def routers(self) -> list[Pod]:
        """Router pods that can be asked, of all PDDeployments that exist."""
        return [
            pod
            for key, pods in self._pods.items()
            if key in self._deployments
            for pod in pods.values()
            if pod.ready and pod.ip and pod.admin_port
        ]

    def observed(self, key: Key, answers: Mapping[str, RouterAnswer | None]) -> Observed | None:
        """Everything about one PDDeployment; `answers` by pod uid. None when it is gone."""
        raw = self._deployments.get(key)
        if raw is None:
            return None
        pods = tuple(sorted(self._pods.get(key, {}).values(), key=lambda pod: pod.name))
        return Observed(
            raw=raw,
            children=dict(self._children.get(key, {})),
            pods=pods,
            routers={pod.name: answers[pod.uid] for pod in pods if pod.uid in answers},
        )

    def _take(self, kind: Kind, ref: Ref, raw: Mapping[str, Any]) -> Key | None:
        if resource_version(raw) < self._version(ref):
            return None
        if kind is DEPLOYMENTS:
            return self._take_deployment(ref, raw)
        fact: Child | Pod = observe_pod(raw) if kind is PODS else observe_child(kind.name, raw)
        key = _key(ref, fact)
        before = self._owner_of.get(ref)
        if before is not None and before != key:
            self._drop(ref, None)
        if key is None:
            return before
        self._owner_of[ref] = key
        old: Child | Pod | None
        if isinstance(fact, Pod):
            old = self._pods.setdefault(key, {}).get(ref.name)
            self._pods[key][ref.name] = fact
        else:
            old = self._children.setdefault(key, {}).get(ref)
            self._children[key][ref] = fact
        return None if old is not None and _same(old, fact) else key

    def _take_deployment(self, ref: Ref, raw: Mapping[str, Any]) -> Key | None:
        key = Key(ref.namespace, ref.name)
        metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
        slim = {**raw, "metadata": metadata}
        old = self._deployments.get(key)
        self._deployments[key] = slim
        self._owner_of[ref] = key
        return None if old is not None and _without_version(old) == _without_version(slim) else key

    def _drop(self, ref: Ref, uid: str | None) -> Key | None:
        """Forget an object; with a uid only that very one, since a successor may have been seen already."""
        key = self._owner_of.get(ref)
        if key is None or (uid is not None and self._uid(ref) != uid):
            return None
        del self._owner_of[ref]
        self._unconfirmed.pop(ref, None)
        if ref.kind == DEPLOYMENTS.name:
            del self._deployments[key]
        elif ref.kind == PODS.name:
            _remove(self._pods, key, ref.name)
        else:
            _remove(self._children, key, ref)
        return key

    def _fact(self, ref: Ref) -> Fact | None:
        key = self._owner_of.get(ref)
        if key is None:
            return None
        if ref.kind == DEPLOYMENTS.name:
            return self._deployments[key]
        return self._pods[key][ref.name] if ref.kind == PODS.name else self._children[key][ref]

    def _version(self, ref: Ref) -> int:
        fact = self._fact(ref)
        if fact is None:
            return 0
        return fact.version if isinstance(fact, Child | Pod) else resource_version(fact)

    def _uid(self, ref: Ref) -> str:
        fact = self._fact(ref)
        return str(fact["metadata"].get("uid", "")) if isinstance(fact, Mapping) else fact.uid if fact else ""


def _ref(kind: Kind, raw: Mapping[str, Any]) -> Ref:
    metadata = raw["metadata"]
    return Ref(kind.name, str(metadata.get("namespace", "")), str(metadata.get("name", "")))


def _key(ref: Ref, fact: Child | Pod) -> Key | None:
    """Whose it is: by its label, and where that is lost by its controller."""
    name = fact.deployment
    if not name and isinstance(fact, Child) and fact.owner[0] == names.KIND:
        name = fact.owner[1]
    return Key(ref.namespace, name) if name else None


def _same(old: Child | Pod, new: Child | Pod) -> bool:
    return type(old) is type(new) and replace(old, version=0) == replace(new, version=0)


def _without_version(raw: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in raw["metadata"].items() if name != "resourceVersion"}
    return {**raw, "metadata": metadata}


def _remove(table: dict[Key, dict[Any, Any]], key: Key, item: Any) -> None:
    table[key].pop(item, None)
    if not table[key]:
        del table[key]
