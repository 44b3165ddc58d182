"""Which items of merged lists somebody has renamed by hand: a container, a variable, a volume, a mount.

A server merges such a list by the items' keys. Renaming `engine` to `engine2` therefore leaves our item absent and a
stranger with its content, and an apply would add ours beside it: two engines in one pod. An item that others have added
looks the same to the server, so this is told apart by three facts together:

- The very manifest was applied before (the caller knows: the child carries its hash), so each of its items was there.
- One of them is missing now. Who only adds, takes nothing away.
- An item of a key that is not ours has its content, three quarters of all that we set in it.

Nothing is remembered for it. What is renamed and rewritten at once is an addition; ours is put back beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Item = Mapping[str, Any]
Operation = dict[str, Any]

_KEYS: Final = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "resourceClaims": ("name",),
    "volumeMounts": ("mountPath",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Merged lists whose items may be renamed, and their keys. Ports have rules of their own, see `plan_repair`."""

_ALIKE: Final = 0.75
"""Least part of an item's values that a renamed one still has."""


@dataclass(frozen=True, slots=True)
class Rename:
    """One renamed item. `path` is the list's JSON pointer in the live object, `now` its key fields there."""

    path: str
    index: int
    keys: tuple[str, ...]
    wanted: tuple[Any, ...]
    now: tuple[Any, ...]

    def put_back(self) -> Iterator[Operation]:
        """The steps of a JSON patch that give it its key again, where it is."""
        for key, wanted, now in zip(self.keys, self.wanted, self.now, strict=True):
            if wanted != now:
                yield {"op": "replace", "path": f"{self.path}/{self.index}/{key}", "value": wanted}


def renamed_items(manifest: Item, live: Item) -> tuple[Rename, ...]:
    """Every item of the manifest that is in the live object under another key."""
    return tuple(_in_mapping(manifest, live, ""))


def removals(renames: Sequence[Rename], live: Item) -> tuple[Operation, ...]:
    """The JSON patch that takes away what stands under the other keys, once ours is there as well."""
    found: list[tuple[int, str]] = []
    for one in renames:
        items = _at(live, one.path)
        keys = [_key(item, one.keys) for item in items]
        if one.wanted in keys and one.now in keys:
            found.append((keys.index(one.now), one.path))
    # The deepest and the last first, so that a removal does not move what is still to be removed.
    found.sort(key=lambda one: (one[1].count("/"), one[0]), reverse=True)
    return tuple({"op": "remove", "path": f"{path}/{index}"} for index, path in found)


def _in_mapping(wanted: Item, live: Item, path: str) -> Iterator[Rename]:
    for field, value in wanted.items():
        here, there = f"{path}/{field.replace('~', '~0').replace('/', '~1')}", live.get(field)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            yield from _in_mapping(value, there, here)
        elif field in _KEYS and isinstance(value, list) and isinstance(there, list):
            yield from _in_list(value, there, here, _KEYS[field])


def _in_list(wanted: Sequence[Item], live: Sequence[Item], path: str, keys: tuple[str, ...]) -> Iterator[Rename]:
    ours = {_key(item, keys) for item in wanted}
    places = {_key(item, keys): index for index, item in enumerate(live)}
    strangers = {key: index for key, index in places.items() if key not in ours}
    for position, item in enumerate(wanted):
        key = _key(item, keys)
        index = places.get(key)
        if index is None:
            content = {field: value for field, value in item.items() if field not in keys}
            alike = [other for other, at in strangers.items() if _is_alike(content, live[at])]
            if not alike:
                continue
            other = min(alike, key=lambda one: abs(strangers[one] - position))
            index = strangers.pop(other)
            yield Rename(path, index, keys, key, other)
        yield from _in_mapping(item, live[index], f"{path}/{index}")


def _key(item: Item, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key) for key in keys)


def _is_alike(content: Item, live: Item) -> bool:
    """Without any content nothing tells two items apart but their keys, so they are different ones."""
    same, all_of_it = _compared(content, live)
    return same > 0 and same >= _ALIKE * all_of_it


def _compared(wanted: Any, live: Any) -> tuple[int, int]:
    """How many single values agree, and how many there are. Servers add defaults, so more in the live one is fine."""
    if isinstance(wanted, Mapping) and wanted:
        fields = live if isinstance(live, Mapping) else {}
        return _sum(_compared(value, fields.get(field)) for field, value in wanted.items())
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], Mapping):
        items = live if isinstance(live, list) and live else [None]
        return _sum(max(_compared(one, other) for other in items) for one in wanted)
    return int(wanted == live), 1


def _sum(pairs: Iterator[tuple[int, int]]) -> tuple[int, int]:
    found = list(pairs)
    return sum(same for same, _ in found), sum(count for _, count in found)


def _at(live: Item, path: str) -> Sequence[Item]:
    here: Any = live
    for part in path.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        here = here[int(name)] if isinstance(here, list) else here.get(name, [])
    return here if isinstance(here, list) else []
