"""The flags of `core.access`. Separate from the other flags because they belong together on one page of `--help`."""

from __future__ import annotations

import argparse

from pd_router.core.access import Access, Tls
from pd_router.core.tenant_limits import TenantLimits


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, in three groups."""
    limits = TenantLimits()
    add = parser.add_argument_group("access", "who may come in; files are read again when they change").add_argument
    add("--api-keys-file", default="", metavar="PATH", help="lines NAME:SHA256-HEX; other requests get a 401")
    add(
        "--gateway-secret-file",
        default="",
        metavar="PATH",
        help="with --tenant-from header: secrets, one a line, one of which must come as x-pd-gateway-secret",
    )
    add(
        "--gateway-cidr",
        action="extend",
        nargs="+",
        default=[],
        metavar="CIDR",
        help="with --tenant-from header: where the gateway connects from; repeatable; both must hold if both are given",
    )
    add(
        "--untrusted-tenant",
        choices=("refuse", "ignore"),
        default="refuse",
        help="a tenant header that isn't the gateway's",
    )
    add(
        "--engine-api-key-file",
        default="",
        metavar="PATH",
        help="the key to send to engines (vLLM's --api-key) instead of the client's",
    )
    add = parser.add_argument_group("TLS", "PEM files, read again when they change").add_argument
    add("--tls-cert", default="", metavar="PATH", help="certificate chain for clients; plain HTTP without it")
    add("--tls-key", default="", metavar="PATH", help="its private key")
    add("--tls-client-ca", default="", metavar="PATH", help="clients must have a certificate of these authorities")
    add("--engine-ca", default="", metavar="PATH", help="authorities of https engines; the system's without it")
    add(
        "--engine-server-name",
        default="",
        metavar="NAME",
        help="the name that engines' certificates must have; else the host of each URL",
    )
    add = parser.add_argument_group("tenant limits", "per tenant and per router; 0 is no limit").add_argument
    add("--tenant-rate", type=float, default=limits.rate, metavar="N", help="requests per second, in the long run")
    add("--tenant-burst", type=int, default=limits.burst, metavar="N", help="requests at once; 0 is one second's")
    add("--tenant-max-inflight", type=int, default=limits.max_inflight, metavar="N", help="requests at one time")
    add(
        "--tenant-queue-share",
        type=float,
        default=limits.queue_share,
        metavar="SHARE",
        help="share of --max-queue for one tenant",
    )
    add(
        "--tenant-retained-tokens",
        type=int,
        default=limits.retained_tokens,
        metavar="TOKENS",
        help="tokens that decode engines hold for the next turns; beyond it turns leave no Pinned handle, and leases "
        "are not prolonged",
    )
    add("--tenants-tracked", type=int, default=limits.tracked, metavar="N", help="tenants told apart; others share")


def read_access(args: argparse.Namespace) -> Access:
    """What the flags say about access."""
    return Access(
        api_keys_file=args.api_keys_file,
        gateway_secret_file=args.gateway_secret_file,
        gateway_networks=tuple(args.gateway_cidr),
        refuse_untrusted=args.untrusted_tenant == "refuse",
        engine_api_key_file=args.engine_api_key_file,
    )


def read_tls(args: argparse.Namespace) -> Tls:
    """What the flags say about TLS."""
    return Tls(args.tls_cert, args.tls_key, args.tls_client_ca, args.engine_ca, args.engine_server_name)


def read_tenant_limits(args: argparse.Namespace) -> TenantLimits:
    """What the flags say about tenants' limits."""
    return TenantLimits(
        rate=args.tenant_rate,
        burst=args.tenant_burst,
        max_inflight=args.tenant_max_inflight,
        queue_share=args.tenant_queue_share,
        retained_tokens=args.tenant_retained_tokens,
        tracked=args.tenants_tracked,
    )
