"""`--set spec.path=value`: change single fields of a raw PDDeployment before it is read.

Works on the raw object, so that a wrong field or value gets the same words as one in the file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pdctl.core.yaml_text import MAX_DEPTH, YamlTextError, read_yaml


class OverrideError(ValueError):
    """A `--set` that can't be applied; the message quotes it."""


def apply_overrides(document: Any, settings: Sequence[str]) -> Any:
    """A copy of ``document`` with every ``path=value`` applied in order. Values are YAML; an empty one unsets.

    Raises:
        OverrideError: no "=", an empty path, a value that isn't YAML, or a path that leads through a plain value.
    """
    changed = copy.deepcopy(document)
    for setting in settings:
        path, separator, text = setting.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise OverrideError(f"--set {setting}: must be PATH=VALUE, for example spec.decode.replicas=2")
        if len(keys) > MAX_DEPTH:
            raise OverrideError(f"--set {setting}: a path of {len(keys)} names; at most {MAX_DEPTH}")
        try:
            values = read_yaml(text) or [None]
        except YamlTextError as error:
            raise OverrideError(f"--set {setting}: the value is not YAML: {error.what}") from error
        if len(values) > 1:
            raise OverrideError(f"--set {setting}: the value is {len(values)} YAML documents; give one")
        _put(changed, keys, values[0], setting)
    return changed


def _put(node: Any, keys: list[str], value: Any, setting: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        if not isinstance(node, dict):
            raise OverrideError(f"--set {setting}: {'.'.join(keys[:depth]) or 'the document'} is not an object")
        if not isinstance(node.get(key), Mapping | list):
            if node.get(key) is not None:
                raise OverrideError(f"--set {setting}: {'.'.join(keys[: depth + 1])} is not an object")
            node[key] = {}
        node = node[key]
    if not isinstance(node, dict):
        raise OverrideError(f"--set {setting}: {'.'.join(keys[:-1]) or 'the document'} is not an object")
    node[keys[-1]] = value
