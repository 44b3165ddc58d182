"""The operator's chart for tests: rendered by the real helm, and its values on an embedded cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from pdctl.core.cluster.binaries import KUBERNETES_VERSION
from pdctl.shell.cluster.build import build_programs

CHART: Final = Path(__file__).parents[2] / "charts" / "pd-operator"
RELEASE: Final = "pd-operator"
REGISTRY: Final = {"image": {"registry": "registry.example.com/team"}}
"""The one value without a default."""

DEVELOPMENT: Final = {"image": {"registry": "localhost", "tag": "dev"}, "children": {"imagePullPolicy": "IfNotPresent"}}
"""The images that the embedded cluster has."""


class HelmError(Exception):
    """What helm said."""


@cache
def helm_program() -> str:
    """The path of helm; built when it isn't yet, which takes minutes once."""
    return str(build_programs(print) / "helm")


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> str:
    """Run helm without a cluster. Returns its standard output.

    Raises:
        HelmError: it failed.
    """
    argv = [helm_program(), *arguments, *(() if values is None else ("--values", "-"))]
    text = None if values is None else json.dumps(values)
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def render(
    *sets: Mapping[str, Any],
    version: str = KUBERNETES_VERSION,
    namespace: str = "pd-system",
    chart: Path = CHART,
    release: str = RELEASE,
) -> list[dict[str, Any]]:
    """Every object of the release, hooks included; later value sets win.

    Raises:
        HelmError: the values are refused.
    """
    arguments = ("template", release, str(chart), "--namespace", namespace, "--kube-version", version)
    text = helm(*arguments, values=combined(REGISTRY, *sets))
    return [found for found in yaml.load_all(text, StrictLoader) if found is not None]


def combined(*sets: Mapping[str, Any]) -> dict[str, Any]:
    """Value sets laid over each other as helm does it."""
    result: dict[str, Any] = {}
    for one in sets:
        for key, value in one.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = combined(result[key], value) if both else value
    return result


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    [found] = [one for one in objects if one["kind"] == kind]
    return found


class StrictLoader(yaml.CSafeLoader):
    """YAML in which a key may stand once, as a server-side apply demands it."""


def _mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
    doubled = {key for key in keys if keys.count(key) > 1}
    if doubled:
        raise yaml.YAMLError(f"{sorted(doubled)} stand twice{node.start_mark}")
    return yaml.constructor.SafeConstructor.construct_mapping(loader, node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
