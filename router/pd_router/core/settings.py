"""Everything that can be set about the router, parsed once from plain values and checked as a whole.

Separate from the command line so that a configuration object (a PDDeployment rendered by the operator) and a person
typing flags meet the same rules and the same messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pd_router.core.access import Access, Tls, access_problems, tenant_limit_problems, tls_problems
from pd_router.core.addresses import Endpoint, SettingsError, parse_engine_url
from pd_router.core.hosts import name_problems
from pd_router.core.observe import Tracing, tracing_problems
from pd_router.core.store_settings import Valkey, valkey_problems
from pd_router.core.tenant_limits import TenantLimits

MAX_WORKERS = 64
MAX_PROBE_INTERVAL = 4.0
TTL_MARGIN = 10.0
"""Seconds by which the router's TTL ends before the engines': P declines reads in the last 5 s, and a prefill waits."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """When a handle may be used."""

    enabled: bool = True
    handle_ttl: float = 450.0
    """Seconds; how long after its arrival a handle is attached."""
    engine_ttl: float = 480.0
    """Seconds; the engines' `decoder_kv_blocks_ttl`. At least `TTL_MARGIN` above `handle_ttl`."""
    shared_ttl: float = 3600.0
    """Seconds; the same for handles that are not spent by a send: their holder is asked what is intact, so that no
    timer of its has to be kept to."""
    lease_heartbeat: float = 0.0
    """Seconds between two renewals of leases on one engine; 0 is a third of the shortest lease there."""
    lease_tool_hold: float = 600.0
    """Seconds for which a lease is renewed after an answer that calls tools."""
    recompute_threshold: int = 64
    """Tokens; the engines' `kv_recompute_threshold`. Fewer are not worth spending a handle for."""
    cap_bytes: int = 256 * 1024 * 1024
    cap_entries: int = 100_000
    reply_cap_bytes: int = 16 * 1024 * 1024
    """A longer reply is relayed but not linked by history."""


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Who a request belongs to."""

    source: str = "authorization"
    """`authorization`: each API key is a tenant. `header`: a trusted gateway names it in X-PD-Tenant."""
    anonymous: bool = False
    """Whether requests without a principal share one tenant; otherwise they get no reuse."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what the router holds at one time."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_inflight: int = 1024
    max_queue: int = 1024
    decode_overload: int = 4
    """The holder is passed over when it has more turns than this beyond those of the least loaded decode engine."""
    response_bytes: int = 64 * 1024 * 1024
    """What clients may name by `previous_response_id`: items of finished responses, in memory. 0 keeps none."""
    retry_share: float = 0.2
    """Retries per turn in the long run where an engine fails that answers; a burst of some is allowed besides."""


@dataclass(frozen=True, slots=True)
class Bypass:
    """When a turn goes to decode alone. All three must hold; `tokens` 0 is never."""

    tokens: int = 0
    """Tokens that decode would have to compute at most."""
    share: float = 0.1
    """The same as a share of the prompt, 0 to 1."""
    turns: int = 4
    """Turns that decode may have besides: what it computes for a prompt, its running streams wait for."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    connect: float = 2.0
    prefill: float = 600.0
    pull: float = 30.0
    """A prefill with a handle attached that has not answered by then is given up and retried without it."""
    first_byte: float = 60.0
    answer: float = 1800.0
    """Decode's whole answer when it is not streamed."""
    idle: float = 120.0
    queue: float = 30.0
    request: float = 60.0
    """For reading one request from a client."""
    lease: float = 30.0
    """The engines' `kv_lease_duration`: how long P keeps what it computed for a D that gives no sign of life."""
    client: float = 600.0
    """A client that takes nothing of its answer for this long is cut off."""
    keep_alive: float = 75.0
    """How long a client's connection may be idle after an answer; before its first request it has `request`."""
    drain: float = 120.0
    pair_quarantine: float = 30.0
    """After three failed transfers in a row, how long a pair of engines gets none; doubled by each failed probe."""
    probe_interval: float = 1.0
    probe_timeout: float = 5.0

    @property
    def handoff(self) -> float:
        """How long an abandoned turn may go on so that P's blocks are released: half of P's lease (HL-16)."""
        return self.lease / 2

    @property
    def probe_late(self) -> float:
        """When a health probe is late: three late ones in a row must be noticed within two thirds of P's lease. A
        decode engine that hangs and wakes up after it would read blocks that are somebody else's by then."""
        return min(self.probe_timeout, max(self.lease * 2 / 3 - self.probe_interval, self.probe_interval) / 3)


class Native(StrEnum):
    """Whether tokens are relayed by the compiled part: where it is there, always (else the start fails), or never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PodDiscovery:
    """The pods of one PDDeployment instead of engine URLs. Times in seconds."""

    namespace: str
    name: str
    kubeconfig: str = ""
    """A file; when empty, the service account of the pod that the router runs in, else $KUBECONFIG."""
    relist: float = 120.0
    """All pods are listed again at least this often, so that a lost event is not lost for ever."""
    stall: float = 150.0
    """A watch that is silent for so long is dead. Longer than `relist`, at which the server ends it: on a quiet API
    server the first bookmark was seen after two minutes."""
    retry_max: float = 30.0
    """Longest wait between two tries while the API server can't be reached."""
    tls: bool = False
    """Whether the engines in the pods speak TLS."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole router. Engines come from `prefill` and `decode`, or from `pods`."""

    listen: Endpoint
    admin: Endpoint
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    pods: PodDiscovery | None = None
    models: frozenset[str] = frozenset()
    allowed_hosts: frozenset[str] = frozenset()
    """Hosts that a handle may name besides those that the engines answer from."""
    generation: str = ""
    workers: int = 1
    """Processes that serve clients."""
    native: Native = Native.AUTO
    reuse: Reuse = field(default_factory=Reuse)
    valkey: Valkey | None = None
    """Where handles are kept for all routers; None: each keeps its own in memory."""
    tenancy: Tenancy = field(default_factory=Tenancy)
    access: Access = field(default_factory=Access)
    tls: Tls = field(default_factory=Tls)
    tracing: Tracing = field(default_factory=Tracing)
    tenant_limits: TenantLimits = field(default_factory=TenantLimits)
    limits: Limits = field(default_factory=Limits)
    bypass: Bypass = field(default_factory=Bypass)
    timeouts: Timeouts = field(default_factory=Timeouts)


def _source_problems(settings: Settings) -> list[str]:
    """What is wrong with where the engines come from."""
    problems: list[str] = []
    pods = settings.pods
    if pods is not None:
        if settings.prefill or settings.decode:
            problems.append(
                "--discover-kubernetes: cannot be combined with --prefill or --decode; the engines are the pods"
            )
        seconds = {
            "--discovery-relist": pods.relist,
            "--discovery-stall": pods.stall,
            "--discovery-retry-max": pods.retry_max,
        }
        problems.extend(_not_positive(seconds))
        return problems
    for flag, urls in (("--prefill", settings.prefill), ("--decode", settings.decode)):
        if not urls:
            problems.append(f"{flag}: at least one engine URL is needed, or --discover-kubernetes NAMESPACE/NAME")
        if len(set(urls)) != len(urls):
            problems.append(f"{flag}: the same URL is given twice")
        for url in urls:
            try:
                parse_engine_url(url, flag)
            except SettingsError as error:
                problems.extend(error.problems)
    if set(settings.prefill) & set(settings.decode):
        problems.append("--prefill, --decode: one URL is given for both roles; an engine has one role")
    return problems


def _has_https_engines(settings: Settings) -> bool:
    if settings.pods is not None:
        return settings.pods.tls
    return any(url.startswith("https:") for url in (*settings.prefill, *settings.decode))


def _not_positive(values: Mapping[str, float]) -> list[str]:
    """A problem for each value that is no finite number above 0; a NaN compares false, and is one."""
    return [
        f"{flag}: must be above 0 and finite, got {value:g}"
        for flag, value in values.items()
        if not 0 < value < math.inf
    ]


def _placement_problems(settings: Settings) -> list[str]:
    """What is wrong with how engines are chosen."""
    counts = {
        "--decode-overload": settings.limits.decode_overload,
        "--bypass-tokens": settings.bypass.tokens,
        "--bypass-decode-turns": settings.bypass.turns,
    }
    shares = {"--retry-share": settings.limits.retry_share, "--bypass-share": settings.bypass.share}
    return [
        *(f"{flag}: must be 0 or more, got {value}" for flag, value in counts.items() if value < 0),
        *(
            f"{flag}: must be a finite share from 0 to 1, got {value:g}"
            for flag, value in shares.items()
            if not 0 <= value <= 1
        ),
    ]


def check(settings: Settings) -> None:
    """Raise SettingsError with every problem that the combination has."""
    problems = _source_problems(settings)
    problems.extend(name_problems(settings.models, settings.allowed_hosts, settings.generation))
    if not 1 <= settings.workers <= MAX_WORKERS:
        problems.append(f"--workers: must be from 1 to {MAX_WORKERS}, got {settings.workers}")
    if settings.listen.port and settings.listen == settings.admin:
        problems.append("--admin: must differ from --listen")
    reuse = settings.reuse
    if not reuse.handle_ttl + TTL_MARGIN <= reuse.engine_ttl:
        problems.append(
            f"--handle-ttl: {reuse.handle_ttl:g} s must be at least {TTL_MARGIN:g} s below --engine-ttl "
            f"({reuse.engine_ttl:g} s): the engine frees the blocks at its TTL and a later read is someone else's text"
        )
    if reuse.recompute_threshold < 0:
        problems.append("--recompute-threshold: must be 0 or more tokens")
    timeouts = settings.timeouts
    positive = {
        "--handle-ttl": reuse.handle_ttl,
        "--engine-ttl": reuse.engine_ttl,
        "--unpinned-handle-ttl": reuse.shared_ttl,
        "--handle-cap-bytes": reuse.cap_bytes,
        "--handle-cap-entries": reuse.cap_entries,
        "--max-body-bytes": settings.limits.max_body_bytes,
        "--max-inflight": settings.limits.max_inflight,
        "--connect-timeout": timeouts.connect,
        "--prefill-timeout": timeouts.prefill,
        "--pull-timeout": timeouts.pull,
        "--first-byte-timeout": timeouts.first_byte,
        "--answer-timeout": timeouts.answer,
        "--client-timeout": timeouts.client,
        "--keep-alive-timeout": timeouts.keep_alive,
        "--idle-timeout": timeouts.idle,
        "--pair-quarantine": timeouts.pair_quarantine,
        "--lease": timeouts.lease,
        "--probe-interval": timeouts.probe_interval,
        "--probe-timeout": timeouts.probe_timeout,
    }
    problems.extend(_not_positive(positive))
    # 0 has a meaning here.
    waits = {
        "--queue-timeout": timeouts.queue,
        "--drain-timeout": timeouts.drain,
        "--lease-heartbeat": reuse.lease_heartbeat,
        "--lease-tool-hold": reuse.lease_tool_hold,
    }
    problems.extend(
        f"{flag}: must be 0 or more and finite, got {value:g}"
        for flag, value in waits.items()
        if not 0 <= value < math.inf
    )
    if settings.timeouts.probe_interval > MAX_PROBE_INTERVAL:
        problems.append(
            f"--probe-interval: must be at most {MAX_PROBE_INTERVAL:g} s: engines close an idle connection after 5 s, "
            "which looks like a restart"
        )
    if settings.limits.response_bytes < 0:
        problems.append("--response-cap-bytes: must be 0, which keeps no responses, or more bytes")
    if settings.limits.max_queue < 0:
        problems.append("--max-queue: must be 0 or more")
    problems.extend(_placement_problems(settings))
    if settings.tenancy.source not in ("authorization", "header"):
        problems.append(f"--tenant-from: {settings.tenancy.source!r} must be authorization or header")
    problems.extend(access_problems(settings.access, settings.tenancy.source, settings.tenancy.anonymous))
    problems.extend(tls_problems(settings.tls, _has_https_engines(settings)))
    problems.extend(tracing_problems(settings.tracing))
    problems.extend(tenant_limit_problems(settings.tenant_limits))
    if settings.valkey is not None:
        problems.extend(valkey_problems(settings.valkey))
    if problems:
        raise SettingsError(problems)
