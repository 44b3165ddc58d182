"""What stands in the way of an apply: an item of a list whose key somebody changed.

A server merges such a list by the items' keys (a port by number and protocol). After an edit of the number our item is
absent and the edited one is a stranger with the same name; an apply would make a second of that name, which the server
refuses, each time. So the key is put back where the item is, which also keeps what the server gave it, such as a node
port. Separate from `plan`, which sees facts only: this looks at the whole live object, after a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from pd_operator.core.observed import REPAIR_MANAGER

KEYS: Final = ("port", "containerPort", "protocol")
"""Key fields of lists whose items have a name that is not their key and must be unique."""

Operation = dict[str, Any]
"""One step of a JSON patch."""


def moved_items(manifest: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[Operation, ...]:
    """The JSON patch after which the manifest can be applied; empty when nothing of this kind is in the way."""
    found = [*_in_mapping(manifest, live, "")]
    # From the last index on, so that a removal does not move what is still to be changed.
    removals = sorted((one for one in found if one["op"] == "remove"), key=_index, reverse=True)
    return (*(one for one in found if one["op"] == "replace"), *removals)


def without_claims(live: Mapping[str, Any]) -> tuple[Operation, ...]:
    """The JSON patch that ends the ownership that a repair leaves behind; empty when it has none."""
    entries = live["metadata"].get("managedFields") or []
    kept = [entry for entry in entries if entry.get("manager") != REPAIR_MANAGER]
    if len(kept) == len(entries):
        return ()
    return ({"op": "replace", "path": "/metadata/managedFields", "value": kept},)


def _in_mapping(wanted: Mapping[str, Any], live: Mapping[str, Any], path: str) -> Iterator[Operation]:
    for key, value in wanted.items():
        here, there = f"{path}/{key.replace('~', '~0').replace('/', '~1')}", live.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            yield from _in_mapping(value, there, here)
        elif _are_items(value) and _are_items(there):
            yield from _in_list(value, there, here)


def _in_list(wanted: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]], path: str) -> Iterator[Operation]:
    for item in wanted:
        index = next((number for number, one in enumerate(live) if one.get("name") == item.get("name")), None)
        if index is None:
            continue
        moved = [key for key in KEYS if key in item and live[index].get(key) != item[key]]
        if not moved:
            yield from _in_mapping(item, live[index], f"{path}/{index}")
        elif any(all(one.get(key) == item[key] for key in KEYS if key in item) for one in live):
            yield {"op": "remove", "path": f"{path}/{index}"}
        else:
            for key in moved:
                yield {"op": "replace", "path": f"{path}/{index}/{key}", "value": item[key]}


def _are_items(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "name" in one for one in value)


def _index(operation: Operation) -> int:
    return int(operation["path"].rpartition("/")[2])
