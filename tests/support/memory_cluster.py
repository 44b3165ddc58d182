"""A Kubernetes API in memory, behind the operator's own narrow port: enough to run reconciles in microseconds.

It has what a reconcile relies on: server-side apply with ownership of fields, preconditions, resource versions that
move only when something changed, and garbage collection by owner. Defaults, schemas, workload controllers and all else
are left to the tests that run against a real API server. It counts calls and writes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pd_operator.core.observed import HAND_OVER_MANAGER, MANAGER, REPAIR_MANAGER
from pd_operator.core.observed_kinds import DEPLOYMENTS, EVENTS, Kind, Ref, kind_named
from pd_operator.shell.api import ApiError

_ITEM_KEYS: Final = (("mountPath",), ("containerPort", "protocol"), ("port", "protocol"), ("uid",), ("name",))
"""Keys by which lists are merged; the first one that all items have counts."""

_NOT_OWNED: Final = ("apiVersion", "kind")

Listener = Callable[[Kind, dict[str, Any], bool], None]


class MemoryCluster:
    """`ClusterApi` without a server."""

    def __init__(self) -> None:
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Ref]] = []
        self.writes: list[tuple[str, Ref]] = []
        """Calls that may change something, whether they did or not."""
        self.listeners: list[Listener] = []
        self.policy: Callable[[Mapping[str, Any]], None] | None = None
        """Admission: raises what an apply of that manifest, or a rehearsal of it, is answered with."""
        self.time = "2026-11-30T10:00:00Z"
        """When objects are made from now on."""
        self._version = itertools.count(100)
        self._uid = itertools.count(1)

    # --- what users, controllers and kubelets do -------------------------------------------------

    def put(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Create or replace an object as somebody else would, without any notice to ownership but the spec's."""
        new = _copy(dict(raw))
        ref = _ref(new)
        old = self.objects.get(ref)
        metadata = new["metadata"]
        metadata["uid"] = old["metadata"]["uid"] if old else f"uid-{next(self._uid)}"
        metadata["creationTimestamp"] = old["metadata"]["creationTimestamp"] if old else self.time
        changed = old is None or old.get("spec") != new.get("spec")
        metadata["generation"] = (old["metadata"]["generation"] if old else 0) + int(changed)
        if old is not None:
            metadata.setdefault("managedFields", old["metadata"].get("managedFields", []))
        if old is not None and "status" in old:
            new.setdefault("status", old["status"])
        return self._store(ref, new)

    def edit(self, ref: Ref, path: tuple[str, ...], value: Any) -> None:
        """Change one field by hand: the editor becomes its owner, as on a real server."""
        new = _copy(self.objects[ref])
        here = new
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value
        record = _own_record(new)
        for part in path[:-1]:
            record = record[f"f:{part}"]
            record.setdefault(".", {})
        record.pop(f"f:{path[-1]}", None)
        self._store(ref, new)

    def remove(self, ref: Ref, *, collect: bool = True) -> None:
        """Delete an object, and in the background everything that it owns."""
        gone = self.objects.pop(ref)
        gone["metadata"]["resourceVersion"] = str(next(self._version))
        self._tell(ref, gone, True)
        if collect:
            self.collect_garbage()

    def collect_garbage(self) -> None:
        """Remove every object whose owner does not exist any more."""
        uids = {raw["metadata"]["uid"] for raw in self.objects.values()}
        for ref, raw in list(self.objects.items()):
            owners = raw["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners) and ref in self.objects:
                self.remove(ref)

    def set_status(self, ref: Ref, status: Mapping[str, Any]) -> None:
        """Report a status as a controller would."""
        raw = _copy(self.objects[ref])
        raw["status"] = dict(status)
        self._store(ref, raw)

    def serve(self, ref: Ref) -> None:
        """A workload as its controller leaves it when all of its pods are ready."""
        raw = self.objects[ref]
        count = raw["spec"].get("replicas", 1)
        counts = {"replicas": count, "readyReplicas": count, "updatedReplicas": count}
        revisions = {"currentRevision": "r1", "updateRevision": "r1"}
        self.set_status(ref, {"observedGeneration": raw["metadata"]["generation"], **counts, **revisions})

    def state(self) -> dict[str, Any]:
        """What exists, without what may differ between two ways to the same end."""
        return {str(ref): _comparable(raw) for ref, raw in sorted(self.objects.items())}

    # --- the port --------------------------------------------------------------------------------

    async def get(self, ref: Ref) -> Mapping[str, Any] | None:
        """See ClusterApi."""
        self.calls.append(("get", ref))
        return _copy(self.objects.get(ref))

    async def alive(self, ref: Ref, uid: str) -> bool:
        """See ClusterApi."""
        self.calls.append(("alive", ref))
        return ref in self.objects and self.objects[ref]["metadata"]["uid"] == uid

    async def list(self, kind: Kind, namespace: str | None, label_selector: str) -> tuple[list[Mapping[str, Any]], int]:
        """See ClusterApi."""
        self.calls.append(("list", Ref(kind.name, namespace or "", "")))
        found = [
            _copy(raw)
            for ref, raw in self.objects.items()
            if ref.kind == kind.name and namespace in (None, ref.namespace) and _selects(label_selector, raw)
        ]
        return list[Mapping[str, Any]](found), next(self._version)

    async def apply(self, manifest: Mapping[str, Any], uid: str | None) -> Mapping[str, Any]:
        """See ClusterApi."""
        ref = _ref(manifest)
        self._write("apply", ref)
        self._admit(manifest, uid)
        old = self.objects.get(ref)
        new = _merged(old or {}, manifest)
        metadata = new["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._uid)}")
        metadata.setdefault("creationTimestamp", self.time)
        entry = {"manager": MANAGER, "operation": "Apply", "fieldsV1": _record(_owned_part(manifest))}
        others = [one for one in metadata.get("managedFields", []) if one["manager"] != MANAGER]
        metadata["managedFields"] = [entry, *others]
        changed = old is None or old.get("spec") != new.get("spec")
        metadata["generation"] = metadata.get("generation", 0) + int(changed)
        if old is not None and _without_generation(old) == _without_generation(new) and not changed:
            return _copy(old)
        return _copy(self._store(ref, new))

    async def rehearse(self, manifest: Mapping[str, Any], uid: str | None) -> None:
        """See ClusterApi."""
        self.calls.append(("rehearse", _ref(manifest)))
        self._admit(manifest, uid)

    async def hand_over(self, manifest: Mapping[str, Any], uid: str) -> None:
        """See ClusterApi."""
        ref = _ref(manifest)
        self._write("hand over", ref)
        new = _copy(self.objects[ref])
        others = [one for one in new["metadata"]["managedFields"] if one["manager"] != HAND_OVER_MANAGER]
        entry = {"manager": HAND_OVER_MANAGER, "operation": "Apply", "fieldsV1": _record(_owned_part(manifest))}
        new["metadata"]["managedFields"] = [*others, entry]
        self._store(ref, new)

    async def patch(self, ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See ClusterApi."""
        self._write("patch", ref)
        old = self.objects[ref]
        if old["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "Conflict", "the object has been modified")
        new = _copy(old)
        for one in operations:
            *parents, last = [int(part) if part.isdigit() else part for part in one["path"].split("/")[1:]]
            here = new
            for part in parents:
                here = here[part]
            if one["op"] == "remove":
                del here[last]
            else:
                here[last] = _copy(one["value"])
            if parents[0] != "metadata":
                claim = {"manager": REPAIR_MANAGER, "operation": "Update", "fieldsV1": {}}
                new["metadata"]["managedFields"].append(claim)
        return _copy(self._store(ref, new))

    async def apply_status(self, ref: Ref, uid: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ClusterApi."""
        self._write("status", ref)
        old = self.objects.get(ref)
        if old is None or old["metadata"]["uid"] != uid:
            raise ApiError(404, "NotFound", "gone")
        kinds = {one["type"] for one in status.get("conditions", ())}
        # As a server merges them: conditions that another manager has added stay.
        others = [one for one in old.get("status", {}).get("conditions", ()) if one["type"] not in kinds]
        kept = [*status["conditions"], *others] if others else status.get("conditions", ())
        new = {**_copy(old), "status": _copy({**status, "conditions": kept})}
        return _copy(old if new == old else self._store(ref, new))

    async def delete(self, ref: Ref, uid: str, *, orphan: bool) -> bool:
        """See ClusterApi."""
        self._write("orphan" if orphan else "delete", ref)
        old = self.objects.get(ref)
        if old is None:
            return False
        if old["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "uid mismatch")
        self.remove(ref)
        return True

    async def events_about(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """See ClusterApi."""
        self.calls.append(("list", Ref(EVENTS.name, namespace, "")))
        return [event for event in self.events if event["involvedObject"]["uid"] == uid]

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """See ClusterApi."""
        self._write("event", Ref(EVENTS.name, namespace, event["reason"]))
        self.events.append(dict(event))

    # --- inside ----------------------------------------------------------------------------------

    def _admit(self, manifest: Mapping[str, Any], uid: str | None) -> None:
        old = self.objects.get(_ref(manifest))
        if uid is not None and (old is None or old["metadata"]["uid"] != uid):
            raise ApiError(409, "Conflict", "uid mismatch")
        if uid is None and old is not None and _own_entry(old) is None:
            raise ApiError(409, "Conflict", "Apply failed with conflicts")
        if self.policy is not None:
            self.policy(manifest)

    def _write(self, verb: str, ref: Ref) -> None:
        self.calls.append((verb, ref))
        self.writes.append((verb, ref))

    def _store(self, ref: Ref, raw: dict[str, Any]) -> dict[str, Any]:
        raw["metadata"]["resourceVersion"] = str(next(self._version))
        self.objects[ref] = raw
        self._tell(ref, raw, False)
        return raw

    def _tell(self, ref: Ref, raw: dict[str, Any], gone: bool) -> None:
        for listener in self.listeners:
            listener(kind_named(ref.kind), _copy(raw), gone)


def _copy(value: Any) -> Any:
    """A deep copy of what JSON can say, several times faster than copy.deepcopy."""
    return json.loads(json.dumps(value))


def _ref(raw: Mapping[str, Any]) -> Ref:
    return Ref(raw["kind"], raw["metadata"]["namespace"], raw["metadata"]["name"])


def _selects(selector: str, raw: Mapping[str, Any]) -> bool:
    labels = raw["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def _merged(old: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Apply: what we set is set, what we set before and do not any more is removed, the rest stays."""
    kept = _without(old, _own_entry(old) or {}, _entry(old, HAND_OVER_MANAGER) or {}) if old else {}
    return _overlay(kept, manifest)


def _overlay(below: Any, above: Any) -> Any:
    if isinstance(below, list) and isinstance(above, list):
        keys = _keys_of([*below, *above])
        return _copy(above) if keys is None else _merged_items(below, above, keys)
    if not isinstance(below, dict) or not isinstance(above, Mapping):
        return _copy(above)
    result = _copy(below)
    for key, value in above.items():
        result[key] = _overlay(result.get(key), value)
    return result


def _merged_items(below: list[dict[str, Any]], above: list[dict[str, Any]], keys: tuple[str, ...]) -> Any:
    """What we apply in its order, then what others have added. Names of ports must differ."""
    keyed = {_key(item, keys): item for item in below}
    ours = {_key(item, keys): _overlay(keyed.get(_key(item, keys)), item) for item in above}
    found = [*ours.values(), *(item for key, item in keyed.items() if key not in ours)]
    if "port" in keys and len({item["name"] for item in found}) < len(found):
        raise ApiError(422, "Invalid", "spec.ports[1].name: Duplicate value")
    return _copy(found)


def _keys_of(items: list[Any]) -> tuple[str, ...] | None:
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    return next((keys for keys in _ITEM_KEYS if all(keys[0] in item for item in items)), None)


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return f"k:{json.dumps({key: item.get(key, 'TCP') for key in keys}, separators=(',', ':'))}"


def _without(value: Mapping[str, Any], record: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, item in value.items():
        entry, other = record.get(f"f:{key}"), others.get(f"f:{key}")
        if entry is None or other == {}:
            kept[key] = _copy(item)
        elif isinstance(item, Mapping) and entry:
            # What has nothing left in it goes, too.
            if left := _without(item, entry, other or {}):
                kept[key] = left
        elif isinstance(item, list) and entry and (keys := _keys_of(item)) is not None:
            kept[key] = _copy([one for one in item if _key(one, keys) not in entry])
    return kept


def _own_entry(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    return _entry(raw, MANAGER)


def _entry(raw: Mapping[str, Any], manager: str) -> dict[str, Any] | None:
    for entry in raw["metadata"].get("managedFields", []):
        if entry["manager"] == manager:
            fields = entry["fieldsV1"]
            assert isinstance(fields, dict)
            return fields
    return None


def _own_record(raw: Mapping[str, Any]) -> dict[str, Any]:
    record = _own_entry(raw)
    assert record is not None, "the object was never applied"
    return record


def _owned_part(manifest: Mapping[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in manifest.items() if key not in _NOT_OWNED}
    metadata = {key: value for key, value in body["metadata"].items() if key not in ("name", "namespace", "uid")}
    return {**body, "metadata": metadata}


def _record(value: Any) -> dict[str, Any]:
    """The ownership record of an applied value."""
    if isinstance(value, Mapping):
        return {f"f:{key}": _record(item) for key, item in value.items()}
    if isinstance(value, list) and (keys := _keys_of(value)) is not None:
        return {_key(item, keys): {".": {}, **_record(item)} for item in value}
    return {}


def _without_generation(raw: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("generation", "resourceVersion")
    return {**raw, "metadata": {key: value for key, value in raw["metadata"].items() if key not in left_out}}


def _comparable(raw: Mapping[str, Any]) -> Any:
    left_out = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences")
    metadata = {key: value for key, value in raw["metadata"].items() if key not in left_out}
    metadata["owners"] = [owner["name"] for owner in raw["metadata"].get("ownerReferences", [])]
    value = {**raw, "metadata": metadata}
    if raw["kind"] == DEPLOYMENTS.name:
        status = _copy(raw.get("status", {}))
        for condition in status.get("conditions", []):
            del condition["lastTransitionTime"]
        value["status"] = status
    return value
