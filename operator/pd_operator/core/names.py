"""Names and labels of everything that belongs to a PDDeployment: one constructor per name, nobody formats in place.

Selectors leave the generation out because they are immutable, while pods of two generations live side by side during an
update.
"""

from __future__ import annotations

from typing import Final

from pd_operator.core.choices import Role
from pd_operator.core.model import PDDeployment
from pd_wire import names

MANAGED_BY: Final = "pd-operator"
ROUTER: Final = "router"


def role_name(deployment: PDDeployment, role: Role) -> str:
    """Name of a role's StatefulSet and of its headless Service."""
    return f"{deployment.metadata.name}-{role.value}"


def router_name(deployment: PDDeployment) -> str:
    """Name of the router's Deployment, Service, ServiceAccount and Role."""
    return f"{deployment.metadata.name}-{ROUTER}"


def engines_name(deployment: PDDeployment) -> str:
    """Name of what belongs to the engines of both roles."""
    return f"{deployment.metadata.name}-engines"


def engine_name(deployment: PDDeployment, role: Role, index: int) -> str:
    """Name of one engine, counted from 0: its pod, or its process on one machine."""
    return f"{role_name(deployment, role)}-{index}"


def engine_selector(deployment: PDDeployment, role: Role) -> dict[str, str]:
    """Labels that select one role's pods, of every generation."""
    return {names.LABEL_DEPLOYMENT: deployment.metadata.name, names.LABEL_ROLE: role.value}


def engine_labels(deployment: PDDeployment, role: Role, generation: str) -> dict[str, str]:
    """Labels of one role's pods."""
    return {
        **_common(deployment, role.value),
        **engine_selector(deployment, role),
        names.LABEL_GENERATION: generation,
    }


def router_selector(deployment: PDDeployment) -> dict[str, str]:
    """Labels that select the router's pods."""
    return {names.LABEL_DEPLOYMENT: deployment.metadata.name, names.LABEL_ROLE: ROUTER}


def child_labels(deployment: PDDeployment, component: str) -> dict[str, str]:
    """Labels of a child object that is no pod."""
    return {**_common(deployment, component), names.LABEL_DEPLOYMENT: deployment.metadata.name}


def router_labels(deployment: PDDeployment) -> dict[str, str]:
    """Labels of the router's pods."""
    return {**_common(deployment, ROUTER), **router_selector(deployment)}


def _common(deployment: PDDeployment, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": MANAGED_BY,
        "app.kubernetes.io/instance": deployment.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }
