"""The router process: deployment + addresses → argument list.

Separate from the engines because the router takes its reuse switch and its time limit from `spec.kvTransfer`: both are
derived here, from the same fields that the engines' flags come from, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pd_operator.core.choices import Anonymous, Switch, TenantFrom, Untrusted
from pd_operator.core.generation import generation
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_router_files import file_options

TENANT_WORDS: Final = {TenantFrom.AUTHORIZATION: "authorization", TenantFrom.HEADER: "header"}
ANONYMOUS_WORDS: Final = {Anonymous.ALLOWED: "reuse", Anonymous.NO_REUSE: "no-reuse"}
UNTRUSTED_WORDS: Final = {Untrusted.REFUSE: "refuse", Untrusted.IGNORE: "ignore"}
WHOLE: Final = 100


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """What to start; ``argv[0]`` is `pd-router`. ``env`` holds what to add to the caller's environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def render_router(
    deployment: PDDeployment, listen: str, admin: str, prefill_urls: Sequence[str], decode_urls: Sequence[str]
) -> RouterProcess:
    """The router's command for a fixed set of engines.

    Args:
        deployment: a parsed object.
        listen: HOST:PORT for clients.
        admin: HOST:PORT for health, metrics and explanations.
        prefill_urls: base URL of each prefill engine.
        decode_urls: base URL of each decode engine.
    """
    argv = ["pd-router", "--listen", listen, "--admin", admin]
    for url in prefill_urls:
        argv += ["--prefill", url]
    for url in decode_urls:
        argv += ["--decode", url]
    words = [*_options(deployment), *_local_gateway(deployment), "--generation", generation(deployment)]
    return RouterProcess((*argv, *words), {})


def render_router_in_cluster(deployment: PDDeployment, listen: str, admin: str) -> RouterProcess:
    """The router's command where it finds the engines itself, among the pods of its deployment.

    Without a generation: each pod's label has it, and a router must not restart when engines are replaced.
    """
    owner = f"{deployment.metadata.namespace}/{deployment.metadata.name}"
    argv = ("pd-router", "--listen", listen, "--admin", admin, "--discover-kubernetes", owner)
    return RouterProcess((*argv, *_options(deployment), *_store(deployment), *file_options(deployment)), {})


def _options(deployment: PDDeployment) -> list[str]:
    router, transfer = deployment.spec.router, deployment.spec.kv_transfer
    options: dict[str, str | int] = {
        "--model": deployment.spec.model.public_name,
        **_reuse(deployment),
        "--lease": transfer.lease_duration_seconds,
        "--workers": router.workers,
        "--tenant-from": TENANT_WORDS[router.auth.tenant_from],
        "--anonymous": ANONYMOUS_WORDS[router.auth.anonymous],
        "--handle-cap-bytes": router.handle_store.max_bytes,
        "--handle-cap-entries": router.handle_store.max_entries,
        "--max-body-bytes": router.limits.max_body_bytes,
        "--max-inflight": router.limits.max_inflight,
        "--max-queue": router.limits.max_queue,
        "--response-cap-bytes": router.limits.response_bytes,
        "--queue-timeout": router.timeouts.queue_seconds,
        "--connect-timeout": router.timeouts.connect_seconds,
        "--prefill-timeout": router.timeouts.prefill_seconds,
        "--pull-timeout": router.timeouts.pull_seconds,
        "--first-byte-timeout": router.timeouts.first_byte_seconds,
        "--idle-timeout": router.timeouts.idle_seconds,
        "--answer-timeout": router.timeouts.answer_seconds,
        "--drain-timeout": router.timeouts.drain_seconds,
        "--decode-overload": router.placement.decode_overload_turns,
        "--pair-quarantine": router.placement.pair_quarantine_seconds,
        "--retry-share": f"{router.placement.retry_percent / 100:g}",
        "--bypass-tokens": router.placement.bypass.max_new_tokens,
        "--bypass-share": f"{router.placement.bypass.max_new_percent / 100:g}",
        "--bypass-decode-turns": router.placement.bypass.max_decode_turns,
    }
    options.update(_limits(deployment))
    options.update(_observe(deployment))
    words = [word for flag, value in options.items() for word in (flag, str(value))]
    return [*words, *_gateway(deployment)]


def _reuse(deployment: PDDeployment) -> dict[str, str | int]:
    """Without reuse its limits mean nothing, and routers must not restart for an edit of them."""
    transfer = deployment.spec.kv_transfer
    if transfer.bidirectional is not Switch.ENABLED:
        return {"--reuse": "off"}
    found: dict[str, str | int] = {
        "--reuse": "on",
        "--handle-ttl": transfer.handle_ttl_seconds,
        "--engine-ttl": transfer.decoder_blocks_ttl_seconds,
        "--recompute-threshold": transfer.recompute_threshold_tokens,
    }
    if transfer.router_ttl_seconds is not None:
        found["--unpinned-handle-ttl"] = transfer.router_ttl_seconds
    if transfer.leases is not None:
        found["--lease-tool-hold"] = transfer.leases.tool_hold_seconds
    return found


def _observe(deployment: PDDeployment) -> dict[str, str | int]:
    """Log and traces; without a collector there is no flag for traces."""
    router = deployment.spec.router
    found: dict[str, str | int] = {
        "--log-level": router.logging.level.value.lower(),
        "--log-format": router.logging.format.value.lower(),
    }
    if router.tracing is not None:
        found["--otlp-endpoint"] = router.tracing.endpoint
        found["--trace-sampling-ratio"] = f"{router.tracing.sampling_percent / WHOLE:g}"
    return found


def _gateway(deployment: PDDeployment) -> list[str]:
    gateway = deployment.spec.router.auth.gateway
    if gateway is None:
        return []
    networks = ["--gateway-cidr", *gateway.cidrs] if gateway.cidrs else []
    return ["--untrusted-tenant", UNTRUSTED_WORDS[gateway.untrusted], *networks]


def _store(deployment: PDDeployment) -> list[str]:
    """The store that routers share. On one machine there are no Secrets and one router, so handles stay in memory."""
    valkey = deployment.spec.router.handle_store.valkey
    if valkey is None:
        return []
    words = ["--handle-store", "valkey", "--valkey-url", valkey.url]
    words += ["--valkey-timeout", f"{valkey.timeout_milliseconds / 1000:g}"]
    words += ["--valkey-max-entry-bytes", str(valkey.max_entry_bytes)]
    return words if valkey.username is None else [*words, "--valkey-username", valkey.username]


def _local_gateway(deployment: PDDeployment) -> list[str]:
    """There are no Secrets on one machine: there whoever connects from it is the gateway."""
    gateway = deployment.spec.router.auth.gateway
    if gateway is None or gateway.cidrs:
        return []
    return ["--gateway-cidr", "127.0.0.0/8", "::1/128"]


def _limits(deployment: PDDeployment) -> dict[str, str | int]:
    """Limits per tenant; those that are off have no flag."""
    limits = deployment.spec.router.tenant_limits
    found: dict[str, str | int] = {
        "--tenant-rate": limits.requests_per_second,
        "--tenant-burst": limits.burst,
        "--tenant-max-inflight": limits.max_inflight,
        "--tenant-retained-tokens": limits.retained_tokens,
    }
    share = {} if limits.queue_percent == WHOLE else {"--tenant-queue-share": f"{limits.queue_percent / WHOLE:g}"}
    return {flag: value for flag, value in found.items() if value} | share
