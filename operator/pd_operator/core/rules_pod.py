"""Rules about pods: labels, tolerations, node conditions, resources, update strategies; mounts are in `rules_volumes`.

An API server would refuse most of these too, but only in the pod template, long after the edit that caused it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pd_operator.core.choices import (
    Connector,
    NodeOperator,
    NodeProfile,
    Role,
    SecurityProfile,
    TolerationOperator,
    UpdateStrategyType,
)
from pd_operator.core.model import PDDeployment
from pd_operator.core.pod_profiles import GPU
from pd_operator.core.problems import Problem
from pd_operator.core.render_resources import amount, engine_resources, is_device
from pd_operator.core.spec_pod import NodeRequirement, PodSettings, Resources
from pd_wire import names as wire

OWN_LABELS = (f"{wire.API_GROUP}/", "app.kubernetes.io/", "apps.kubernetes.io/", "statefulset.kubernetes.io/")
CONTROLLERS_LABELS = ("controller-revision-hash", "pod-template-hash")
SET_FOR_YOU = f"{', '.join(CONTROLLERS_LABELS)} and keys that begin with {' or '.join(OWN_LABELS)} are set for you"
WHOLE = r"^[0-9]+(k|Ki|M|Mi|G|Gi|T|Ti)?$"
NOT_PAGES = "must be a multiple of the size of its pages"
HUGE = "hugepages-"
QUOTA = "requests."
NO_QUOTA = f"a name that begins with {QUOTA} stands in quotas only; leave {QUOTA} out"
PREFIX_LIMIT = 253
RESOURCE_PREFIX_LIMIT = PREFIX_LIMIT - len(QUOTA)
"""A quota's name for it must be a key as well."""
LONG_PREFIX = "a key's part before the / has at most {} characters"
NOT_WHOLE = "devices and huge pages must be whole numbers, such as 1 or 640Mi"
PART_OF_A_BYTE = r"(m|\.[0-9]+)$"
NO_BYTES = "memory and ephemeral-storage must be whole bytes, such as 512Mi; the unit m is a thousandth of a byte"
BYTES = ("memory", "ephemeral-storage")
TOO_FEW_DEVICES = (
    f"{GPU} must be at least tensorParallelSize, or 0 with devices of another name; leave it out to get one each"
)
TOO_MUCH_SHARED = "must be less than the memory limit of each role, since shared memory counts as memory"
ROLES = ("prefill", "decode")
PARTS = (*ROLES, "router")
CLAIM_SOURCES = ("resourceClaimTemplateName", "resourceClaimName")
WITHOUT_VALUES = (NodeOperator.EXISTS, NodeOperator.DOES_NOT_EXIST)
COMPARING = (NodeOperator.GT, NodeOperator.LT)


def labels(deployment: PDDeployment) -> Iterator[Problem]:
    """Labels by which children find each other are not the user's."""
    for path, settings in _pods(deployment):
        for key in settings.labels:
            if key in CONTROLLERS_LABELS or key.startswith(OWN_LABELS):
                yield Problem(f"{path}.labels.{key}", SET_FOR_YOU)


def long_keys(deployment: PDDeployment) -> Iterator[Problem]:
    """A key's domain is as long as a domain may be."""
    for path, keys in _keys(deployment):
        limit = RESOURCE_PREFIX_LIMIT if ".resources." in path else PREFIX_LIMIT
        for key in keys:
            if key.find("/") > limit:
                yield Problem(path, f"{LONG_PREFIX.format(limit)}; got {key[:40]}…")


def _keys(deployment: PDDeployment) -> Iterator[tuple[str, Iterable[str]]]:
    yield "spec.router.service.annotations", deployment.spec.router.service.annotations
    for path, settings in _pods(deployment):
        yield f"{path}.labels", settings.labels
        yield f"{path}.annotations", settings.annotations
        yield f"{path}.nodeSelector", settings.node_selector or {}
        for index, wanted in enumerate(settings.tolerations):
            yield f"{path}.tolerations[{index}].key", [wanted.key or ""]
        for index, condition in enumerate(settings.node_match_expressions):
            yield f"{path}.nodeMatchExpressions[{index}].key", [condition.key]
    for part in PARTS:
        wanted_resources: Resources = getattr(deployment.spec, part).resources
        yield f"spec.{part}.resources.requests", wanted_resources.requests
        yield f"spec.{part}.resources.limits", wanted_resources.limits


def tolerations(deployment: PDDeployment) -> Iterator[Problem]:
    """A toleration says what Kubernetes can read."""
    for path, settings in _pods(deployment):
        for index, wanted in enumerate(settings.tolerations):
            place = f"{path}.tolerations[{index}]"
            if wanted.operator is TolerationOperator.EXISTS and wanted.value:
                yield Problem(f"{place}.value", "must be left out with operator Exists")
            if wanted.operator is TolerationOperator.EQUAL and wanted.key is None:
                yield Problem(f"{place}.key", "is required with operator Equal")
            if wanted.toleration_seconds is not None and (wanted.effect is None or wanted.effect.value != "NoExecute"):
                yield Problem(f"{place}.tolerationSeconds", "may be set with effect NoExecute only")


def node_conditions(deployment: PDDeployment) -> Iterator[Problem]:
    """A condition on a node's label has the values that its operator needs."""
    for path, settings in _pods(deployment):
        for index, wanted in enumerate(settings.node_match_expressions):
            what = _values_fault(wanted)
            if what is not None:
                yield Problem(f"{path}.nodeMatchExpressions[{index}].values", what)


def _values_fault(wanted: NodeRequirement) -> str | None:
    if wanted.operator in WITHOUT_VALUES:
        return f"must be left out with operator {wanted.operator.value}" if wanted.values else None
    if wanted.operator in COMPARING:
        one_number = len(wanted.values) == 1 and wanted.values[0].isdigit()
        return None if one_number else f"must be one whole number with operator {wanted.operator.value}"
    return None if wanted.values else f"must not be empty with operator {wanted.operator.value}"


def resources(deployment: PDDeployment) -> Iterator[Problem]:
    """Requests stay within limits, devices are asked for once, and what has no parts is whole."""
    for part in PARTS:
        wanted: Resources = getattr(deployment.spec, part).resources
        for side, quantities in (("requests", wanted.requests), ("limits", wanted.limits)):
            for name, quantity in quantities.items():
                if name.startswith(QUOTA):
                    yield Problem(f"spec.{part}.resources.{side}.{name}", NO_QUOTA)
                if is_device(name) and not re.search(WHOLE, quantity):
                    yield Problem(f"spec.{part}.resources.{side}.{name}", f"{NOT_WHOLE}; got {quantity}")
                elif name.startswith(HUGE) and amount(quantity) % amount(name.removeprefix(HUGE)):
                    yield Problem(f"spec.{part}.resources.{side}.{name}", f"{NOT_PAGES}; got {quantity}")
                if name in BYTES and re.search(PART_OF_A_BYTE, quantity):
                    yield Problem(f"spec.{part}.resources.{side}.{name}", f"{NO_BYTES}; got {quantity}")
        for name, request in wanted.requests.items():
            limit = wanted.limits.get(name)
            if limit is None:
                continue
            path = f"spec.{part}.resources.requests.{name}"
            if is_device(name) and amount(request) != amount(limit):
                yield Problem(path, f"must equal the limit ({limit}), or be left out; got {request}")
            elif amount(request) > amount(limit):
                yield Problem(path, f"must be at most the limit ({limit}); got {request}")


def devices(deployment: PDDeployment) -> Iterator[Problem]:
    """Each of an engine's processes has a device."""
    for role in ROLES:
        settings = getattr(deployment.spec, role)
        for side in ("requests", "limits"):
            number = getattr(settings.resources, side).get(GPU)
            if number is not None and 0 < amount(number) < settings.tensor_parallel_size:
                what = f"{TOO_FEW_DEVICES}; got {number} with tensorParallelSize {settings.tensor_parallel_size}"
                yield Problem(f"spec.{role}.resources.{side}.{GPU}", what)


def shared_memory(deployment: PDDeployment) -> Iterator[Problem]:
    """Shared memory leaves room in the container's memory."""
    chosen, spec = deployment.spec.engine.shared_memory_gib, deployment.spec
    if chosen is None or (spec.node_profile is NodeProfile.CUSTOM and spec.custom_profile is None):
        return
    for role in Role:
        limit = engine_resources(deployment, role).get("limits", {}).get("memory")
        if limit is not None and amount(f"{chosen}Gi") >= amount(limit):
            what = f"{TOO_MUCH_SHARED} (spec.{role.value}: {limit}); got {chosen}"
            yield Problem("spec.engine.sharedMemoryGiB", what)


def update_strategy(deployment: PDDeployment) -> Iterator[Problem]:
    """A partition and a number of missing pods belong to rolling updates."""
    for role in ROLES:
        strategy = getattr(deployment.spec, role).update_strategy
        if strategy.type is not UpdateStrategyType.ON_DELETE:
            continue
        for name, value in (("partition", strategy.partition), ("maxUnavailable", strategy.max_unavailable)):
            if value is not None:
                yield Problem(f"spec.{role}.updateStrategy.{name}", "must be left out with type OnDelete")


def resource_claims(deployment: PDDeployment) -> Iterator[Problem]:
    """A claim has one source and a name of its own."""
    for role in ROLES:
        seen: set[str] = set()
        for index, claim in enumerate(getattr(deployment.spec, role).pod.resource_claims):
            path = f"spec.{role}.pod.resourceClaims[{index}]"
            if (claim.resource_claim_name is None) == (claim.resource_claim_template_name is None):
                yield Problem(path, f"exactly one of {', '.join(CLAIM_SOURCES)} must be set")
            if claim.name in seen:
                yield Problem(f"{path}.name", f"{claim.name} stands twice in this list; keep one")
            seen.add(claim.name)


def user(deployment: PDDeployment) -> Iterator[Problem]:
    """A user id goes with the one profile that is not root."""
    engine = deployment.spec.engine
    if engine.run_as_user is not None and engine.security_profile is not SecurityProfile.RESTRICTED:
        yield Problem(
            "spec.engine.runAsUser",
            f"may be set with securityProfile Restricted only; {engine.security_profile.value} runs as root",
        )


def connector_image(deployment: PDDeployment) -> Iterator[Problem]:
    """An image for a connector that is not used would be a mistake."""
    transfer = deployment.spec.kv_transfer
    if transfer.connector_image is not None and transfer.connector is Connector.STOCK:
        yield Problem("spec.kvTransfer.connectorImage", "must be left out with connector Stock, which needs none")


def monitoring_namespaces(deployment: PDDeployment) -> Iterator[Problem]:
    """Each namespace stands in the list once."""
    seen: set[str] = set()
    for index, name in enumerate(deployment.spec.network_policy.monitoring_namespaces):
        if name in seen:
            yield Problem(f"spec.networkPolicy.monitoringNamespaces[{index}]", f"{name} stands twice; keep one")
        seen.add(name)


def image_pull_secrets(deployment: PDDeployment) -> Iterator[Problem]:
    """Each Secret stands in the list once."""
    seen: set[str] = set()
    for index, secret in enumerate(deployment.spec.image_pull_secrets):
        if secret.name in seen:
            yield Problem(f"spec.imagePullSecrets[{index}]", f"{secret.name} stands twice in this list; keep one")
        seen.add(secret.name)


def _pods(deployment: PDDeployment) -> Iterator[tuple[str, PodSettings]]:
    for part in PARTS:
        yield f"spec.{part}.pod", getattr(deployment.spec, part).pod


RULES = (
    labels,
    long_keys,
    tolerations,
    node_conditions,
    resources,
    devices,
    shared_memory,
    update_strategy,
    resource_claims,
    user,
    connector_image,
    monitoring_namespaces,
    image_pull_secrets,
)
