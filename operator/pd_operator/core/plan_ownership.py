"""Which rendered fields are not ours on the live object any more, read from `managedFields`.

A server-side apply with force makes us the owner of every field that we send. When somebody changes such a field, or
removes it, the server takes it out of our record. Comparing the manifest with that record finds edits without knowing
defaults, quantities or any other way in which a server rewrites values, and without knowing schemas: the record itself
says which lists are merged by key.

Record format (fieldsV1): nested objects whose keys are `f:<field>`, `k:<JSON of an item's key fields>`,
`v:<JSON of a plain value>` and `.`; an empty object is a field that is owned as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_NOT_TRACKED: Final = frozenset({"apiVersion", "kind"})
_NOT_TRACKED_METADATA: Final = frozenset({"name", "namespace"})


def lost_fields(manifest: Mapping[str, Any], owned_fields: str) -> frozenset[str]:
    """Paths that the manifest sets and this operator does not own on the live object.

    Args:
        manifest: what would be applied.
        owned_fields: our record as JSON text; empty when there is none, and every field is lost then.
    """
    record = json.loads(owned_fields) if owned_fields else {}
    return frozenset(_lost_in_object(_tracked(manifest), record, ""))


def owns(owned_fields: str, *path: str) -> bool:
    """Is the field at that path (of plain objects) ours?"""
    record = json.loads(owned_fields) if owned_fields else {}
    for part in path:
        if f"f:{part}" not in record:
            return False
        record = record[f"f:{part}"]
    return True


def _tracked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    body = {key: value for key, value in manifest.items() if key not in _NOT_TRACKED}
    metadata = {key: value for key, value in body.pop("metadata", {}).items() if key not in _NOT_TRACKED_METADATA}
    return {**body, "metadata": metadata} if metadata else body


def _lost_in_object(wanted: Mapping[str, Any], record: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in wanted.items():
        if value is None:
            continue
        here = f"{path}.{key}" if path else key
        if f"f:{key}" not in record:
            yield here
        else:
            yield from _lost_below(value, record[f"f:{key}"], here)


def _lost_below(value: Any, record: Mapping[str, Any], path: str) -> Iterator[str]:
    if not record:
        return
    if isinstance(value, Mapping):
        yield from _lost_in_object(value, record, path)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from _lost_in_list(value, record, path)


def _lost_in_list(items: Sequence[Any], record: Mapping[str, Any], path: str) -> Iterator[str]:
    free = {key: entry for key, entry in record.items() if key.startswith(("k:", "v:"))}
    for index, item in enumerate(items):
        match = next((key for key in free if _names_item(key, item)), None)
        if match is None:
            yield f"{path}[{index}]"
            continue
        entry = free.pop(match)
        if isinstance(item, Mapping):
            yield from _lost_below(item, entry, f"{path}[{index}]")


def _names_item(record_key: str, item: Any) -> bool:
    """Does `k:{"name":"engine"}` or `v:"x"` mean this item? Key fields that the item leaves out were defaulted."""
    value = json.loads(record_key[2:])
    if record_key.startswith("v:"):
        return bool(value == item)
    return isinstance(item, Mapping) and all(item.get(key, expected) == expected for key, expected in value.items())
