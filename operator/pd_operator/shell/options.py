"""What `pd-operator run` may be told: flags and environment → one frozen value."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ROUTER_IMAGE: Final = "PD_ROUTER_IMAGE"
CONNECTOR_IMAGE: Final = "PD_CONNECTOR_IMAGE"
PULL_POLICY: Final = "PD_IMAGE_PULL_POLICY"
PULL_SECRETS: Final = "PD_IMAGE_PULL_SECRETS"
NAMESPACE: Final = "PD_OPERATOR_NAMESPACE"
IDENTITY: Final = "PD_OPERATOR_IDENTITY"


@dataclass(frozen=True, slots=True)
class Options:
    """One operator process.

    Attributes:
        operator_namespace: where it runs; empty outside of a cluster.
        identity: names this operator on its children, NAMESPACE/RELEASE; two that differ don't share an object.
        namespaces: the ones that are served; empty means all of the cluster.
        resync: seconds between two complete looks at the cluster.
        router_poll: seconds between two questions to each router.
        workers: most PDDeployments that are reconciled at the same time.
        request_timeout: seconds for one API call.
    """

    router_image: str
    connector_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    operator_namespace: str = ""
    identity: str = "pd-operator"
    namespaces: tuple[str, ...] = ()
    resync: float = 300.0
    router_poll: float = 30.0
    workers: int = 8
    request_timeout: float = 30.0
    health: tuple[str, int] = ("0.0.0.0", 8080)
    metrics: tuple[str, int] = ("0.0.0.0", 8081)
    verbose: bool = False
    log_format: str = "json"


def parse_options(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Options:
    """Read the command line; exits with a message on a wrong one."""
    env = os.environ if environ is None else environ
    parser = _parser(env)
    args = parser.parse_args(argv)
    for flag, value in (("--router-image", args.router_image), ("--connector-image", args.connector_image)):
        if not value:
            parser.error(f"{flag} (or its environment variable) is required")
    return Options(
        router_image=args.router_image,
        connector_image=args.connector_image,
        image_pull_policy=args.image_pull_policy or None,
        image_pull_secrets=tuple(name for name in env.get(PULL_SECRETS, "").split(",") if name),
        operator_namespace=env.get(NAMESPACE, ""),
        identity=args.identity,
        namespaces=tuple(dict.fromkeys(args.namespace)),
        resync=args.resync,
        router_poll=args.router_poll,
        workers=args.workers,
        request_timeout=args.request_timeout,
        health=args.health,
        metrics=args.metrics,
        verbose=args.verbose,
        log_format=args.log_format,
    )


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    defaults = Options("", "")
    parser = argparse.ArgumentParser(
        prog="pd-operator",
        description="Makes engines, routers and their wiring from PDDeployment objects.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="serve until SIGTERM", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = run.add_argument
    scope = run.add_mutually_exclusive_group(required=True)
    scope.add_argument("--all-namespaces", action="store_true", help="serve the whole cluster")
    scope.add_argument("--namespace", action="append", default=[], metavar="NAME", help="serve this one; repeatable")
    add("--resync", type=_positive, default=defaults.resync, metavar="S", help="between complete looks at the cluster")
    add(
        "--router-poll", type=_positive, default=defaults.router_poll, metavar="S", help="between questions to a router"
    )
    add("--workers", type=int, default=defaults.workers, metavar="N", help="objects reconciled at the same time")
    add("--request-timeout", type=_positive, default=defaults.request_timeout, metavar="S", help="for one API call")
    add("--health", type=_address, default=_text(defaults.health), metavar="HOST:PORT", help="where /healthz is served")
    add(
        "--metrics",
        type=_address,
        default=_text(defaults.metrics),
        metavar="HOST:PORT",
        help="where /metrics is served",
    )
    add(
        "--identity",
        default=env.get(IDENTITY) or defaults.identity,
        metavar="NAMESPACE/RELEASE",
        help=f"which operator this is, for objects that two of them see; or {IDENTITY}",
    )
    add("--router-image", default=env.get(ROUTER_IMAGE, ""), metavar="IMAGE", help=f"or {ROUTER_IMAGE}")
    add("--connector-image", default=env.get(CONNECTOR_IMAGE, ""), metavar="IMAGE", help=f"or {CONNECTOR_IMAGE}")
    add("--image-pull-policy", default=env.get(PULL_POLICY, ""), metavar="WORD", help=f"or {PULL_POLICY}")
    add("--log-format", choices=("json", "plain"), default=defaults.log_format, help="of the log on standard error")
    add("--verbose", action="store_true", help="log what kopf and the HTTP client do, too")
    return parser


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text}")
    return host.strip("[]"), int(port)
