"""Kubernetes objects as text: a deployment's children, and the custom resource definition.

Separate from `render`, which prints commands for people to run. Children are printed without their owner, because only
a cluster knows its uid: what is printed can be applied as it is, and lives until somebody deletes it.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

from pd_operator.core.crd import custom_resource_definition
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_children import RenderContext, render_children

WIDTH: Final = 118
CRD_HEADER: Final = "# Generated from the models in operator/pd_operator/core by `make crds`; do not edit.\n"


def render_kubernetes(deployment: PDDeployment, router_image: str, connector_image: str) -> str:
    """All children as YAML documents, in the order in which the operator applies them.

    Raises:
        SpecError: the deployment cannot run in a cluster.
    """
    children = render_children(deployment, RenderContext("", router_image, connector_image))
    return "".join(f"---\n{_yaml(_without_owner(child))}" for child in children)


def crd_text() -> str:
    """The custom resource definition as the file in `crds/` holds it."""
    return CRD_HEADER + _yaml(custom_resource_definition())


def _without_owner(child: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in child["metadata"].items() if key != "ownerReferences"}
    return {**child, "metadata": metadata}


class _Dumper(yaml.SafeDumper):
    """Writes equal objects out each time; references would be hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    assert isinstance(text, str)
    return text
