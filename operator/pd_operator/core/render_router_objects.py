"""The router's Deployment, its Service, and the right to see its own deployment's pods."""

from __future__ import annotations

from typing import Any, Final

from pd_operator.core import names
from pd_operator.core.choices import Scaling, SessionAffinity
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_object import child, literal, without_nothing
from pd_operator.core.render_placement import router_placement
from pd_operator.core.render_resources import router_resources
from pd_operator.core.render_router import render_router_in_cluster
from pd_operator.core.render_router_files import file_mounts, file_volumes

HTTP_PORT: Final = 8000
ADMIN_PORT: Final = 9000
COLLECTOR_HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
USER: Final = 65532
PRE_STOP_SECONDS: Final = 10
"""Until the Service's clients know that the pod is ending."""

GRACE_MARGIN_SECONDS: Final = 10


def router_access(deployment: PDDeployment, context: RenderContext) -> tuple[dict[str, Any], ...]:
    """ServiceAccount, Role and RoleBinding: list and watch pods of the own namespace, nothing else."""
    name, labels = names.router_name(deployment), _labels(deployment)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": deployment.metadata.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    rbac = "rbac.authorization.k8s.io/v1"
    return (
        child(deployment, context, "v1", "ServiceAccount", name, labels, automountServiceAccountToken=False),
        child(deployment, context, rbac, "Role", name, labels, rules=rules),
        child(deployment, context, rbac, "RoleBinding", name, labels, subjects=[subject], roleRef=role),
    )


def router_service(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    """The address that clients use."""
    service = deployment.spec.router.service
    affinity = service.session_affinity
    spec = without_nothing(
        {
            "type": service.type.value,
            "selector": names.router_selector(deployment),
            "ports": [
                without_nothing(
                    {
                        "name": "http",
                        "port": service.port,
                        "targetPort": "http",
                        "protocol": "TCP",
                        "appProtocol": None if deployment.spec.router.tls is None else "https",
                    }
                )
            ],
            "sessionAffinity": None if affinity is SessionAffinity.NONE else affinity.value,
        }
    )
    name = names.router_name(deployment)
    manifest = child(deployment, context, "v1", "Service", name, _labels(deployment), spec=spec)
    if service.annotations:
        metadata = manifest["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), **service.annotations}
    return manifest


def router_deployment(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    """The routers. A new template starts its pods before old ones end, so that no request finds none."""
    settings = deployment.spec.router
    replicas = {} if settings.scaling is Scaling.EXTERNAL else {"replicas": settings.replicas}
    spec = {
        **replicas,
        "selector": {"matchLabels": names.router_selector(deployment)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {
            "metadata": without_nothing(
                {
                    "labels": {**settings.pod.labels, **names.router_labels(deployment)},
                    "annotations": dict(settings.pod.annotations),
                }
            ),
            "spec": _pod_spec(deployment, context),
        },
    }
    name = names.router_name(deployment)
    return child(deployment, context, "apps/v1", "Deployment", name, _labels(deployment), spec=spec)


def _pod_spec(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    settings = deployment.spec.router
    secrets = [*context.image_pull_secrets, *(secret.name for secret in deployment.spec.image_pull_secrets)]
    fields = {
        **router_placement(deployment),
        "serviceAccountName": names.router_name(deployment),
        "containers": [_container(deployment, context)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *file_volumes(deployment)],
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "priorityClassName": settings.pod.priority_class_name,
        "runtimeClassName": settings.pod.runtime_class_name,
        "schedulerName": settings.pod.scheduler_name,
        "terminationGracePeriodSeconds": (PRE_STOP_SECONDS + settings.timeouts.drain_seconds + GRACE_MARGIN_SECONDS),
    }
    return {**without_nothing(fields), "enableServiceLinks": False, "automountServiceAccountToken": True}


def _container(deployment: PDDeployment, context: RenderContext) -> dict[str, Any]:
    process = render_router_in_cluster(deployment, f"0.0.0.0:{HTTP_PORT}", f"0.0.0.0:{ADMIN_PORT}")
    ready = {"httpGet": {"path": "/readyz", "port": "admin"}}
    alive = {"httpGet": {"path": "/healthz", "port": "admin"}}
    return without_nothing(
        {
            "name": "router",
            "image": deployment.spec.router.image or context.router_image,
            "imagePullPolicy": context.image_pull_policy,
            "command": [literal(word) for word in process.argv],
            "env": [
                *({"name": name, "value": literal(value)} for name, value in process.env.items()),
                *_collector_headers(deployment),
            ],
            "ports": [
                {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
                {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
            ],
            "startupProbe": {**alive, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 60},
            "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
            "livenessProbe": {**alive, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
            "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            "resources": router_resources(deployment),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *file_mounts(deployment)],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _collector_headers(deployment: PDDeployment) -> list[dict[str, Any]]:
    """By environment, where OpenTelemetry's exporter looks: on the command line everybody could read them."""
    tracing = deployment.spec.router.tracing
    reference = tracing.headers_secret_ref if tracing is not None else None
    if reference is None:
        return []
    found = {"secretKeyRef": {"name": reference.name, "key": reference.key}}
    return [{"name": COLLECTOR_HEADERS, "valueFrom": found}]


def _labels(deployment: PDDeployment) -> dict[str, str]:
    return {**names.child_labels(deployment, names.ROUTER), **names.router_selector(deployment)}
