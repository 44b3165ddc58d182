"""A role's StatefulSet and its headless Service."""

from __future__ import annotations

from typing import Any

from pd_operator.core import names
from pd_operator.core.choices import Role, Scaling, UpdateStrategyType
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_engine_pod import engine_pod, engine_ports
from pd_operator.core.render_object import child, without_nothing
from pd_operator.core.spec_pod import UpdateStrategy


def statefulset(deployment: PDDeployment, role: Role, context: RenderContext, generation: str) -> dict[str, Any]:
    """One role's engines. With scaling External it says nothing about their number."""
    settings = deployment.role(role)
    name = names.role_name(deployment, role)
    replicas = {} if settings.scaling is Scaling.EXTERNAL else {"replicas": settings.replicas}
    spec = {
        **replicas,
        "serviceName": name,
        # Models load side by side, and one broken pod does not hold up the others.
        "podManagementPolicy": "Parallel",
        **({"minReadySeconds": settings.min_ready_seconds} if settings.min_ready_seconds else {}),
        "selector": {"matchLabels": names.engine_selector(deployment, role)},
        "updateStrategy": _update_strategy(settings.update_strategy),
        "template": engine_pod(deployment, role, context, generation),
    }
    return child(deployment, context, "apps/v1", "StatefulSet", name, _labels(deployment, role), spec=spec)


def headless_service(deployment: PDDeployment, role: Role, context: RenderContext) -> dict[str, Any]:
    """Names for a role's pods. Clients go through the router."""
    spec = {
        "clusterIP": "None",
        "selector": names.engine_selector(deployment, role),
        "ports": [
            {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
            for port, number in _service_ports(deployment, role).items()
        ],
    }
    name = names.role_name(deployment, role)
    return child(deployment, context, "v1", "Service", name, _labels(deployment, role), spec=spec)


def _service_ports(deployment: PDDeployment, role: Role) -> dict[str, int]:
    http, side_channel = engine_ports(deployment, role)
    return {"http": http, "nixl": side_channel}


def _labels(deployment: PDDeployment, role: Role) -> dict[str, str]:
    return {**names.child_labels(deployment, role.value), **names.engine_selector(deployment, role)}


def _update_strategy(wanted: UpdateStrategy) -> dict[str, Any]:
    if wanted.type is UpdateStrategyType.ON_DELETE:
        return {"type": wanted.type.value}
    # Without a partition, which no server fills in, pods that go missing during a rollout are made from the earlier
    # template.
    rolling = without_nothing({"partition": wanted.partition or 0, "maxUnavailable": wanted.max_unavailable})
    return {"type": wanted.type.value, "rollingUpdate": rolling}
