"""`spec.prefill` and `spec.decode`: what may differ between the roles, and where and how many."""

from __future__ import annotations

from pydantic import Field, StrictBool

from pd_operator.core.choices import Scaling, Switch
from pd_operator.core.fields import Replicas, SpecModel
from pd_operator.core.spec_engine import Env, ExtraArgs
from pd_operator.core.spec_pod import EnginePodSettings, Resources, UpdateStrategy


class RoleSpec(SpecModel):
    """One role's engines."""

    replicas: Replicas = Field(default=1, description="Number of engines. 0 means that requests get a 503.")
    scaling: Scaling = Field(
        default=Scaling.FIXED,
        description="Fixed: `replicas` decides. External: an autoscaler that targets the role's StatefulSet decides, "
        "and `replicas` is not applied.",
    )
    tensor_parallel_size: int = Field(
        default=1, strict=True, ge=1, le=64, description="Accelerators per engine, all on one node."
    )
    max_num_seqs: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=65536,
        description="Most requests that one engine of this role runs at once. Absent: engine.maxNumSeqs.",
    )
    prefix_caching: StrictBool = Field(
        default=True,
        description="false turns the engine's own prefix cache off. true leaves vLLM's default, which is on for "
        "models that allow it.",
    )
    extra_args: ExtraArgs = Field(
        default=(), description="More vLLM arguments for this role only, after those of `spec.engine`."
    )
    env: Env = Field(default=(), description="More environment variables for this role; they win over `spec.engine`.")
    resources: Resources = Field(
        default=Resources(),
        description="Requests and limits of the engine. Absent: what the node profile sets for tensorParallelSize.",
    )
    pod: EnginePodSettings = Field(default=EnginePodSettings(), description="Placement and metadata of the pods.")
    update_strategy: UpdateStrategy = Field(
        default=UpdateStrategy(), description="How pods are replaced when their template changes."
    )
    min_ready_seconds: int = Field(
        default=10,
        strict=True,
        ge=0,
        le=3600,
        description="How long a new pod must stay ready before the next one is replaced.",
    )
    pod_disruption_budget: Switch = Field(
        default=Switch.ENABLED,
        description="Enabled: node drains evict one engine of the role at a time. There is none for a single engine.",
    )
