"""Where files of an engine's pod come from: sources of volumes, and volumes besides the weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool

from pd_operator.core import fields
from pd_operator.core.fields import ObjectName, SpecModel


class ClaimSource(SpecModel):
    """An existing PersistentVolumeClaim with the weights or with the hub's cache."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    read_only: StrictBool = Field(default=False, description="Mount read-only; the weights must then be complete.")


class EmptyDirSource(SpecModel):
    """Space on the node that lives as long as the pod."""

    size_limit_gib: int | None = Field(
        default=None,
        alias="sizeLimitGiB",
        strict=True,
        ge=1,
        le=65536,
        description="Upper limit in GiB, for which a node must have room: it is added to the engine's request for "
        "ephemeral-storage. Absent: the node's free space, and no request.",
    )


class HostPathSource(SpecModel):
    """A folder of the node, for example a local NVMe disk with the weights on it."""

    path: str = Field(min_length=1, max_length=1024, pattern=fields.NODE_PATH, description="Absolute path on the node.")


class ObjectSource(SpecModel):
    """A ConfigMap or Secret in the same namespace: each key is a file."""

    name: ObjectName = Field(description="Name of the object.")


class EngineVolume(SpecModel):
    """Files for the engines, such as certificates, a chat template or compiled kernels. Exactly one source."""

    name: str = Field(min_length=1, max_length=40, pattern=fields.DNS_LABEL, description="Name of the volume.")
    mount_path: str = Field(
        min_length=2,
        max_length=1024,
        pattern=fields.MOUNT_PATH,
        description="Where the engine's container and its self-test see it.",
    )
    read_only: StrictBool = Field(
        default=False, description="Mount read-only. ConfigMaps and Secrets are read-only in any case."
    )
    config_map: ObjectSource | None = Field(default=None, description="Mount a ConfigMap.")
    secret: ObjectSource | None = Field(default=None, description="Mount a Secret.")
    persistent_volume_claim: ObjectSource | None = Field(
        default=None, description="Mount an existing PersistentVolumeClaim, the same for all engines."
    )
    empty_dir: EmptyDirSource | None = Field(default=None, description="Space on the node, as long as the pod lives.")
    host_path: HostPathSource | None = Field(default=None, description="Mount a folder of the node.")


EngineVolumes = Annotated[tuple[EngineVolume, ...], Field(max_length=16)]
