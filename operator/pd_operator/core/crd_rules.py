"""Rules over several fields in CEL, for the custom resource definition: `kubectl apply` itself refuses a bad edit.

Each says the same as a rule in `rules_*`, which runs on every read as well; a rule that CEL cannot say within its cost
limits (abbreviated flags, versions in image tags) is only there. Every list and text that a rule visits is bounded in
the models, because an API server refuses a definition whose rules might cost too much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

from pd_operator.core import versions
from pd_operator.core.crd_schema import Rule, Schema
from pd_operator.core.fields import QUALIFIED_NAME
from pd_operator.core.profiles import CPU, P5EN_EFA
from pd_operator.core.render_volumes import OWN_PATHS
from pd_operator.core.reserved import (
    RENDERED_ENV,
    RENDERED_ENV_PREFIXES,
    RENDERED_FLAGS,
    SHARED_ENV,
    SHARED_FLAGS,
    TOKEN_ENV,
    negated,
)
from pd_operator.core.rules_pod import OWN_LABELS
from pd_operator.core.rules_transfer import FIELD_OF_KEY, FREE_KEYS
from pd_operator.core.spec_transfer import READ_MARGIN_SECONDS

TOKEN: Final = r"(^|[^A-Za-z0-9_])hf_[A-Za-z0-9]{20,}"
NO_TOKEN: Final = "never write a token into the object; use spec.model.source.tokenSecretRef"


def rules_of(model: str, schema: Schema) -> list[Rule]:
    """The rules of every object of a model, by the model's class name. Puts those of plain entries into ``schema``."""
    properties = schema.get("properties", {})
    for field, rules in _ENTRIES.get(model, {}).items():
        properties[field]["items"]["x-kubernetes-validations"] = rules
    for field in _KEYS.get(model, ()):
        properties[field]["x-kubernetes-validations"] = _key_rules(field)
    return _OBJECTS.get(model, [])


def _is_flag_of(flags: Iterable[str]) -> str:
    """CEL: is `self` one of the flags in any full spelling: underscores, `=value`, `.key`? A regular expression would
    cost many times as much."""
    return f'self.split("=", 2)[0].split(".", 2)[0].replace("_", "-") in {_words(flags)}'


def _rule(rule: str, message: str, field: str = "") -> Rule:
    """One rule; ``field`` is what the error names, seen from the object that the rule is on."""
    return {"rule": rule, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def _words(words: Iterable[str]) -> str:
    return "[" + ", ".join(_text(word) for word in sorted(words)) + "]"


def _text(value: str) -> str:
    return json.dumps(value)


def _key_rules(field: str) -> list[Rule]:
    rules = [
        _rule(f"self.all(key, key.matches({_text(QUALIFIED_NAME)}))", "keys must be such as name or example.com/name")
    ]
    if field == "labels":
        begins = " || ".join(f"key.startsWith({_text(prefix)})" for prefix in OWN_LABELS)
        rules.append(
            _rule(f"!self.exists(key, {begins})", f"keys that begin with {' or '.join(OWN_LABELS)} are set for you")
        )
    return rules


def _version_pattern() -> str:
    (major, oldest), (_, newest) = versions.OLDEST, versions.NEWEST
    minors = "|".join(str(minor) for minor in range(oldest, newest + 1))
    return rf"^v?{major}\.({minors})($|[^0-9])"


def _env_rules() -> list[Rule]:
    secret = "!has(self.value) || "
    return [
        _rule("has(self.value) != has(self.secretKeyRef)", "needs exactly one of value and secretKeyRef"),
        *(
            _rule(f"self.name != {_text(name)}", f"{name} may not be set here: {reason}")
            for name, reason in RENDERED_ENV.items()
        ),
        *(
            _rule(f"!self.name.startsWith({_text(prefix)})", f"{prefix}* may not be set here: {reason}")
            for prefix, reason in RENDERED_ENV_PREFIXES.items()
        ),
        _rule(f"{secret}!(self.name in {_words(TOKEN_ENV)})", f"a token may not be a plain value: {NO_TOKEN}"),
        _rule(f"{secret}!self.value.matches({_text(TOKEN)})", f"this value holds a token: {NO_TOKEN}"),
        _rule(
            'self.name != "NCCL_SOCKET_IFNAME" || (has(self.value) && self.value.startsWith("^"))',
            "NCCL_SOCKET_IFNAME must exclude interfaces, for example ^lo,docker,veth: naming one hides EFA",
        ),
    ]


def _argument_rules() -> list[Rule]:
    return [
        _rule(
            f"!({_is_flag_of(RENDERED_FLAGS)})",
            "this flag may not be set here: it is rendered from a field of spec.model, spec.engine, spec.kvTransfer or "
            "the role, or it is never used (see the documentation of extraArgs)",
        ),
        _rule(f"!self.matches({_text(TOKEN)})", f"this argument holds a token: {NO_TOKEN}"),
        _rule(
            '!self.matches("^--[^= ]* ")', "flag and value in one entry; write two list entries, or join them with ="
        ),
    ]


def _shared_argument_rules() -> list[Rule]:
    return [
        *_argument_rules(),
        _rule(
            f"!({_is_flag_of([*SHARED_FLAGS, *map(negated, SHARED_FLAGS)])})",
            "this flag may not be set for one role: both roles need the same; use spec.engine.extraArgs",
        ),
    ]


def _mount_rule() -> Rule:
    inside = " || ".join(f"self.mountPath.startsWith({_text(path)})" for path in OWN_PATHS)
    above = {"/"} | {path[:end] for path in OWN_PATHS for end in _slashes(path)}
    return _rule(
        f"!({inside}) && !(self.mountPath in {_words(above | {f'{one}/' for one in above if one != '/'})})",
        f"must be a folder of its own, such as /models; {', '.join(OWN_PATHS)} lie there",
        "mountPath",
    )


def _slashes(path: str) -> list[int]:
    return [match.start() for match in re.finditer("/", path) if match.start()]


_LOCAL: Final = 'self.name.startsWith("/") || self.name.startsWith("./") || self.name.startsWith("../")'
_VOLUMES: Final = ("persistentVolumeClaim", "emptyDir", "hostPath")


def _width_rules(role: str) -> list[Rule]:
    field = f"{role}.tensorParallelSize"
    return [
        _rule(
            f'self.nodeProfile != "{profile}" || self.{field} <= {most}',
            f"must be at most {most}, what one {profile} node has",
            field,
        )
        for profile, most in (("P5enEFA", P5EN_EFA.accelerators_per_node), ("CPU", CPU.accelerators_per_node))
    ] + [
        _rule(
            f"!has(self.customProfile) || self.{field} <= self.customProfile.acceleratorsPerNode",
            "must be at most customProfile.acceleratorsPerNode",
            field,
        )
    ]


def _efa_provider_rules() -> list[Rule]:
    return [
        _rule(
            f'self.nodeProfile != "P5enEFA" || !has(self.{part}.env) || '
            f'self.{part}.env.all(one, one.name != "FI_PROVIDER" || (has(one.value) && one.value == "efa"))',
            "FI_PROVIDER is always efa on P5enEFA; another provider is TCP in disguise",
            f"{part}.env",
        )
        for part in ("engine", "prefill", "decode")
    ]


def _spec_rules() -> list[Rule]:
    backend = "!has(self.kvTransfer.backend)"
    return [
        _rule('self.nodeProfile != "Custom" || has(self.customProfile)', "is required with nodeProfile Custom",
              "customProfile"),
        _rule('self.nodeProfile == "Custom" || !has(self.customProfile)', "may be set with nodeProfile Custom only",
              "customProfile"),
        _rule(
            f'self.nodeProfile != "P5enEFA" || {backend} || self.kvTransfer.backend == "LIBFABRIC"',
            "must be LIBFABRIC with nodeProfile P5enEFA, or be left out: UCX falls back to TCP there and says nothing",
            "kvTransfer.backend",
        ),
        _rule(
            f'self.nodeProfile != "CPU" || {backend} || self.kvTransfer.backend == "UCX"',
            "must be UCX with nodeProfile CPU, or be left out: LIBFABRIC needs EFA",
            "kvTransfer.backend",
        ),
        _rule(
            'self.kvTransfer.bidirectional != "Enabled" || '
            "self.prefill.tensorParallelSize == self.decode.tensorParallelSize",
            "must equal prefill.tensorParallelSize while kvTransfer.bidirectional is Enabled, since each role then "
            "reads the other's memory",
            "decode.tensorParallelSize",
        ),
        *_width_rules("prefill"),
        *_width_rules("decode"),
        *_efa_provider_rules(),
        _rule("has(self.engine.image)", "is required in a cluster: a container image with vLLM and NIXL",
              "engine.image"),
    ]  # fmt: skip


_OBJECTS: Final[Mapping[str, list[Rule]]] = {
    "PDDeploymentSpec": _spec_rules(),
    "KVTransferSpec": [
        _rule(
            "!has(self.routerTTLSeconds) || "
            f"self.routerTTLSeconds <= self.decoderBlocksTTLSeconds - {READ_MARGIN_SECONDS}",
            f"must be at least {READ_MARGIN_SECONDS} s less than decoderBlocksTTLSeconds, or be left out: the router "
            "has to forget a handle before the blocks are freed",
            "routerTTLSeconds",
        ),
        _rule(
            'self.loadFailurePolicy != "Recompute" || self.connector != "Stock"',
            "must be Fail with connector Stock, which never answers a request whose read failed",
            "loadFailurePolicy",
        ),
        _rule('!has(self.connectorImage) || self.connector != "Stock"', "must be left out with connector Stock",
              "connectorImage"),
    ],
    "ExtraConfigEntry": [
        *(
            _rule(f"self.name != {_text(name)}", f"{name} may not be set here: {reason}", "name")
            for name, reason in FIELD_OF_KEY.items()
        ),
        _rule(
            f"self.name in {_words([*FREE_KEYS, *FIELD_OF_KEY])}",
            f"the connector does not know this key, and would ignore it; allowed: {', '.join(FREE_KEYS)}",
            "name",
        ),
    ],
    "ModelSpec": [
        _rule(
            f'{_LOCAL} || !self.name.matches("/.*/")',
            "is neither a repository (owner/name) nor a path; begin a path with / or ./",
            "name",
        ),
        _rule(f"!has(self.revision) || !({_LOCAL})", "has no meaning for a folder; leave it out", "revision"),
    ],
    "ModelSource": [
        _rule(
            "[" + ", ".join(f"has(self.{volume})" for volume in _VOLUMES) + "].filter(one, one).size() <= 1",
            f"at most one of {', '.join(_VOLUMES)} may be set",
        ),
        _rule(
            '!has(self.emptyDir) || self.download == "Allowed"',
            "must be Allowed with emptyDir: an empty folder never gets the weights",
            "download",
        ),
        _mount_rule(),
    ],
    "EngineSpec": [
        _rule(
            f"!has(self.vllmVersion) || self.vllmVersion.matches({_text(_version_pattern())})",
            f"this vLLM version is not supported; use {versions.SUPPORTED_TEXT}",
            "vllmVersion",
        ),
        _rule(
            '!has(self.runAsUser) || self.securityProfile == "Restricted"',
            "may be set with securityProfile Restricted only",
            "runAsUser",
        ),
    ],
    "EnvVar": _env_rules(),
    "RoleSpec": [
        _rule(
            f"!has(self.env) || !self.env.exists(one, one.name in {_words(SHARED_ENV)})",
            f"{', '.join(sorted(SHARED_ENV))} may not be set for one role: both roles need the same; use "
            "spec.engine.env",
            "env",
        ),
        _rule(
            'self.scaling != "External" || oldSelf.scaling != "External" || self.replicas == oldSelf.replicas',
            "is not applied while scaling is External; scale the role's StatefulSet, or set scaling to Fixed",
            "replicas",
        ),
    ],
    "HandleStore": [
        _rule('self.type == "Memory"', "must be Memory: this router cannot share handles yet", "type"),
    ],
    "Toleration": [
        _rule('self.operator != "Exists" || !has(self.value) || self.value == ""',
              "must be left out with operator Exists", "value"),
        _rule('self.operator != "Equal" || has(self.key)', "is required with operator Equal", "key"),
        _rule('!has(self.tolerationSeconds) || (has(self.effect) && self.effect == "NoExecute")',
              "may be set with effect NoExecute only", "tolerationSeconds"),
    ],
    "NodeRequirement": [
        _rule(
            '!(self.operator in ["In", "NotIn"]) || (has(self.values) && self.values.size() > 0)',
            "must not be empty with operator In or NotIn",
            "values",
        ),
        _rule(
            '!(self.operator in ["Exists", "DoesNotExist"]) || !has(self.values) || self.values.size() == 0',
            "must be left out with operator Exists or DoesNotExist",
            "values",
        ),
        _rule(
            '!(self.operator in ["Gt", "Lt"]) || '
            '(has(self.values) && self.values.size() == 1 && self.values[0].matches("^[0-9]+$"))',
            "must be one whole number with operator Gt or Lt",
            "values",
        ),
    ],
    "UpdateStrategy": [
        _rule(f'self.type != "OnDelete" || !has(self.{field})', "must be left out with type OnDelete", field)
        for field in ("partition", "maxUnavailable")
    ],
}  # fmt: skip

_ENTRIES: Final[Mapping[str, Mapping[str, list[Rule]]]] = {
    "EngineSpec": {"extraArgs": _argument_rules()},
    "RoleSpec": {"extraArgs": _shared_argument_rules()},
}
"""Rules of the entries of lists of plain values."""

_POD_KEYS: Final = ("labels", "annotations", "nodeSelector")
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "PodSettings": _POD_KEYS,
    "EnginePodSettings": _POD_KEYS,
    "Resources": ("requests", "limits"),
    "RouterService": ("annotations",),
}
"""Maps whose keys have a form; a structural schema has no word for that."""
