"""Disruption budgets and network policies."""

from __future__ import annotations

from typing import Any

from pd_operator.core import names
from pd_operator.core.choices import Role, Scaling, Switch
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_engine_pod import engine_ports
from pd_operator.core.render_object import child
from pd_operator.core.render_placement import engines_selector
from pd_operator.core.render_router_objects import ADMIN_PORT, HTTP_PORT

NAMESPACE_NAME = "kubernetes.io/metadata.name"
OPERATOR_LABELS = {"app.kubernetes.io/name": "pd-operator", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's own pods, as its chart sets them."""


def disruption_budgets(deployment: PDDeployment, context: RenderContext) -> tuple[dict[str, Any], ...]:
    """One eviction at a time. Not for a single pod: a budget would only be in the way of a node drain."""
    budgets = []
    for role in Role:
        settings = deployment.role(role)
        several = settings.replicas > 1 or settings.scaling is Scaling.EXTERNAL
        if several and settings.pod_disruption_budget is Switch.ENABLED:
            name, selector = names.role_name(deployment, role), names.engine_selector(deployment, role)
            budgets.append(_budget(deployment, context, name, role.value, selector))
    router = deployment.spec.router
    several = router.replicas > 1 or router.scaling is Scaling.EXTERNAL
    if several and router.pod_disruption_budget is Switch.ENABLED:
        name, selector = names.router_name(deployment), names.router_selector(deployment)
        budgets.append(_budget(deployment, context, name, names.ROUTER, selector))
    return tuple(budgets)


def _budget(
    deployment: PDDeployment, context: RenderContext, name: str, component: str, selector: dict[str, str]
) -> dict[str, Any]:
    spec = {
        "maxUnavailable": 1,
        # A pod that never becomes ready must not block the drain of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector},
    }
    labels = {**names.child_labels(deployment, component), **selector}
    return child(deployment, context, "policy/v1", "PodDisruptionBudget", name, labels, spec=spec)


def network_policies(deployment: PDDeployment, context: RenderContext) -> tuple[dict[str, Any], ...]:
    """Who may connect to engines and routers. What pods connect to stays open: hub, registry, API server."""
    if deployment.spec.network_policy.mode is Switch.DISABLED:
        return ()
    return (_engines_policy(deployment, context), _router_policy(deployment, context))


def _engines_policy(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    http = sorted({engine_ports(deployment, role)[0] for role in Role})
    ingress: list[dict[str, Any]] = [
        {
            "from": [{"podSelector": {"matchLabels": names.router_selector(deployment)}}],
            "ports": [_port(number) for number in http],
        },
        # All ports between engines: UCX over TCP listens where the kernel lets it.
        {"from": [{"podSelector": engines_selector(deployment)}]},
    ]
    monitoring = _monitoring(deployment)
    if monitoring:
        ingress.append({"from": monitoring, "ports": [_port(number) for number in http]})
    spec = {"podSelector": engines_selector(deployment), "policyTypes": ["Ingress"], "ingress": ingress}
    return _policy(deployment, context, names.engines_name(deployment), "engines", spec)


def _router_policy(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    operator: dict[str, Any] = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    if context.operator_namespace:
        operator["namespaceSelector"] = {"matchLabels": {NAMESPACE_NAME: context.operator_namespace}}
    ingress = [
        {"ports": [_port(HTTP_PORT)]},
        {"from": [operator, *_monitoring(deployment)], "ports": [_port(ADMIN_PORT)]},
    ]
    selector = {"matchLabels": names.router_selector(deployment)}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return _policy(deployment, context, names.router_name(deployment), names.ROUTER, spec)


def _policy(
    deployment: PDDeployment, context: RenderContext, name: str, component: str, spec: dict[str, Any]
) -> dict[str, Any]:
    labels = names.child_labels(deployment, component)
    return child(deployment, context, "networking.k8s.io/v1", "NetworkPolicy", name, labels, spec=spec)


def _monitoring(deployment: PDDeployment) -> list[dict[str, Any]]:
    namespaces = deployment.spec.network_policy.monitoring_namespaces
    return [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}} for name in namespaces]


def _port(number: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": number}
