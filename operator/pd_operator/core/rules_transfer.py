"""Rules about KV transfer and the router: time limits, backend, connector and its extra keys."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Final

from pd_operator.core.choices import Connector, LoadFailurePolicy, NodeProfile, Retention
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem
from pd_operator.core.profiles import backend_of, profile_of
from pd_operator.core.spec_transfer import READ_MARGIN_SECONDS
from pd_wire import names

FIELD_OF_KEY: Final[dict[str, str]] = {
    "backends": "use spec.kvTransfer.backend",
    "bidirectional_kv_xfer": "use spec.kvTransfer.bidirectional",
    "decoder_kv_blocks_ttl": "use spec.kvTransfer.decoderBlocksTTLSeconds",
    "kv_recompute_threshold": "use spec.kvTransfer.recomputeThresholdTokens",
    "kv_lease_duration": "use spec.kvTransfer.leaseDurationSeconds",
    "kv_load_failure_policy": "use spec.kvTransfer.loadFailurePolicy",
    names.RETENTION_OPTION: "use spec.kvTransfer.retention",
    names.LEASE_SECONDS_OPTION: "use spec.kvTransfer.lease.seconds",
    names.LEASE_SHARE_OPTION: "use spec.kvTransfer.lease.sharePercent",
    "engine_id": "it is never fixed, since a restarted engine would be taken for the memory of the old one",
    "enforce_handshake_compat": "engines whose layouts differ would read wrong memory and answer 200",
}
"""Keys that may not stand in extraConfig, and what to do instead."""

FREE_KEYS: Final = tuple(sorted(names.EXTRA_CONFIG_KEYS - FIELD_OF_KEY.keys()))
"""Keys that the connector reads and that have no field."""

UNPINNED_NEEDS_OURS: Final = (
    "must be Pinned with connector Stock, or be left out: vLLM's own connector would not notice that blocks were reused"
)


LEASE_NEEDS_LEASED: Final = (
    "means something with retention Leased only: set spec.kvTransfer.retention to Leased, or leave it out"
)


def time_limits(deployment: PDDeployment) -> Iterator[Problem]:
    """The router forgets a handle before D frees the blocks."""
    transfer = deployment.spec.kv_transfer
    most = transfer.decoder_blocks_ttl_seconds - READ_MARGIN_SECONDS
    if transfer.router_ttl_seconds is not None and transfer.router_ttl_seconds > most:
        yield Problem(
            "spec.kvTransfer.routerTTLSeconds",
            f"must be at most {most} ({READ_MARGIN_SECONDS} s less than decoderBlocksTTLSeconds), or be left out; "
            f"got {transfer.router_ttl_seconds}",
        )


def backend(deployment: PDDeployment) -> Iterator[Problem]:
    """The backend is one that the machine has."""
    spec = deployment.spec
    if spec.node_profile is NodeProfile.CUSTOM and spec.custom_profile is None:
        return
    allowed = profile_of(spec).allowed_backends
    chosen = backend_of(spec)
    if chosen not in allowed:
        words = " or ".join(sorted(allowed))
        why = (
            "UCX falls back to TCP there and says nothing"
            if spec.node_profile is NodeProfile.P5EN_EFA
            else "LIBFABRIC needs EFA"
        )
        yield Problem(
            "spec.kvTransfer.backend",
            f"must be {words} with nodeProfile {spec.node_profile.value}, or be left out: {why}; got {chosen.value}",
        )


def load_failure_policy(deployment: PDDeployment) -> Iterator[Problem]:
    """Only our connector survives the policy Recompute."""
    transfer = deployment.spec.kv_transfer
    if transfer.load_failure_policy is LoadFailurePolicy.RECOMPUTE and transfer.connector is Connector.STOCK:
        yield Problem(
            "spec.kvTransfer.loadFailurePolicy",
            "must be Fail with connector Stock, which never answers a request whose read failed; got Recompute",
        )


def retention(deployment: PDDeployment) -> Iterator[Problem]:
    """Only our connector leaves blocks unpinned and checks them."""
    transfer = deployment.spec.kv_transfer
    if transfer.retention_mode is not Retention.PINNED and transfer.connector is Connector.STOCK:
        yield Problem("spec.kvTransfer.retention", f"{UNPINNED_NEEDS_OURS}; got {transfer.retention_mode.value}")
    if transfer.lease is not None and transfer.retention_mode is not Retention.LEASED:
        said = "" if transfer.retention is None else f"; got retention {transfer.retention.value}"
        yield Problem("spec.kvTransfer.lease", f"{LEASE_NEEDS_LEASED}{said}")


def extra_config(deployment: PDDeployment) -> Iterator[Problem]:
    """extraConfig holds keys that the connector reads, once each, with JSON values."""
    seen: set[str] = set()
    for index, entry in enumerate(deployment.spec.kv_transfer.extra_config):
        path = f"spec.kvTransfer.extraConfig[{index}]"
        if entry.name in seen:
            yield Problem(path, f"{entry.name} stands twice in this list; keep one")
        seen.add(entry.name)
        if entry.name not in FREE_KEYS:
            yield Problem(f"{path}.name", _refused_key(entry.name))
        try:
            json.loads(entry.value)
        except ValueError:
            yield Problem(f"{path}.value", f"must be JSON, such as 4 or true; got {entry.value!r}")


def _refused_key(name: str) -> str:
    if name in FIELD_OF_KEY:
        return f"{name} may not be set here: {FIELD_OF_KEY[name]}"
    near = difflib.get_close_matches(name, [*FREE_KEYS, *FIELD_OF_KEY], n=1, cutoff=0.6)
    if near and near[0] in FIELD_OF_KEY:
        return f"the connector does not know {name}; for {near[0]} {FIELD_OF_KEY[near[0]]}"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"the connector does not know {name}, and would ignore it; {hint}Allowed: {', '.join(FREE_KEYS)}"


BYPASS_NEEDS_CACHE: Final = (
    "must be 0 with spec.decode.prefixCaching false: decode would compute the whole prompt of such a turn"
)


def bypass(deployment: PDDeployment) -> Iterator[Problem]:
    """Decode serves a turn alone from its prefix cache."""
    tokens = deployment.spec.router.placement.bypass.max_new_tokens
    if tokens and not deployment.spec.decode.prefix_caching:
        yield Problem("spec.router.placement.bypass.maxNewTokens", f"{BYPASS_NEEDS_CACHE}; got {tokens}")


RULES = (bypass, time_limits, backend, load_failure_policy, retention, extra_config)
