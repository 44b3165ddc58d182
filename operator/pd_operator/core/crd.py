"""The custom resource definition, generated from the models: what `kubectl apply` and `kubectl explain` go by."""

from __future__ import annotations

from typing import Any, Final

from pd_operator.core import crd_rules, fields
from pd_operator.core.crd_schema import Schema, structural_schema
from pd_operator.core.model import NAME_LIMIT, PDDeployment, PDDeploymentSpec
from pd_operator.core.status_model import PDDeploymentStatus
from pd_wire import names

PLURAL: Final = "pddeployments"
SINGULAR: Final = "pddeployment"
SHORT_NAMES: Final = ("pdd",)
CATEGORIES: Final = ("llm",)
"""Not `all`: `kubectl get all` would list the same pods three times over."""

SCALE: Final = {
    "specReplicasPath": ".spec.decode.replicas",
    "statusReplicasPath": ".status.decode.replicas",
    "labelSelectorPath": ".status.decode.selector",
}
"""A definition has one scale subresource; decode is the role that grows with load."""


def custom_resource_definition(*, numbers: bool = True) -> dict[str, Any]:
    """The whole object, as a plain dict in the order in which it is written.

    Args:
        numbers: end each description with default and bounds, for whoever sees nothing else of the schema.
    """
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{names.API_GROUP}"},
        "spec": {
            "group": names.API_GROUP,
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": list(SHORT_NAMES),
                "categories": list(CATEGORIES),
            },
            "scope": "Namespaced",
            "versions": [_version(numbers)],
        },
    }


def _version(numbers: bool) -> dict[str, Any]:
    return {
        "name": names.API_VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": dict(SCALE)},
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _schema(numbers)},
    }


def _schema(numbers: bool) -> Schema:
    name = {"type": "string", "pattern": fields.DNS_LABEL, "maxLength": NAME_LIMIT}
    return {
        "description": str(PDDeployment.__doc__),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Always pdserving.dev/v1alpha1."},
            "kind": {"type": "string", "description": "Always PDDeployment."},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": structural_schema(PDDeploymentSpec, crd_rules.rules_of, numbers=numbers),
            "status": structural_schema(PDDeploymentStatus, defaults=False),
        },
    }


def _columns() -> list[dict[str, Any]]:
    def condition(kind: str, field: str = "status") -> str:
        return f'.status.conditions[?(@.type=="{kind}")].{field}'

    return [
        _column("Ready", condition("Ready")),
        _column("Model", ".spec.model.name"),
        _column("Prefill", ".status.prefill.ready"),
        _column("Decode", ".status.decode.ready"),
        _column("Router", ".status.router.ready"),
        _column("Bidirectional", condition("BidirectionalActive")),
        _column("Age", ".metadata.creationTimestamp", type="date"),
        _column("Reason", condition("Ready", "reason"), priority=1),
        _column("Transfers", condition("TransfersFlowing"), priority=1),
        _column("Generation", ".status.generation", priority=1),
        _column("URL", ".status.url", priority=1),
    ]


def _column(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "string", "jsonPath": path, **more}
