"""The frame of every child: kind, name, labels, owner, and the hash that says whether it was applied already."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from pd_operator.core import names
from pd_operator.core.model import API_VERSION, PDDeployment
from pd_operator.core.render_context import RenderContext
from pd_wire import names as wire

HASH_LENGTH: Final = 16


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
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": deployment.metadata.namespace,
            "labels": labels,
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


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """A copy with the annotation `names.RENDERED_HASH`, which covers everything else in the manifest."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    found = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.RENDERED_HASH: found}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def without_nothing(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that have a value. What is not sent is not owned, so others may set it."""
    return {key: value for key, value in fields.items() if value is not None and value != [] and value != {}}


def literal(text: str) -> str:
    """A text that Kubernetes leaves as it is in a command or a variable, where `$(NAME)` would be filled in."""
    return text.replace("$", "$$")
