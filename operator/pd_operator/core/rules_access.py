"""Rules about who may use the router: combinations that would look safe and not be."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

from pd_operator.core.choices import Anonymous, TenantFrom
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem

GATEWAY_NEEDED = (
    "is required with tenantFrom Header, with secretRef or cidrs: otherwise any client could name any tenant"
)
GATEWAY_ONLY = "may be set with tenantFrom Header only"
GATEWAY_EMPTY = "needs secretRef or cidrs: otherwise any client could name any tenant"
KEYS_BY_GATEWAY = "must be left out with tenantFrom Header: the gateway checks keys itself"
KEYS_ANONYMOUS = "must be NoReuse with apiKeysSecretRef, which refuses requests without a key"
BURST = "needs requestsPerSecond"


def gateway(deployment: PDDeployment) -> Iterator[Problem]:
    """A tenant's name is only taken from somebody who proves to be the gateway."""
    auth = deployment.spec.router.auth
    path = "spec.router.auth.gateway"
    if auth.tenant_from is not TenantFrom.HEADER:
        if auth.gateway is not None:
            yield Problem(path, GATEWAY_ONLY)
        return
    if auth.gateway is None:
        yield Problem(path, GATEWAY_NEEDED)
    elif auth.gateway.secret_ref is None and not auth.gateway.cidrs:
        yield Problem(path, GATEWAY_EMPTY)
    if auth.api_keys_secret_ref is not None:
        yield Problem("spec.router.auth.apiKeysSecretRef", KEYS_BY_GATEWAY)


def networks(deployment: PDDeployment) -> Iterator[Problem]:
    """Each entry is a network: no bits are set behind its prefix."""
    trusted = deployment.spec.router.auth.gateway
    for index, cidr in enumerate(trusted.cidrs if trusted is not None else ()):
        try:
            ip_network(cidr)
        except ValueError:
            yield Problem(
                f"spec.router.auth.gateway.cidrs[{index}]",
                f"{cidr} must be a network such as 10.0.0.0/8 or fd00::/8, with no bits set behind its prefix",
            )


def keys(deployment: PDDeployment) -> Iterator[Problem]:
    """Requests without a key are refused or are one tenant, not both."""
    auth = deployment.spec.router.auth
    if auth.api_keys_secret_ref is not None and auth.anonymous is Anonymous.ALLOWED:
        yield Problem("spec.router.auth.anonymous", KEYS_ANONYMOUS)


def burst(deployment: PDDeployment) -> Iterator[Problem]:
    """A burst is one of a rate."""
    limits = deployment.spec.router.tenant_limits
    if limits.burst and not limits.requests_per_second:
        yield Problem("spec.router.tenantLimits.burst", BURST)


RULES = (gateway, networks, keys, burst)
