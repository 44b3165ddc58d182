"""What rendering needs besides the PDDeployment: facts about the operator's installation and the owner's identity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Same context and same deployment give the same manifests.

    ``uid`` is the owner's metadata.uid. ``image_pull_policy`` applies to the router's and the connector's image.
    ``operator_namespace`` is where the operator runs: only from there may it read the routers' admin port; empty
    allows an operator in any namespace. ``identity`` names the operator on every child; empty leaves that out.
    """

    uid: str
    router_image: str
    connector_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    operator_namespace: str = ""
    identity: str = ""
