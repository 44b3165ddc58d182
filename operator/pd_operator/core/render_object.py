"""The frame of every child: kind, name, labels and owner."""

from __future__ import annotations

from typing import Any

from pd_operator.core.model import API_VERSION, PDDeployment
from pd_operator.core.observed import OPERATOR_ANNOTATION
from pd_operator.core.render_context import RenderContext
from pd_wire import names as wire


def child(
    deployment: PDDeployment,
    context: RenderContext,
    api_version: str,
    kind: str,
    name: str,
    labels: dict[str, str],
    **fields: Any,
) -> dict[str, Any]:
    """A child object. ``fields`` are its other top-level fields, such as spec."""
    written_by = {"annotations": {OPERATOR_ANNOTATION: context.identity}} if context.identity else {}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": deployment.metadata.namespace,
            "labels": labels,
            **written_by,
            "ownerReferences": [owner_reference(deployment, context)],
        },
        **fields,
    }


def owner_reference(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    """The reference by which Kubernetes deletes a child after its PDDeployment."""
    return {
        "apiVersion": API_VERSION,
        "kind": wire.KIND,
        "name": deployment.metadata.name,
        "uid": context.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def without_nothing(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that have a value. What is not sent is not owned, so others may set it."""
    return {key: value for key, value in fields.items() if value is not None and value != [] and value != {}}


def literal(text: str) -> str:
    """A text that Kubernetes leaves as it is in a command or a variable, where `$(NAME)` would be filled in."""
    return text.replace("$", "$$")
