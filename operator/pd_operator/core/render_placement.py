"""Where pods may run: selectors, tolerations, one zone, separate hosts, spreading."""

from __future__ import annotations

from typing import Any, Final

from pd_operator.core import names
from pd_operator.core.choices import Backend, Hosts, Role, Zone
from pd_operator.core.model import PDDeployment
from pd_operator.core.pod_profiles import pod_profile_of, tolerations_of
from pd_operator.core.profiles import backend_of
from pd_operator.core.render_object import without_nothing
from pd_operator.core.spec_pod import PodSettings, Toleration
from pd_wire import names as wire

ZONE_KEY: Final = "topology.kubernetes.io/zone"
HOST_KEY: Final = "kubernetes.io/hostname"


def engine_placement(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    """Fields of an engine's pod spec that decide about its node."""
    settings = deployment.role(role).pod
    profile = pod_profile_of(deployment.spec)
    selector = profile.node_selector if settings.node_selector is None else settings.node_selector
    affinity = {
        "nodeAffinity": _node_affinity(settings),
        "podAffinity": _together(deployment, profile.near),
        "podAntiAffinity": _apart(deployment, role),
    }
    return {
        "nodeSelector": dict(selector),
        "tolerations": [*tolerations_of(profile), *map(_toleration, settings.tolerations)],
        "affinity": without_nothing(affinity),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": HOST_KEY,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.engine_selector(deployment, role)},
            }
        ],
    }


def router_placement(deployment: PDDeployment) -> dict[str, Any]:
    """Fields of a router's pod spec that decide about its node: apart from each other where possible."""
    settings = deployment.spec.router.pod
    term = {
        "labelSelector": {"matchLabels": names.router_selector(deployment)},
        "topologyKey": HOST_KEY,
    }
    affinity = {
        "nodeAffinity": _node_affinity(settings),
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        },
    }
    return {
        "nodeSelector": dict(settings.node_selector or {}),
        "tolerations": list(map(_toleration, settings.tolerations)),
        "affinity": without_nothing(affinity),
    }


def one_zone(deployment: PDDeployment) -> bool:
    """Must all engines be in one zone?"""
    chosen = deployment.spec.topology.zone
    return _on_efa(deployment) if chosen is None else chosen is Zone.SAME


def separate_hosts(deployment: PDDeployment) -> bool:
    """Must prefill and decode be on different hosts?"""
    chosen = deployment.spec.topology.hosts
    return _on_efa(deployment) if chosen is None else chosen is Hosts.SEPARATE


def _on_efa(deployment: PDDeployment) -> bool:
    return backend_of(deployment.spec) is Backend.LIBFABRIC


def _together(deployment: PDDeployment, near: str | None) -> dict[str, Any]:
    engines = {"labelSelector": engines_selector(deployment)}
    required = [{**engines, "topologyKey": ZONE_KEY}] if one_zone(deployment) else []
    preferred = [{"weight": 100, "podAffinityTerm": {**engines, "topologyKey": near}}] if near else []
    return without_nothing(
        {
            "requiredDuringSchedulingIgnoredDuringExecution": required,
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        }
    )


def _apart(deployment: PDDeployment, role: Role) -> dict[str, Any]:
    if not separate_hosts(deployment):
        return {}
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    term = {
        "labelSelector": {"matchLabels": names.engine_selector(deployment, other)},
        "topologyKey": HOST_KEY,
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def engines_selector(deployment: PDDeployment) -> dict[str, Any]:
    """Selects the pods of both roles."""
    return {
        "matchLabels": {wire.LABEL_DEPLOYMENT: deployment.metadata.name},
        "matchExpressions": [
            {"key": wire.LABEL_ROLE, "operator": "In", "values": [Role.PREFILL.value, Role.DECODE.value]}
        ],
    }


def _node_affinity(settings: PodSettings) -> dict[str, Any]:
    if not settings.node_match_expressions:
        return {}
    expressions = [
        without_nothing({"key": one.key, "operator": one.operator.value, "values": list(one.values)})
        for one in settings.node_match_expressions
    ]
    term = {"matchExpressions": expressions}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}


def _toleration(wanted: Toleration) -> dict[str, Any]:
    return without_nothing(
        {
            "key": wanted.key,
            "operator": wanted.operator.value,
            "value": wanted.value or None,
            "effect": wanted.effect.value if wanted.effect else None,
            "tolerationSeconds": wanted.toleration_seconds,
        }
    )
