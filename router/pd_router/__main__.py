"""The command line: flags in, `Settings` out, run until told to stop."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence

from pd_router.access_flags import add_access_flags, read_access, read_tenant_limits, read_tls
from pd_router.core.addresses import SettingsError, parse_deployment, parse_endpoint
from pd_router.core.observe import Logging
from pd_router.core.settings import Bypass, Limits, Native, PodDiscovery, Reuse, Settings, Tenancy, Timeouts, check
from pd_router.core.workers import WORKER_VARIABLE
from pd_router.observe_flags import add_observe_flags, read_logging, read_tracing
from pd_router.store_flags import add_store_flags, read_store


def build_parser() -> argparse.ArgumentParser:
    """All flags, their units and defaults."""
    reuse, limits, timeouts = Reuse(), Limits(), Timeouts()
    parser = argparse.ArgumentParser(
        prog="pd-router",
        description="Routes OpenAI requests over prefill and decode engines; reuses decode's KV for the next turn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # what is short today may mean another flag tomorrow
    )
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="where clients connect")
    add("--admin", required=True, metavar="HOST:PORT", help="health, metrics and /debug/explain")
    add("--prefill", action="extend", nargs="+", default=[], metavar="URL", help="a prefill engine; repeatable")
    add("--decode", action="extend", nargs="+", default=[], metavar="URL", help="a decode engine; repeatable")
    _add_discovery(parser)
    add("--model", action="append", default=[], metavar="NAME", help="a served model name; any name when none is given")
    add("--workers", type=int, default=1, metavar="N", help="processes that serve clients, each on a core of its own")
    add(
        "--native",
        choices=[native.value for native in Native],
        default=Native.AUTO.value,
        help="relay tokens by what `python -m pd_router.native` compiles: where it is there, always, never",
    )
    add("--reuse", choices=("on", "off"), default="on", help="give decode's KV back to prefill on the next turn")
    add("--handle-ttl", type=float, default=reuse.handle_ttl, metavar="S", help="how long a handle may be used")
    add("--engine-ttl", type=float, default=reuse.engine_ttl, metavar="S", help="the engines' decoder_kv_blocks_ttl")
    _add_leases(parser)
    add(
        "--recompute-threshold",
        type=int,
        default=reuse.recompute_threshold,
        metavar="TOKENS",
        help="the engines' setting",
    )
    add("--handle-cap-bytes", type=int, default=reuse.cap_bytes, metavar="N", help="memory for handles")
    add("--handle-cap-entries", type=int, default=reuse.cap_entries, metavar="N", help="handles kept at most")
    add(
        "--allow-handle-host",
        action="append",
        default=[],
        metavar="HOST",
        help="a host that handles may name besides the engines' own",
    )
    add("--tenant-from", choices=("authorization", "header"), default="authorization", help="what names the tenant")
    add("--anonymous", choices=("reuse", "no-reuse"), default="no-reuse", help="requests without a principal")
    add(
        "--generation",
        default="",
        help="generation of the --prefill and --decode engines, shown in /debug/fleet; pods have it as a label",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=limits.max_body_bytes,
        metavar="N",
        help="a larger request is refused with 413",
    )
    add(
        "--response-cap-bytes",
        type=int,
        default=limits.response_bytes,
        metavar="BYTES",
        help="finished responses kept for previous_response_id; 0 keeps none",
    )
    add("--max-inflight", type=int, default=limits.max_inflight, metavar="N", help="turns served at one time")
    add(
        "--max-queue",
        type=int,
        default=limits.max_queue,
        metavar="N",
        help="turns waiting; one more is refused with 429",
    )
    _add_placement(parser)
    add("--queue-timeout", type=float, default=timeouts.queue, metavar="S", help="longest wait for admission")
    add("--connect-timeout", type=float, default=timeouts.connect, metavar="S", help="connecting to an engine")
    add("--prefill-timeout", type=float, default=timeouts.prefill, metavar="S", help="prefill leg without a handle")
    add("--pull-timeout", type=float, default=timeouts.pull, metavar="S", help="prefill leg with a handle")
    add("--first-byte-timeout", type=float, default=timeouts.first_byte, metavar="S", help="decode's first content")
    add(
        "--answer-timeout", type=float, default=timeouts.answer, metavar="S", help="decode's whole answer, not streamed"
    )
    add("--idle-timeout", type=float, default=timeouts.idle, metavar="S", help="between two chunks of a stream")
    add(
        "--client-timeout",
        type=float,
        default=timeouts.client,
        metavar="S",
        help="a client that takes nothing is cut off",
    )
    add(
        "--keep-alive-timeout",
        type=float,
        default=timeouts.keep_alive,
        metavar="S",
        help="an idle client connection is closed",
    )
    add("--drain-timeout", type=float, default=timeouts.drain, metavar="S", help="for running turns after SIGTERM")
    add("--lease", type=float, default=timeouts.lease, metavar="S", help="the engines' kv_lease_duration")
    add(
        "--pair-quarantine",
        type=float,
        default=timeouts.pair_quarantine,
        metavar="S",
        help="without transfers for a pair of engines that failed three in a row; then a turn probes it",
    )
    add("--probe-interval", type=float, default=timeouts.probe_interval, metavar="S", help="between two health probes")
    add("--probe-timeout", type=float, default=timeouts.probe_timeout, metavar="S", help="when a health probe is late")
    add_access_flags(parser)
    add_store_flags(parser)
    add_observe_flags(parser)
    return parser


def _add_leases(parser: argparse.ArgumentParser) -> None:
    reuse = Reuse()
    add = parser.add_argument_group("Unpinned and Leased", "handles that a send does not spend").add_argument
    add(
        "--unpinned-handle-ttl",
        type=float,
        default=reuse.shared_ttl,
        metavar="S",
        help="how long such a handle may be used; the engine says what is intact",
    )
    add(
        "--lease-heartbeat",
        type=float,
        default=reuse.lease_heartbeat,
        metavar="S",
        help="between two renewals of leases on one engine; 0: a third of the shortest lease there",
    )
    add(
        "--lease-tool-hold",
        type=float,
        default=reuse.lease_tool_hold,
        metavar="S",
        help="a lease is renewed for so long after an answer that calls tools; 0: not at all",
    )


def _add_placement(parser: argparse.ArgumentParser) -> None:
    limits, bypass = Limits(), Bypass()
    add = parser.add_argument_group("placement", "which engines serve a turn").add_argument
    add(
        "--decode-overload",
        type=int,
        default=limits.decode_overload,
        metavar="TURNS",
        help="beyond the least loaded engine's, before a conversation leaves the decode engine that holds it",
    )
    add(
        "--retry-share",
        type=float,
        default=limits.retry_share,
        metavar="SHARE",
        help="retries per turn in the long run where engines answer with failures; 0 allows none of these",
    )
    add(
        "--bypass-tokens",
        type=int,
        default=bypass.tokens,
        metavar="N",
        help="a turn with at most so many new tokens goes to the decode engine that has the rest, alone; 0 is off",
    )
    add(
        "--bypass-share",
        type=float,
        default=bypass.share,
        metavar="SHARE",
        help="the same as a share of the prompt; both must hold",
    )
    add(
        "--bypass-decode-turns",
        type=int,
        default=bypass.turns,
        metavar="TURNS",
        help="no bypass while that decode engine has more",
    )


def _add_discovery(parser: argparse.ArgumentParser) -> None:
    pods = PodDiscovery("", "")
    add = parser.add_argument_group("Kubernetes", "engines that are the pods of a PDDeployment").add_argument
    add("--discover-kubernetes", metavar="NAMESPACE/NAME", help="instead of --prefill and --decode")
    add(
        "--kubeconfig",
        default="",
        metavar="PATH",
        help="how to reach the API server; without it the pod's service account, else $KUBECONFIG",
    )
    add(
        "--discovery-relist", type=float, default=pods.relist, metavar="S", help="all pods are listed at least so often"
    )
    add("--pods-scheme", choices=("http", "https"), default="http", help="what the engines in the pods speak")
    add("--discovery-stall", type=float, default=pods.stall, metavar="S", help="a watch that is silent so long is dead")
    add(
        "--discovery-retry-max",
        type=float,
        default=pods.retry_max,
        metavar="S",
        help="longest wait between two tries while the API server can't be reached",
    )


def _pod_discovery(args: argparse.Namespace) -> PodDiscovery | None:
    if args.discover_kubernetes is None:
        unused = PodDiscovery("", "")
        given = {
            "--pods-scheme": args.pods_scheme == "https",
            "--kubeconfig": bool(args.kubeconfig),
            "--discovery-relist": args.discovery_relist != unused.relist,
            "--discovery-stall": args.discovery_stall != unused.stall,
            "--discovery-retry-max": args.discovery_retry_max != unused.retry_max,
        }
        text = "is for --discover-kubernetes NAMESPACE/NAME, which is not given"
        if problems := [f"{flag}: {text}" for flag, is_given in given.items() if is_given]:
            raise SettingsError(problems)
        return None
    namespace, name = parse_deployment(args.discover_kubernetes, "--discover-kubernetes")
    return PodDiscovery(
        namespace,
        name,
        args.kubeconfig,
        args.discovery_relist,
        args.discovery_stall,
        args.discovery_retry_max,
        args.pods_scheme == "https",
    )


def parse_settings(arguments: Sequence[str]) -> tuple[Settings, Logging]:
    """Flags to checked settings, and how to log. Raises SettingsError; argparse exits on its own errors."""
    args = build_parser().parse_args(arguments)
    settings = Settings(
        listen=parse_endpoint(args.listen, "--listen"),
        admin=parse_endpoint(args.admin, "--admin"),
        prefill=tuple(url.rstrip("/") for url in args.prefill),
        decode=tuple(url.rstrip("/") for url in args.decode),
        pods=_pod_discovery(args),
        models=frozenset(args.model),
        allowed_hosts=frozenset(args.allow_handle_host),
        generation=args.generation,
        workers=args.workers,
        native=Native(args.native),
        reuse=Reuse(
            enabled=args.reuse == "on",
            handle_ttl=args.handle_ttl,
            engine_ttl=args.engine_ttl,
            shared_ttl=args.unpinned_handle_ttl,
            lease_heartbeat=args.lease_heartbeat,
            lease_tool_hold=args.lease_tool_hold,
            recompute_threshold=args.recompute_threshold,
            cap_bytes=args.handle_cap_bytes,
            cap_entries=args.handle_cap_entries,
        ),
        valkey=read_store(args),
        access=read_access(args),
        tls=read_tls(args),
        tenant_limits=read_tenant_limits(args),
        tracing=read_tracing(args),
        tenancy=Tenancy(source=args.tenant_from, anonymous=args.anonymous == "reuse"),
        limits=Limits(
            max_body_bytes=args.max_body_bytes,
            max_inflight=args.max_inflight,
            max_queue=args.max_queue,
            response_bytes=args.response_cap_bytes,
            decode_overload=args.decode_overload,
            retry_share=args.retry_share,
        ),
        bypass=Bypass(args.bypass_tokens, args.bypass_share, args.bypass_decode_turns),
        timeouts=Timeouts(
            connect=args.connect_timeout,
            prefill=args.prefill_timeout,
            pull=min(args.pull_timeout, args.prefill_timeout)
            if math.isfinite(args.pull_timeout)
            else args.pull_timeout,
            first_byte=args.first_byte_timeout,
            answer=args.answer_timeout,
            idle=args.idle_timeout,
            queue=args.queue_timeout,
            client=args.client_timeout,
            keep_alive=args.keep_alive_timeout,
            drain=args.drain_timeout,
            lease=args.lease,
            pair_quarantine=args.pair_quarantine,
            probe_interval=args.probe_interval,
            probe_timeout=args.probe_timeout,
        ),
    )
    check(settings)
    return settings, read_logging(args)


def _outlive_signals() -> None:
    """What would end a process that does not ask for it: a terminal that closes, a SIGHUP that is to make it read its
    files again (which it does when they change), a stray SIGUSR1. None of these may cut the streams that run."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router. Exit codes: 0 after a drain, 1 when a port is taken, 2 for flags or credentials of no use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        settings, logging = parse_settings(arguments)
    except SettingsError as error:
        for problem in error.problems:
            print(f"pd-router: {problem}", file=sys.stderr)
        return 2
    _outlive_signals()
    # Imported late so that `--help` and bad flags answer at once.
    if settings.workers > 1:
        if WORKER_VARIABLE in os.environ:
            from pd_router.shell.worker_process import run_worker

            return run_worker(settings, logging)
        from pd_router.shell.supervisor import supervise

        return supervise(settings, logging, arguments)
    from pd_router.shell.running import run

    return run(settings, logging)


if __name__ == "__main__":
    sys.exit(main())
