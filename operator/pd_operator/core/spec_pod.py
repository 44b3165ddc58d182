"""What every pod may be told besides its program: where it runs, what it gets, how it is replaced.

Separate from roles and router because both use it, and because the names and meanings here are Kubernetes' own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from pd_operator.core import fields
from pd_operator.core.choices import NodeOperator, TaintEffect, TolerationOperator, UpdateStrategyType
from pd_operator.core.fields import AnnotationValue, LabelKey, LabelValue, ObjectName, SpecModel

INT_OR_STRING: Final[dict[str, Any]] = {"x-kubernetes-int-or-string": True}


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=fields.QUANTITY, json_schema_extra=INT_OR_STRING),
    BeforeValidator(_number_as_text),
]
ResourceName = Annotated[str, Field(min_length=1, max_length=317, pattern=fields.RESOURCE_NAME)]
Quantities = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[LabelKey, AnnotationValue], Field(max_length=32)]


class Resources(SpecModel):
    """Requests and limits of the main container. They add to what the node profile sets, name by name."""

    requests: Quantities = Field(
        default={}, description="What the scheduler reserves, such as cpu and memory. 0 takes a resource out."
    )
    limits: Quantities = Field(
        default={},
        description="What the container may use at most. Devices and huge pages are requested in the same amount. "
        "0 takes a resource out.",
    )


class Toleration(SpecModel):
    """A taint that the pod accepts."""

    key: str | None = Field(
        default=None,
        min_length=1,
        max_length=317,
        pattern=fields.QUALIFIED_NAME,
        description="Key of the taint. Absent, with operator Exists: every taint.",
    )
    operator: TolerationOperator = Field(
        default=TolerationOperator.EQUAL, description="Exists: any value of the key. Equal: the value given."
    )
    value: str | None = Field(
        default=None, max_length=63, pattern=fields.LABEL_VALUE, description="Value of the taint, for operator Equal."
    )
    effect: TaintEffect | None = Field(default=None, description="Effect of the taint. Absent: all effects.")
    toleration_seconds: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        le=2**31 - 1,
        description="How long a NoExecute taint is tolerated. Absent: for ever.",
    )


class NodeRequirement(SpecModel):
    """A condition on one label of the node."""

    key: str = Field(min_length=1, max_length=317, pattern=fields.QUALIFIED_NAME, description="Label of the node.")
    operator: NodeOperator = Field(description="How the label is compared.")
    values: Annotated[
        tuple[Annotated[str, Field(max_length=63, pattern=fields.LABEL_VALUE)], ...], Field(max_length=32)
    ] = Field(default=(), description="Values, for In and NotIn; one number, for Gt and Lt.")


class PodSettings(SpecModel):
    """Settings of one part's pods."""

    labels: Labels = Field(default={}, description="More labels of the pods.")
    annotations: Annotations = Field(default={}, description="More annotations of the pods.")
    node_selector: Labels | None = Field(
        default=None,
        description="Labels that a node must have, in place of the node profile's. {} means none. "
        "Absent: the node profile's.",
    )
    node_match_expressions: Annotated[tuple[NodeRequirement, ...], Field(max_length=16)] = Field(
        default=(), description="Conditions that a node must meet, all of them (required node affinity)."
    )
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = Field(
        default=(), description="Taints that the pods accept, besides the node profile's."
    )
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass of the pods.")
    scheduler_name: ObjectName | None = Field(
        default=None, description="Scheduler that places the pods. Absent: the cluster's default."
    )


class ResourceClaim(SpecModel):
    """Devices by dynamic resource allocation, for the engine and its self-test. Exactly one of the two sources."""

    name: str = Field(
        min_length=1, max_length=63, pattern=fields.DNS_LABEL, description="Name of the claim in the pod."
    )
    resource_claim_template_name: ObjectName | None = Field(
        default=None, description="ResourceClaimTemplate from which each pod gets a claim of its own."
    )
    resource_claim_name: ObjectName | None = Field(
        default=None, description="Existing ResourceClaim that all pods of the role share."
    )


class EnginePodSettings(PodSettings):
    """Settings of one role's pods."""

    resource_claims: Annotated[tuple[ResourceClaim, ...], Field(max_length=8)] = Field(
        default=(),
        description="Devices of a DRA driver, in place of counts: take those of the node profile out with 0 in "
        "resources.limits. A node has a device plugin or a DRA driver for a device, never both. Needs Kubernetes 1.34, "
        "or an older one with DynamicResourceAllocation.",
    )

    service_account_name: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the pods, for access to a cloud's storage. Its Kubernetes token is not mounted. "
        "Absent: the namespace's default.",
    )


class UpdateStrategy(SpecModel):
    """How pods of an old template are replaced."""

    type: UpdateStrategyType = Field(
        default=UpdateStrategyType.ROLLING_UPDATE,
        description="RollingUpdate: one after the other, highest index first. OnDelete: when somebody deletes them.",
    )
    partition: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        le=512,
        description="Only pods with at least this index are updated: a canary. With a new generation the other role "
        "follows in proportion. Absent: all.",
    )
    max_unavailable: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=512,
        description="How many pods may be missing during an update. Absent: 1. Needs Kubernetes with "
        "MaxUnavailableStatefulSet.",
    )


class SecretName(SpecModel):
    """A Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
