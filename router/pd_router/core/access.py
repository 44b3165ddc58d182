"""Settings of who may come in, over what kind of connection, and how much each may use; with their rules.

Separate from `settings`, which ties all groups together, because these rules say which combinations would look safe and
not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pd_router.core.auth import FileProblem, parse_networks
from pd_router.core.tenant_limits import TenantLimits

MAX_TRACKED = 1_000_000


@dataclass(frozen=True, slots=True)
class Access:
    """How a principal is proven. Files are read again when they change."""

    api_keys_file: str = ""
    """Lines `NAME:SHA256-HEX`; empty: requests are not authenticated, and each credential is a tenant."""
    gateway_secret_file: str = ""
    """Secrets, one a line, one of which a gateway sends as `x-pd-gateway-secret`; empty: none is asked for."""
    gateway_networks: tuple[str, ...] = ()
    """CIDRs that a gateway's connections come from; empty: from anywhere."""
    refuse_untrusted: bool = True
    """Whether a tenant named by somebody else than the gateway is refused with 403, or ignored."""
    engine_api_key_file: str = ""
    """The key that engines expect; empty: none is sent."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files; all empty is plain HTTP. Read again when they change."""

    certificate: str = ""
    """Chain that clients are shown; together with `key`."""
    key: str = ""
    client_ca: str = ""
    """Clients must show a certificate of one of these authorities."""
    engine_ca: str = ""
    """Authorities of engines with https URLs; empty: the system's."""
    engine_name: str = ""
    """The name that engines' certificates must have; empty: the host of each engine's URL, or the pod's address."""


def access_problems(access: Access, source: str, anonymous: bool) -> list[str]:
    """What is wrong with `access` for tenants from `source`."""
    problems: list[str] = []
    by_gateway = source == "header"
    proven = bool(access.gateway_secret_file or access.gateway_networks)
    if by_gateway and not proven:
        problems.append(
            "--tenant-from: header needs --gateway-secret-file or --gateway-cidr, or any client could name any tenant "
            "(--gateway-cidr 0.0.0.0/0 ::/0 if nobody else can reach this port)"
        )
    if not by_gateway and proven:
        problems.append("--gateway-secret-file, --gateway-cidr: are for --tenant-from header")
    if by_gateway and access.api_keys_file:
        problems.append("--api-keys-file: is for --tenant-from authorization; a gateway in front checks keys itself")
    if access.api_keys_file and anonymous:
        problems.append("--anonymous: must be no-reuse with --api-keys-file, which refuses requests without a key")
    try:
        parse_networks(access.gateway_networks)
    except FileProblem as problem:
        problems.append(f"--gateway-cidr: {problem}")
    return problems


def tls_problems(tls: Tls, has_https_engines: bool) -> list[str]:
    """What is wrong with `tls`."""
    problems: list[str] = []
    if bool(tls.certificate) != bool(tls.key):
        problems.append("--tls-cert, --tls-key: must be given together")
    if tls.client_ca and not tls.certificate:
        problems.append("--tls-client-ca: needs --tls-cert and --tls-key")
    if not has_https_engines:
        problems.extend(
            f"{flag}: is for engines with https:// URLs or --pods-scheme https, and there are none"
            for flag, value in (("--engine-ca", tls.engine_ca), ("--engine-server-name", tls.engine_name))
            if value
        )
    return problems


def tenant_limit_problems(limits: TenantLimits) -> list[str]:
    """What is wrong with `limits`."""
    problems: list[str] = []
    if not 0 <= limits.rate < math.inf:
        problems.append(f"--tenant-rate: must be 0 (no limit) or more and finite, got {limits.rate:g}")
    if not 0 < limits.queue_share <= 1:
        problems.append(f"--tenant-queue-share: must be finite, above 0 and at most 1, got {limits.queue_share:g}")
    problems.extend(
        f"{flag}: must be 0 or more, got {value}"
        for flag, value in (
            ("--tenant-burst", limits.burst),
            ("--tenant-max-inflight", limits.max_inflight),
            ("--tenant-retained-tokens", limits.retained_tokens),
        )
        if value < 0
    )
    if limits.burst and not limits.rate:
        problems.append("--tenant-burst: needs --tenant-rate")
    if not 1 <= limits.tracked <= MAX_TRACKED:
        problems.append(f"--tenants-tracked: must be from 1 to {MAX_TRACKED}, got {limits.tracked}")
    return problems
