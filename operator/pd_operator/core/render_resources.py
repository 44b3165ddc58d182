"""Requests and limits of the containers: the profile's amounts, the user's on top, devices in equal amounts.

Kubernetes wants devices and huge pages in requests and limits alike; a user writes them once.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

from pd_operator.core.choices import Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.pod_profiles import HUGE_PAGES, pod_profile_of
from pd_operator.core.render_object import without_nothing
from pd_operator.core.spec_pod import Resources

ROUTER_CPU_MILLIS: Final = 250
"""Of each of its processes."""
ROUTER_WORKER_MIB: Final = 128
"""What each worker has for itself, where there are several."""
ROUTER_BASE_MIB: Final = 256
"""The router's own memory; handles come on top."""

MIB: Final = 1 << 20
_FACTORS: Final = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
}
_QUANTITY: Final = re.compile(r"([0-9.]+)([A-Za-z]*)")


def amount(quantity: str) -> Decimal:
    """`500m` → 0.5, `2Gi` → 2147483648.

    Raises:
        ValueError: not a quantity that the model lets through.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"not a quantity: {quantity}")
    return Decimal(match[1]) * _FACTORS[match[2]]


def engine_resources(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    """Requests and limits of one role's engine container."""
    settings = deployment.role(role)
    profile, width = pod_profile_of(deployment.spec), settings.tensor_parallel_size
    limits = {name: str(count * width) for name, count in profile.devices.items()}
    if profile.huge_pages_mib:
        limits[HUGE_PAGES] = f"{profile.huge_pages_mib * width}Mi"
    memory = f"{profile.memory_gib * width}Gi"
    if profile.memory_is_limited:
        limits["memory"] = memory
    requests = {"cpu": str(profile.cpu * width), "memory": memory}
    disk = disk_gib(deployment)
    if disk:
        # Else a node is chosen whose disk the weights fill up, and the kubelet evicts the pod.
        requests["ephemeral-storage"] = f"{disk}Gi"
    return merged(requests, limits, settings.resources)


def shared_memory_gib(deployment: PDDeployment, role: Role) -> int:
    """Size of /dev/shm in GiB."""
    chosen = deployment.spec.engine.shared_memory_gib
    width = deployment.role(role).tensor_parallel_size
    return pod_profile_of(deployment.spec).shared_memory_gib * width if chosen is None else chosen


def disk_gib(deployment: PDDeployment) -> int:
    """What the node's disk must have room for, in GiB: the limits of all emptyDirs that have one."""
    spec = deployment.spec
    folders = (spec.model.source.empty_dir, *(one.empty_dir for one in spec.engine.volumes))
    return sum(one.size_limit_gib or 0 for one in folders if one is not None)


def router_resources(deployment: PDDeployment) -> dict[str, Any]:
    """Requests and limits of the router: room for all handles, and as much again before the limit.

    Several workers have a supervisor, which keeps the handles.
    """
    router = deployment.spec.router
    in_memory = router.handle_store.max_bytes if router.handle_store.valkey is None else 0
    workers, more = router.workers, router.workers > 1
    mib = ROUTER_BASE_MIB + -(-in_memory // MIB) + more * workers * ROUTER_WORKER_MIB
    cpu = f"{(workers + more) * ROUTER_CPU_MILLIS}m"
    return merged({"cpu": cpu, "memory": f"{mib}Mi"}, {"memory": f"{2 * mib}Mi"}, router.resources)


def merged(requests: dict[str, str], limits: dict[str, str], wanted: Resources) -> dict[str, Any]:
    """The user's amounts in place of the defaults; a default limit gives way to a larger request."""
    default_limits = {
        name: limit
        for name, limit in limits.items()
        if name not in wanted.requests or is_device(name) or amount(wanted.requests[name]) <= amount(limit)
    }
    final_limits = {**default_limits, **wanted.limits}
    default_requests = {
        name: request
        for name, request in requests.items()
        if name not in final_limits or amount(request) <= amount(final_limits[name])
    }
    final_requests = {**default_requests, **wanted.requests}
    for name in {**final_limits, **final_requests}:
        if is_device(name):
            # Kubernetes refuses unequal amounts of these; either place is enough for a user to write one.
            number = wanted.limits.get(name) or wanted.requests.get(name) or final_limits[name]
            final_limits[name] = final_requests[name] = number
    return without_nothing({"requests": _positive(final_requests), "limits": _positive(final_limits)})


def is_device(name: str) -> bool:
    """A resource that cannot be overcommitted: it has a domain, or is a size of huge pages."""
    return "/" in name or name.startswith("hugepages-")


def cores(resources: dict[str, Any]) -> int:
    """Whole cores that a container may count on: its limit or else its request, at least 1."""
    quantity = resources.get("limits", {}).get("cpu") or resources.get("requests", {}).get("cpu") or "1"
    return max(1, int(amount(quantity)))


def _positive(quantities: dict[str, str]) -> dict[str, str]:
    return {name: quantity for name, quantity in sorted(quantities.items()) if amount(quantity) > 0}
