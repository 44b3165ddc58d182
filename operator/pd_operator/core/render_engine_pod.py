"""The pod of one engine: the connector and its self-test first, then the engine as the container's own process.

Only what this role's engine needs stands in the template, because every change of it restarts pods that load a model
for most of an hour.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pd_operator.core import names
from pd_operator.core.choices import Connector, Device, Role, SecurityProfile, Switch
from pd_operator.core.model import PDDeployment
from pd_operator.core.pod_profiles import HUGE_PAGES
from pd_operator.core.profiles import BACKEND_ENV, backend_of, profile_of
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_engine import NOT_BOUND, EngineEndpoint, kv_transfer_config, merged_env, render_engine
from pd_operator.core.render_object import literal, without_nothing
from pd_operator.core.render_placement import engine_placement
from pd_operator.core.render_resources import cores, engine_resources
from pd_operator.core.render_volumes import (
    CACHE_PATH,
    CONNECTOR_PATH,
    connector_mount,
    engine_mounts,
    engine_volumes,
    model_in_pod,
    volume_env,
)
from pd_operator.core.spec_pod import ResourceClaim
from pd_wire import names as wire

HTTP_PORT: Final = 8000
SIDE_CHANNEL_PORT: Final = 5600
HOST_SIDE_CHANNEL_STRIDE: Final = 100
"""On the host's network both roles may meet on one node, so decode's side channel lies this much higher."""

POD_IP: Final = "$(POD_IP)"
"""Filled in by the kubelet. Nothing else is: users' texts are taken literally."""

SIDE_CHANNEL_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PRE_STOP_SECONDS: Final = 15
"""Routers see within seconds that a pod is ending; until then it must still answer."""

GRACE_MARGIN_SECONDS: Final = 30
"""For the engine's own end after its shutdown timeout, before the kubelet kills it."""

PLUGIN_PATH: Final = "/plugin"
"""Where the connector's image has the plugin's packages."""

TERMINATION_LOG: Final = "/dev/termination-log"
"""Where the kubelet looks for a container's last words."""

PROBE_SECONDS: Final = 10
STARTUP_PROBE_SECONDS: Final = 5
"""Short, because a small engine is up within seconds; what it asks for costs a starting engine nothing."""


def engine_pod(deployment: PDDeployment, role: Role, context: RenderContext, generation: str) -> dict[str, Any]:
    """The pod template of one role: metadata and spec."""
    settings = deployment.role(role)
    labels = {**settings.pod.labels, **names.engine_labels(deployment, role, generation)}
    annotations = {
        # Moving a pod to a cheaper node costs the load of a model.
        "karpenter.sh/do-not-disrupt": "true",
        "kubectl.kubernetes.io/default-container": "engine",
        **settings.pod.annotations,
    }
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": _pod_spec(deployment, role, context)}


def termination_grace_seconds(deployment: PDDeployment, role: Role) -> int:
    """From the deletion of a pod to SIGKILL. A decode engine that retains blocks uses all of its shutdown timeout."""
    shutdown = deployment.spec.engine.shutdown_timeout_seconds
    return pre_stop_seconds(deployment, role) + shutdown + GRACE_MARGIN_SECONDS


def pre_stop_seconds(deployment: PDDeployment, role: Role) -> int:
    """From the deletion of a pod to SIGTERM. P waits for a lease, so that decode engines can still read from it."""
    chosen = deployment.spec.engine.pre_stop_seconds
    if chosen is not None:
        return chosen
    lease = deployment.spec.kv_transfer.lease_duration_seconds
    return max(PRE_STOP_SECONDS, lease) if role is Role.PREFILL else PRE_STOP_SECONDS


def engine_ports(deployment: PDDeployment, role: Role) -> tuple[int, int]:
    """Port of the HTTP API and of the side channel."""
    if deployment.spec.engine.host_network is Switch.DISABLED:
        return HTTP_PORT, SIDE_CHANNEL_PORT
    ports = profile_of(deployment.spec).ports
    if role is Role.PREFILL:
        return ports.prefill_http, ports.side_channel
    return ports.decode_http, ports.side_channel + HOST_SIDE_CHANNEL_STRIDE


def has_connector(deployment: PDDeployment) -> bool:
    """Is our plugin brought into the pods?"""
    return deployment.spec.kv_transfer.connector is Connector.VERIFIED


def connector_image(deployment: PDDeployment, context: RenderContext) -> str | None:
    """The image that brings the plugin, or None with the stock connector."""
    return (
        (deployment.spec.kv_transfer.connector_image or context.connector_image) if has_connector(deployment) else None
    )


def _pod_spec(deployment: PDDeployment, role: Role, context: RenderContext) -> dict[str, Any]:
    settings, spec = deployment.role(role), deployment.spec
    with_connector = has_connector(deployment)
    on_host = spec.engine.host_network is Switch.ENABLED
    secrets = [*context.image_pull_secrets, *(secret.name for secret in spec.image_pull_secrets)]
    fields = {
        **engine_placement(deployment, role),
        "initContainers": _init_containers(deployment, role, context),
        "containers": [_engine(deployment, role)],
        "volumes": engine_volumes(deployment, role, with_connector),
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
        "hostNetwork": True if on_host else None,
        "dnsPolicy": "ClusterFirstWithHostNet" if on_host else None,
        "securityContext": _pod_security(deployment),
        "serviceAccountName": settings.pod.service_account_name,
        "priorityClassName": settings.pod.priority_class_name,
        "runtimeClassName": settings.pod.runtime_class_name,
        "schedulerName": settings.pod.scheduler_name,
        "resourceClaims": [_claim(one) for one in settings.pod.resource_claims],
        "terminationGracePeriodSeconds": termination_grace_seconds(deployment, role),
    }
    # Variables that Kubernetes makes from Services, such as VLLM_PORT, would be read as vLLM's own.
    return {**without_nothing(fields), "enableServiceLinks": False, "automountServiceAccountToken": False}


def _init_containers(deployment: PDDeployment, role: Role, context: RenderContext) -> list[dict[str, Any]]:
    image = connector_image(deployment, context)
    if image is None:
        return []
    copy = without_nothing(
        {
            "name": "connector",
            "image": image,
            "imagePullPolicy": context.image_pull_policy,
            "command": ["cp", "-R", f"{PLUGIN_PATH}/.", CONNECTOR_PATH],
            "volumeMounts": [connector_mount(read_only=False)],
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
            "securityContext": _copy_security(deployment),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )
    return [copy, _self_test(deployment, role)] if deployment.spec.engine.self_test is Switch.ENABLED else [copy]


def _self_test(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    """The engine's container with another command: same image, devices, variables and volumes."""
    config = json.dumps(kv_transfer_config(deployment, role), separators=(",", ":"))
    backend = backend_of(deployment.spec).value
    test = ["python3", "-m", "pd_connector.selftest", "--backend", backend, "--kv-transfer-config", literal(config)]
    container = _container(deployment, role, wire.SELF_TEST_CONTAINER)
    # What it found becomes the container's last words, which the operator sees with the pod.
    report = {"name": wire.SELF_TEST_REPORT, "value": TERMINATION_LOG}
    env = [variable for variable in container["env"] if variable["name"] != wire.SELF_TEST_REPORT]
    return {**container, "command": test, "env": [*env, report]}


def _engine(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    http, side_channel = engine_ports(deployment, role)
    process = render_engine(model_in_pod(deployment), role, _endpoint(deployment, role))
    health = {"httpGet": {"path": "/health", "port": "http"}}
    startup = deployment.spec.engine.startup_timeout_seconds
    return {
        **_container(deployment, role, "engine"),
        # The program itself, without a shell: SIGTERM must reach it.
        "command": [literal(word) for word in process.argv],
        "ports": [
            {"name": "http", "containerPort": http, "protocol": "TCP"},
            {"name": "nixl", "containerPort": side_channel, "protocol": "TCP"},
        ],
        "startupProbe": {
            **health,
            "periodSeconds": STARTUP_PROBE_SECONDS,
            "timeoutSeconds": PROBE_SECONDS,
            "failureThreshold": -(-startup // STARTUP_PROBE_SECONDS),
        },
        # A saturated engine answers late; both limits are wide, because a restart costs the load of a model.
        "readinessProbe": {
            **health,
            "periodSeconds": PROBE_SECONDS,
            "timeoutSeconds": PROBE_SECONDS,
            "failureThreshold": 6,
        },
        "livenessProbe": {**health, "periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": 5},
        **_lifecycle(pre_stop_seconds(deployment, role)),
    }


def _lifecycle(seconds: int) -> dict[str, Any]:
    # The kubelet's own sleep: the image need not have one.
    return {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}} if seconds else {}


def _container(deployment: PDDeployment, role: Role, name: str) -> dict[str, Any]:
    engine = deployment.spec.engine
    return without_nothing(
        {
            "name": name,
            "image": engine.image,
            "imagePullPolicy": engine.image_pull_policy.value if engine.image_pull_policy else None,
            "env": _env(deployment, role),
            "resources": _resources(deployment, role),
            "volumeMounts": engine_mounts(deployment, has_connector(deployment)),
            "securityContext": _security(deployment),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _resources(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    claims = [{"name": one.name} for one in deployment.role(role).pod.resource_claims]
    return without_nothing({**engine_resources(deployment, role), "claims": claims})


def _claim(wanted: ResourceClaim) -> dict[str, Any]:
    return without_nothing(
        {
            "name": wanted.name,
            "resourceClaimTemplateName": wanted.resource_claim_template_name,
            "resourceClaimName": wanted.resource_claim_name,
        }
    )


def _endpoint(deployment: PDDeployment, role: Role) -> EngineEndpoint:
    http, side_channel = engine_ports(deployment, role)
    return EngineEndpoint("0.0.0.0", http, POD_IP, side_channel, NOT_BOUND)


def _env(deployment: PDDeployment, role: Role) -> list[dict[str, Any]]:
    """Variables of the engine's container. POD_IP comes first, since later ones refer to it."""
    spec, settings = deployment.spec, deployment.role(role)
    mine = _surroundings(deployment, role)
    process = {**mine, **render_engine(deployment, role, _endpoint(deployment, role)).env}
    if has_connector(deployment):
        theirs = process.get("PYTHONPATH")
        process["PYTHONPATH"] = f"{CONNECTOR_PATH}:{theirs}" if theirs else CONNECTOR_PATH
    variables: dict[str, dict[str, Any]] = {
        "POD_IP": {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    }
    for name, value in process.items():
        text = POD_IP if name == SIDE_CHANNEL_HOST else literal(value)
        # A server does not keep an empty value.
        variables[name] = {"name": name, "value": text} if text else {"name": name}
    token = spec.model.source.token_secret_ref
    if token is not None:
        variables["HF_TOKEN"] = _from_secret("HF_TOKEN", token.name, token.key, optional=True)
    engine_key = spec.router.auth.engine_key_secret_ref
    if engine_key is not None:
        variables["VLLM_API_KEY"] = _from_secret("VLLM_API_KEY", engine_key.name, engine_key.key)
    for variable in merged_env(spec.engine, settings):
        if variable.secret_key_ref is not None:
            reference = variable.secret_key_ref
            variables[variable.name] = _from_secret(variable.name, reference.name, reference.key)
    return list(variables.values())


def _surroundings(deployment: PDDeployment, role: Role) -> dict[str, str]:
    """What only a pod sets; the profile's and the user's variables win over it."""
    env = volume_env(deployment)
    resources = engine_resources(deployment, role)
    if profile_of(deployment.spec).device is Device.CPU:
        env["OMP_NUM_THREADS"] = str(cores(resources))
    if "FI_PROVIDER" in BACKEND_ENV[backend_of(deployment.spec)]:
        # Without reserved pages libfabric takes the node's, and forking fails when they are gone.
        env["FI_EFA_USE_HUGE_PAGE"] = "1" if HUGE_PAGES in resources.get("limits", {}) else "0"
    if deployment.spec.engine.security_profile is SecurityProfile.RESTRICTED:
        env["HOME"] = CACHE_PATH
    return env


def _from_secret(name: str, secret: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    return {
        "name": name,
        "valueFrom": {"secretKeyRef": {**reference, "optional": True} if optional else reference},
    }


def _security(deployment: PDDeployment) -> dict[str, Any]:
    profile = deployment.spec.engine.security_profile
    if profile is SecurityProfile.PRIVILEGED:
        return {"privileged": True, "runAsUser": 0}
    if profile is SecurityProfile.RESTRICTED:
        return _restricted()
    security = {**_restricted(), "runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    if profile_of(deployment.spec).device is Device.CPU:
        return security
    # RDMA pins memory, and Kubernetes has no field for the limit; the capability counts for root only.
    return {**security, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def _copy_security(deployment: PDDeployment) -> dict[str, Any]:
    """Of the container that copies the plugin: it needs nothing, whatever the engine may do."""
    if deployment.spec.engine.security_profile is SecurityProfile.RESTRICTED:
        return _restricted()  # The rest is the pod's.
    return {**_restricted(), "seccompProfile": {"type": "RuntimeDefault"}}


def _restricted() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _pod_security(deployment: PDDeployment) -> dict[str, Any]:
    engine = deployment.spec.engine
    if engine.security_profile is not SecurityProfile.RESTRICTED:
        return {}
    fields: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if engine.run_as_user is not None:
        # The group makes volumes writable for a user that the image does not know.
        fields |= {"runAsUser": engine.run_as_user, "runAsGroup": engine.run_as_user, "fsGroup": engine.run_as_user}
    return fields
