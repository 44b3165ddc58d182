"""`spec.model`, `spec.engine` and `spec.customProfile`: what both roles share.

What may differ between the roles is in `spec_role`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import (
    Backend,
    Device,
    Download,
    Dtype,
    ImagePullPolicy,
    SecurityProfile,
    Switch,
)
from pd_operator.core.fields import Argument, ObjectName, SpecModel
from pd_operator.core.spec_volumes import ClaimSource, EmptyDirSource, EngineVolumes, HostPathSource

LOCAL_PREFIXES = ("/", "./", "../")


class SecretKeyRef(SpecModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, pattern=fields.SECRET_KEY, description="Key in the Secret.")


class EnvVar(SpecModel):
    """One environment variable of an engine: a plain value, or a reference to a Secret."""

    name: str = Field(min_length=1, max_length=256, pattern=fields.ENV_NAME, description="Name of the variable.")
    value: str | None = Field(
        default=None, max_length=8192, description="Plain value. Never a credential: use secretKeyRef for those."
    )
    secret_key_ref: SecretKeyRef | None = Field(
        default=None,
        description="Take the value from a Secret. On one machine (pdctl up) the caller's own environment supplies it.",
    )


ExtraArgs = Annotated[tuple[Argument, ...], Field(max_length=128)]
Env = Annotated[tuple[EnvVar, ...], Field(max_length=128)]


class ModelSource(SpecModel):
    """Where weights come from. At most one of the three volumes may be set."""

    download: Download = Field(
        default=Download.ALLOWED,
        description="Forbidden: engines run with HF_HUB_OFFLINE=1 and never wait for a hub that they cannot reach.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None, description="Secret with the Hugging Face token. A token never stands in this object itself."
    )
    persistent_volume_claim: ClaimSource | None = Field(default=None, description="Mount an existing claim.")
    empty_dir: EmptyDirSource | None = Field(default=None, description="Download into space of the node.")
    host_path: HostPathSource | None = Field(default=None, description="Mount a folder of the node.")
    mount_path: str = Field(
        default="/models",
        min_length=1,
        max_length=1024,
        pattern=fields.MOUNT_PATH,
        description="Where the volume is mounted. HF_HOME points there.",
    )


class ModelSpec(SpecModel):
    """The model, equal on both roles."""

    name: str = Field(
        min_length=1,
        max_length=1024,
        pattern=fields.MODEL_NAME,
        description="Hugging Face repository, or a folder with the weights (a path that begins with / or ./ or ../). "
        "A relative one is read against the folder of the file by pdctl; in a pod it is the folder of that name below "
        "source.mountPath.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        pattern=fields.SERVED_NAME,
        description="Name that clients send as `model`. Absent: `name`, or the folder's own name for a path.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        pattern=fields.REVISION,
        description="Branch, tag or commit of the repository; pin a commit, since a moving branch gives P and D "
        "different weights. Absent: the repository's default branch.",
    )
    max_model_len: int | None = Field(
        default=None,
        strict=True,
        ge=256,
        le=16_777_216,
        description="Longest prompt plus answer in tokens. Absent: the model's own limit.",
    )
    dtype: Dtype = Field(default=Dtype.AUTO, description="Type of weights and activations. auto: as the model says.")
    source: ModelSource = Field(default=ModelSource(), description="Where the weights come from.")

    @property
    def is_local(self) -> bool:
        """Is `name` a folder rather than a repository?"""
        return self.name.startswith(LOCAL_PREFIXES)

    @property
    def public_name(self) -> str:
        """The name that clients send: `servedName`, or what stands in for it."""
        if self.served_name is not None:
            return self.served_name
        return self.name.rstrip("/").rpartition("/")[2] if self.is_local else self.name


class EngineSpec(SpecModel):
    """Settings of the vLLM process, equal on both roles."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        pattern=fields.IMAGE,
        description="Container image with vLLM and NIXL, for both roles; on EFA also with libfabric and NIXL's "
        "LIBFABRIC plugin. Required in a cluster. pdctl up uses the vLLM that is installed.",
    )
    image_pull_policy: ImagePullPolicy | None = Field(
        default=None, description="When the image is pulled. Absent: Always for the tag latest, otherwise IfNotPresent."
    )
    vllm_version: str | None = Field(
        default=None,
        min_length=3,
        max_length=64,
        pattern=fields.VERSION,
        description="vLLM version in the image, for images whose tag does not say it. Supported: 0.29 to 0.33. "
        "Absent: the tag's, or unknown.",
    )
    max_num_seqs: int = Field(
        default=256, strict=True, ge=1, le=65536, description="Most requests that one engine runs at once."
    )
    block_size: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=65536,
        description="Tokens per KV block. Absent: vLLM's choice for the device.",
    )
    gpu_memory_utilization_percent: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=100,
        description="Share of device memory that vLLM may use, in percent. Absent: vLLM's default.",
    )
    startup_timeout_seconds: int = Field(
        default=7200,
        strict=True,
        ge=60,
        le=86400,
        description="How long an engine may take from its start to its first healthy answer. Large models read from "
        "a network disk need most of an hour.",
    )
    shutdown_timeout_seconds: int = Field(
        default=120,
        strict=True,
        ge=0,
        le=3600,
        description="How long an engine may finish running requests after SIGTERM. 0 cuts them off at once. A decode "
        "engine that still retains blocks uses all of it.",
    )
    pre_stop_seconds: int | None = Field(
        default=None,
        strict=True,
        ge=0,
        le=3600,
        description="How long a pod goes on serving after its deletion began, before SIGTERM, so that routers drop it "
        "first. Absent: 15, on prefill at least kvTransfer.leaseDurationSeconds.",
    )
    shared_memory_gib: int | None = Field(
        default=None,
        alias="sharedMemoryGiB",
        strict=True,
        ge=1,
        le=4096,
        description="Size of /dev/shm in GiB; it counts as memory of the container, so it must be less than the "
        "memory limit of each role. Absent: by the node profile.",
    )
    security_profile: SecurityProfile = Field(
        default=SecurityProfile.DEFAULT,
        description="Default: root without capabilities, save IPC_LOCK where devices are used, because RDMA pins "
        "memory; files that belong to another user need their permission bits. Privileged: for nodes where that is not "
        "enough. Restricted: passes Pod Security restricted, for images that run as another "
        "user and nodes whose locked-memory limit is raised.",
    )
    run_as_user: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=2**31 - 1,
        description="User id with securityProfile Restricted. Absent: the image's own, which must be a number.",
    )
    host_network: Switch = Field(
        default=Switch.DISABLED,
        description="Enabled: engines use the node's network and its ports 8100 or 8200. EFA does not need it.",
    )
    self_test: Switch = Field(
        default=Switch.ENABLED,
        description="Enabled: an init container checks the image, the connector and the NIXL backend before the "
        "engine starts. Needs connector Verified.",
    )
    extra_args: ExtraArgs = Field(
        default=(), description="More vLLM arguments, one list entry per word, for both roles."
    )
    env: Env = Field(default=(), description="More environment variables, for both roles.")
    volumes: EngineVolumes = Field(
        default=(),
        description="More volumes, for both roles; a change is a new generation, since templates may lie in them. "
        "pdctl up has none.",
    )


class CustomProfile(SpecModel):
    """The machine, for nodeProfile Custom."""

    device: Device = Field(default=Device.CUDA, description="Where the KV cache lives.")
    accelerators_per_node: int = Field(
        default=1, strict=True, ge=1, le=64, description="Most accelerators that one engine can have."
    )
    default_backend: Backend = Field(
        default=Backend.UCX, description="NIXL backend when kvTransfer.backend is absent. LIBFABRIC needs EFA."
    )
