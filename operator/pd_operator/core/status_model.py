"""`status` of a PDDeployment: what the operator reports, as a value.

Separate from the spec models because it is written by the operator, never by people, and because it is read leniently:
an older operator must not fail over a status that a newer one wrote. The status part of the custom resource definition
is generated from here. Nothing in it grows with the number of pods or changes while nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from pd_operator.core import fields

CONDITIONS_LIMIT: Final = 16
TIME: Final[dict[str, Any]] = {"format": "date-time"}

Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
# As JSON numbers are read: an API server refuses a status whose schema has a bound that doubles can't hold.
Generation = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1, json_schema_extra={"format": "int64"})]


class ConditionStatus(StrEnum):
    """Does a condition hold?"""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class StatusModel(BaseModel):
    """Base of the status models: immutable, camelCase outside, snake_case inside, unknown fields ignored."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class Condition(StatusModel):
    """One aspect of the deployment, in the form that all of Kubernetes uses."""

    type: str = Field(
        min_length=1, max_length=316, pattern=fields.CONDITION_TYPE, description="What is judged, such as Ready."
    )
    status: ConditionStatus = Field(description="Does it hold?")
    reason: str = Field(
        min_length=1, max_length=1024, pattern=fields.CONDITION_WORD, description="Why, as one word for programs."
    )
    message: str = Field(default="", max_length=32768, description="Why, as a sentence for people.")
    last_transition_time: str = Field(
        min_length=1,
        max_length=64,
        json_schema_extra=TIME,
        description="When `status` last changed, as an RFC 3339 time.",
    )
    observed_generation: Generation = Field(default=0, description="The metadata.generation that was judged.")


class RoleStatus(StatusModel):
    """How many pods of one part there are."""

    replicas: Count = Field(default=0, description="Pods that exist.")
    ready_replicas: Count = Field(default=0, description="Pods that are ready.")
    updated_replicas: Count = Field(default=0, description="Pods that run the current template.")
    ready: str = Field(default="", max_length=32, description="Ready and wanted pods as text, such as 1/2.")
    selector: str = Field(default="", max_length=1024, description="Label selector of the pods, as text.")


class EngineVersions(StatusModel):
    """What runs inside the engines, as far as it is known."""

    vllm_version: str = Field(
        default="",
        alias="vllmVersion",
        max_length=64,
        description="Version of vLLM, found by the self-test; before it, what the spec or the image's tag says.",
    )
    nixl_version: str = Field(
        default="", max_length=64, description="Version of NIXL, found by the self-test; empty without one."
    )
    connector_version: str = Field(default="", max_length=64, description="Version of the KV connector, by its tag.")


class PDDeploymentStatus(StatusModel):
    """What the operator has seen and done."""

    observed_generation: Generation = Field(
        default=0, description="The metadata.generation that this status belongs to."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=CONDITIONS_LIMIT)] = Field(
        default=(),
        description="Ready is the summary; the others say more.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    generation: str = Field(
        default="",
        max_length=63,
        description="Hash of everything that prefill and decode must agree on; only equal ones are paired.",
    )
    prefill: RoleStatus = Field(default=RoleStatus(), description="The prefill engines.")
    decode: RoleStatus = Field(default=RoleStatus(), description="The decode engines.")
    router: RoleStatus = Field(default=RoleStatus(), description="The routers.")
    url: str = Field(default="", max_length=512, description="Base address of the router inside the cluster.")
    engine: EngineVersions = Field(default=EngineVersions(), description="Versions inside the engines.")

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, or None when it was never judged."""
        return next((one for one in self.conditions if one.type == kind), None)

    def stands_in(self, live: Any) -> bool:
        """Does the live status say all of this already? Conditions of other types are somebody else's, and stay."""
        if not isinstance(live, Mapping):
            return False
        found, wanted = dict(live), self.document()
        there = {one.get("type"): one for one in found.pop("conditions", None) or ()}
        return all(there.get(one["type"]) == one for one in wanted.pop("conditions")) and found == wanted

    def document(self) -> dict[str, Any]:
        """The value of `status` as an API server takes it."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
