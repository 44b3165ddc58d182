"""`spec.router.auth`, `.tls` and `.tenantLimits`: who may use the router, over what, and how much.

Separate from the rest of the router's fields because all secrets are here. A Secret is only ever named: the kubelet
mounts it into the router's pods, and neither the operator nor the router has a right to read Secrets.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pd_operator.core.choices import Anonymous, TenantFrom, Untrusted
from pd_operator.core.fields import CIDR, ObjectName, SpecModel
from pd_operator.core.spec_engine import SecretKeyRef

MAX_CIDRS = 32

Network = Annotated[str, Field(min_length=3, max_length=43, pattern=CIDR)]


class TrustedGateway(SpecModel):
    """The gateway that may name tenants. Where both are set, both must hold."""

    secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Text that the gateway sends as x-pd-gateway-secret, at least 16 characters; one a line while one "
        "replaces another.",
    )
    cidrs: Annotated[tuple[Network, ...], Field(max_length=MAX_CIDRS)] = Field(
        default=(), description="Networks that the gateway's connections come from."
    )
    untrusted: Untrusted = Field(
        default=Untrusted.REFUSE,
        description="A tenant named by somebody else. Refuse: 403. Ignore: the request counts as one without a "
        "principal.",
    )


class RouterAuth(SpecModel):
    """Who a request belongs to. Handles never cross tenants."""

    tenant_from: TenantFrom = Field(
        default=TenantFrom.AUTHORIZATION,
        description="Authorization: the credential itself names the tenant, or with apiKeysSecretRef the name of its "
        "key. Header: a trusted gateway in front sets x-pd-tenant; gateway says how it proves itself.",
    )
    anonymous: Anonymous = Field(
        default=Anonymous.NO_REUSE,
        description="Requests without a principal. NoReuse: served, without reuse. Allowed: all of them are one "
        "tenant and may reuse each other's conversations.",
    )
    api_keys_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Keys that clients must have, as lines NAME:SHA256-HEX (pdctl key make writes them); others get a "
        "401. Edits reach running routers within about a minute. In a cluster only.",
    )
    gateway: TrustedGateway | None = Field(
        default=None, description="How the gateway proves itself; with tenantFrom Header."
    )
    engine_key_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="A key that engines demand (VLLM_API_KEY) and routers send, so that nobody who reaches an engine's "
        "port can pass the router by. In a cluster only.",
    )


class RouterTls(SpecModel):
    """TLS for clients. Renewed certificates reach running routers within about a minute. In a cluster only."""

    secret_name: ObjectName = Field(description="A Secret of type kubernetes.io/tls: tls.crt and tls.key.")
    client_ca_secret_ref: SecretKeyRef | None = Field(
        alias="clientCASecretRef",
        default=None,
        description="PEM certificates of authorities; clients must then have one of their certificates, and TLS 1.3.",
    )


class TenantLimits(SpecModel):
    """What one tenant may use of each router. 0 is no limit."""

    requests_per_second: int = Field(
        default=0, strict=True, ge=0, le=1_000_000, description="In the long run; beyond it 429 with Retry-After."
    )
    burst: int = Field(
        default=0,
        strict=True,
        ge=0,
        le=1_000_000,
        description="Requests at once after a pause; 0 is requestsPerSecond. Needs requestsPerSecond.",
    )
    max_inflight: int = Field(
        default=0, strict=True, ge=0, le=1_000_000, description="Requests at one time, waiting ones included."
    )
    queue_percent: int = Field(
        default=100, strict=True, ge=1, le=100, description="Share of limits.maxQueue that one tenant may fill."
    )
    retained_tokens: int = Field(
        default=0,
        strict=True,
        ge=0,
        le=1_000_000_000_000,
        description="Tokens that decode engines hold for a tenant's next turns. Pinned: of handles that nobody has "
        "read back; beyond it turns are served and leave none. Leased: of leases that a hold or tool calls prolong; "
        "beyond it none is, and a turn's KV is kept for lease.seconds only. Unpinned: nothing is held.",
    )
