"""Rules over several fields in CEL, for the custom resource definition: `kubectl apply` itself refuses a bad edit.

Each says the same as a rule in `rules_*`, which runs on every read as well; what CEL cannot say within its cost limits
(a version that contradicts the image's tag) is only there. Every list and text that a rule visits is
bounded in the models, because an API server refuses a definition whose rules might cost too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pd_operator.core import crd_rules_access, crd_rules_engine, crd_rules_pod, rules_store
from pd_operator.core.cel import Rule, compared, rule, text, words
from pd_operator.core.crd_rules_engine import VOLUMES, folder
from pd_operator.core.crd_schema import Schema
from pd_operator.core.pod_profiles import P5EN_EFA as P5EN_POD
from pd_operator.core.profiles import CPU, P5EN_EFA
from pd_operator.core.rules_extra import VALUES
from pd_operator.core.rules_pod import TOO_MUCH_SHARED
from pd_operator.core.rules_transfer import (
    BYPASS_NEEDS_CACHE,
    FIELD_OF_KEY,
    FREE_KEYS,
    LEASE_NEEDS_LEASED,
    UNPINNED_NEEDS_OURS,
)
from pd_operator.core.spec_transfer import READ_MARGIN_SECONDS

GIB: Final = 1 << 30
JSON: Final = r'^(-?[0-9]+([.][0-9]+)?|true|false|null|".*"|\[.*\]|\{.*\})$'
"""Looks like a JSON value; CEL has no parser for it."""


def rules_of(model: str, schema: Schema) -> list[Rule]:
    """The rules of every object of a model, by the model's class name. Puts those of plain entries into ``schema``."""
    properties = schema.get("properties", {})
    for field, rules in _ENTRIES.get(model, {}).items():
        properties[field]["items"]["x-kubernetes-validations"] = rules
    for field in _KEYS.get(model, ()):
        properties[field]["x-kubernetes-validations"] = crd_rules_pod.key_rules(field)
    return _OBJECTS.get(model, [])


def _spec_rules() -> list[Rule]:
    backend = "!has(self.kvTransfer.backend)"
    return [
        rule('self.nodeProfile != "Custom" || has(self.customProfile)', "is required with nodeProfile Custom",
             "customProfile"),
        rule('self.nodeProfile == "Custom" || !has(self.customProfile)', "may be set with nodeProfile Custom only",
             "customProfile"),
        rule(
            f'self.nodeProfile != "P5enEFA" || {backend} || self.kvTransfer.backend == "LIBFABRIC"',
            "must be LIBFABRIC with nodeProfile P5enEFA, or be left out: UCX falls back to TCP there and says nothing",
            "kvTransfer.backend",
        ),
        rule(
            f'self.nodeProfile != "CPU" || {backend} || self.kvTransfer.backend == "UCX"',
            "must be UCX with nodeProfile CPU, or be left out: LIBFABRIC needs EFA",
            "kvTransfer.backend",
        ),
        rule(
            'self.kvTransfer.bidirectional != "Enabled" || '
            "self.prefill.tensorParallelSize == self.decode.tensorParallelSize",
            "must equal prefill.tensorParallelSize while kvTransfer.bidirectional is Enabled, since each role then "
            "reads the other's memory",
            "decode.tensorParallelSize",
        ),
        *_width_rules("prefill"),
        *_width_rules("decode"),
        *map(_efa_provider_rule, ("engine", "prefill", "decode")),
        rule("self.decode.prefixCaching || self.router.placement.bypass.maxNewTokens == 0", BYPASS_NEEDS_CACHE,
             "router.placement.bypass.maxNewTokens"),
        rule(
            f"!has(self.engine.volumes) || !({' || '.join(f'has(self.model.source.{one})' for one in VOLUMES)}) || "
            f"self.engine.volumes.all(one, {folder('one.mountPath')} != {folder('self.model.source.mountPath')})",
            "model.source is mounted there; choose another folder",
            "engine.volumes",
        ),
        *map(_shared_memory_rule, ("prefill", "decode")),
        rule("has(self.engine.image)", "is required in a cluster: a container image with vLLM and NIXL",
             "engine.image"),
    ]  # fmt: skip


def _width_rules(role: str) -> list[Rule]:
    field = f"{role}.tensorParallelSize"
    widths = (("P5enEFA", P5EN_EFA.accelerators_per_node), ("CPU", CPU.accelerators_per_node))
    return [
        *(
            rule(
                f'self.nodeProfile != "{profile}" || self.{field} <= {most}',
                f"must be at most {most}, what one {profile} node has",
                field,
            )
            for profile, most in widths
        ),
        rule(
            f"!has(self.customProfile) || self.{field} <= self.customProfile.acceleratorsPerNode",
            "must be at most customProfile.acceleratorsPerNode",
            field,
        ),
    ]


def _shared_memory_rule(role: str) -> Rule:
    """Without a limit of the user's the profile's holds, unless a larger request takes it away."""
    resources, shared = f"self.{role}.resources", "self.engine.sharedMemoryGiB"
    # Numbers are never made texts, whose length an API server cannot foresee.
    limit, request = (f'quantity(string({resources}.{side}["memory"]))' for side in ("limits", "requests"))
    given, asked = (f'has({resources}.{side}) && "memory" in {resources}.{side}' for side in ("limits", "requests"))
    default = f"{P5EN_POD.memory_gib} * self.{role}.tensorParallelSize"
    by_limit = f"{compared(limit)} == 0 || {compared(f'{limit}.sub({shared} * {GIB})')} > 0"
    larger = f"({asked}) && {compared(f'{request}.sub({default} * {GIB})')} > 0"
    by_profile = f'self.nodeProfile != "P5enEFA" || ({larger}) || {shared} < {default}'
    return rule(f"!has({shared}) || ({given} ? {by_limit} : {by_profile})", TOO_MUCH_SHARED, "engine.sharedMemoryGiB")


def _efa_provider_rule(part: str) -> Rule:
    return rule(
        f'self.nodeProfile != "P5enEFA" || !has(self.{part}.env) || '
        f'self.{part}.env.all(one, one.name != "FI_PROVIDER" || (has(one.value) && one.value == "efa"))',
        "FI_PROVIDER is always efa on P5enEFA; another provider is TCP in disguise",
        f"{part}.env",
    )


def _transfer_rules() -> list[Rule]:
    return [
        rule(
            "!has(self.routerTTLSeconds) || "
            f"self.routerTTLSeconds <= self.decoderBlocksTTLSeconds - {READ_MARGIN_SECONDS}",
            f"must be at least {READ_MARGIN_SECONDS} s less than decoderBlocksTTLSeconds, or be left out: the router "
            "has to forget a handle before the blocks are freed",
            "routerTTLSeconds",
        ),
        rule(
            'self.loadFailurePolicy != "Recompute" || self.connector != "Stock"',
            "must be Fail with connector Stock, which never answers a request whose read failed",
            "loadFailurePolicy",
        ),
        rule('!has(self.retention) || self.retention == "Pinned" || self.connector != "Stock"', UNPINNED_NEEDS_OURS,
             "retention"),
        rule('!has(self.lease) || (has(self.retention) && self.retention == "Leased")', LEASE_NEEDS_LEASED, "lease"),
        rule('!has(self.connectorImage) || self.connector != "Stock"', "must be left out with connector Stock",
             "connectorImage"),
    ]  # fmt: skip


def _extra_config_rules() -> list[Rule]:
    return [
        *(
            rule(f"self.name != {text(name)}", f"{name} may not be set here: {reason}", "name")
            for name, reason in FIELD_OF_KEY.items()
        ),
        rule(
            f"self.name in {words([*FREE_KEYS, *FIELD_OF_KEY])}",
            f"the connector does not know this key, and would ignore it; allowed: {', '.join(FREE_KEYS)}",
            "name",
        ),
        rule(f"self.value.matches({text(JSON)})", "must be JSON, such as 4 or true", "value"),
        *(
            rule(f"self.name != {text(name)} || self.value.matches({text(form)})", f"of {name} {what}", "value")
            for name, (form, what) in VALUES.items()
        ),
    ]


_OBJECTS: Final[Mapping[str, list[Rule]]] = {
    "PDDeploymentSpec": _spec_rules(),
    "KVTransferSpec": _transfer_rules(),
    "ExtraConfigEntry": _extra_config_rules(),
    "HandleStore": rules_store.store_rules(),
    "ValkeyStore": rules_store.valkey_rules(),
    "RouterAuth": crd_rules_access.auth_rules(),
    "TrustedGateway": crd_rules_access.gateway_rules(),
    "TenantLimits": crd_rules_access.limit_rules(),
    "ModelSpec": crd_rules_engine.model_rules(),
    "ModelSource": crd_rules_engine.source_rules(),
    "EngineSpec": crd_rules_engine.engine_rules(),
    "EngineVolume": crd_rules_engine.volume_rules(),
    "RoleSpec": crd_rules_engine.role_rules(),
    "RouterSpec": [crd_rules_engine.replicas_rule("the router's Deployment")],
    "EnvVar": crd_rules_engine.env_rules(),
    "Toleration": crd_rules_pod.toleration_rules(),
    "NodeRequirement": crd_rules_pod.node_requirement_rules(),
    "Resources": crd_rules_pod.resources_rules(),
    "ResourceClaim": crd_rules_pod.resource_claim_rules(),
    "UpdateStrategy": crd_rules_pod.update_strategy_rules(),
}

_ENTRIES: Final[Mapping[str, Mapping[str, list[Rule]]]] = {
    "EngineSpec": {"extraArgs": crd_rules_engine.argument_rules()},
    "RoleSpec": {"extraArgs": crd_rules_engine.shared_argument_rules()},
}
"""Rules of the entries of lists of plain values."""

_POD_KEYS: Final = ("labels", "annotations", "nodeSelector")
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "PodSettings": _POD_KEYS,
    "EnginePodSettings": _POD_KEYS,
    "Resources": ("requests", "limits"),
    "RouterService": ("annotations",),
}
"""Maps whose keys have a form."""
