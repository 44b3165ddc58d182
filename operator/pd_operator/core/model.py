"""PDDeployment as a value: the whole object, its defaults and the words that document it.

The custom resource definition is generated from these models, so nothing here may be what a structural schema cannot
say. Rules that span several fields are in `rules`, reading a raw object is in `parse`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import NodeProfile, Role
from pd_operator.core.fields import SpecModel
from pd_operator.core.spec_engine import CustomProfile, EngineSpec, ModelSpec
from pd_operator.core.spec_placement import NetworkPolicies, Topology
from pd_operator.core.spec_pod import SecretName
from pd_operator.core.spec_role import RoleSpec
from pd_operator.core.spec_router import RouterSpec
from pd_operator.core.spec_transfer import KVTransferSpec
from pd_wire import names

NAME_LIMIT: Final = 40
API_VERSION: Final = f"{names.API_GROUP}/{names.API_VERSION}"


class Metadata(SpecModel):
    """The part of Kubernetes object metadata that the product reads; the rest is ignored, since servers add to it."""

    model_config = {**SpecModel.model_config, "extra": "ignore"}

    name: str = Field(
        min_length=1,
        max_length=NAME_LIMIT,
        pattern=fields.DNS_LABEL,
        description="Name of the deployment. Short, because children add to it and pod labels end at 63 characters.",
    )
    namespace: str = Field(
        default="default", min_length=1, max_length=63, pattern=fields.DNS_LABEL, description="Namespace."
    )
    labels: dict[str, str] = Field(default={}, description="Labels.")
    annotations: dict[str, str] = Field(default={}, description="Annotations.")


class PDDeploymentSpec(SpecModel):
    """What is wanted."""

    model: ModelSpec = Field(description="The model that both roles serve.")
    engine: EngineSpec = Field(default=EngineSpec(), description="The vLLM process, equal on both roles.")
    node_profile: NodeProfile = Field(
        default=NodeProfile.P5EN_EFA,
        description="Kind of machine: P5enEFA (AWS p5en with EFA), CPU (one machine, for trying out), or Custom with "
        "customProfile. Sets device, backend and resources.",
    )
    custom_profile: CustomProfile | None = Field(default=None, description="The machine, for nodeProfile Custom.")
    prefill: RoleSpec = Field(default=RoleSpec(), description="Engines that compute prompts.")
    decode: RoleSpec = Field(default=RoleSpec(), description="Engines that generate answers.")
    router: RouterSpec = Field(default=RouterSpec(), description="The router in front of both.")
    kv_transfer: KVTransferSpec = Field(default=KVTransferSpec(), description="How KV moves between the roles.")
    topology: Topology = Field(default=Topology(), description="Where engines run in relation to each other.")
    network_policy: NetworkPolicies = Field(default=NetworkPolicies(), description="Who may talk to the pods.")
    image_pull_secrets: Annotated[tuple[SecretName, ...], Field(max_length=8)] = Field(
        default=(), description="Secrets for pulling images, for all pods, besides the operator's."
    )


class PDDeployment(SpecModel):
    """One model behind one address: prefill engines, decode engines, and a router that joins them."""

    api_version: Literal["pdserving.dev/v1alpha1"] = Field(description="Always pdserving.dev/v1alpha1.")
    kind: Literal["PDDeployment"] = Field(description="Always PDDeployment.")
    metadata: Metadata = Field(description="Name and labels.")
    spec: PDDeploymentSpec = Field(description="What is wanted.")

    def role(self, role: Role) -> RoleSpec:
        """The settings of one role."""
        return self.spec.prefill if role is Role.PREFILL else self.spec.decode

    def with_model_name(self, name: str) -> PDDeployment:
        """The same deployment with another `spec.model.name`: for a relative path that the caller has resolved."""
        model = self.spec.model
        if model.served_name is None:
            model = model.model_copy(update={"served_name": model.public_name})
        renamed = model.model_copy(update={"name": name})
        return self.model_copy(update={"spec": self.spec.model_copy(update={"model": renamed})})
