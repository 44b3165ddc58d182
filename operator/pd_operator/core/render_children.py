"""Every child of one PDDeployment as plain objects, in the order in which they are applied.

Only fields that the operator decides about: what is not sent is left to the server's defaults, to autoscalers and to
users. Nothing here looks at what exists; a child that is no longer in the list is to be deleted.
"""

from __future__ import annotations

from typing import Any

from pd_operator.core import rules_cluster
from pd_operator.core.choices import Role
from pd_operator.core.generation import generation
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import SpecError
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_engine_pod import connector_image
from pd_operator.core.render_policies import disruption_budgets, network_policies
from pd_operator.core.render_router_objects import router_access, router_deployment, router_service
from pd_operator.core.render_statefulset import headless_service, statefulset

__all__ = ["RenderContext", "cluster_generation", "render_children"]


def render_children(deployment: PDDeployment, context: RenderContext) -> tuple[dict[str, Any], ...]:
    """All children.

    Raises:
        SpecError: the deployment can run on one machine but not in a cluster, for example without an image.
    """
    problems = rules_cluster.check(deployment)
    if problems:
        raise SpecError(problems, deployment.metadata.name)
    paired = cluster_generation(deployment, context)
    return (
        *router_access(deployment, context),
        *(headless_service(deployment, role, context) for role in Role),
        router_service(deployment, context),
        *network_policies(deployment, context),
        *disruption_budgets(deployment, context),
        *(statefulset(deployment, role, context, paired) for role in Role),
        router_deployment(deployment, context),
    )


def cluster_generation(deployment: PDDeployment, context: RenderContext) -> str:
    """The value of the generation label: the deployment's, and the connector that is brought into the pods.

    Both sides of a proof must be made by the same release of the connector.
    """
    return generation(deployment, connector_image(deployment, context))
