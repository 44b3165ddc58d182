"""Everything of this router that protects it, made from the settings in one place: door, TLS, tenants' limits.

Separate from the server so that the composition root stays a list of parts, and because these have their files to look
at and their refusals to count in common.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any, Final

from prometheus_client import Gauge

from pd_router.core.settings import Settings
from pd_router.core.tenant_limits import Meter, Retained, RetainedTokens, TenantMeter
from pd_router.shell.counts import Counter
from pd_router.shell.gate import Gate
from pd_router.shell.metrics import Bound, Metrics
from pd_router.shell.tls import EngineTls, ListenerTls
from pd_router.shell.watched_file import WatchedFile

log = logging.getLogger("pd_router.guard")

REFUSALS: Final = ("missing_api_key", "invalid_api_key", "untrusted_gateway")
LIMITS: Final = (
    "tenant_rate_limit",
    "tenant_concurrency_limit",
    "tenant_queue_limit",
    "tenant_retained_limit",
)


class Guard:
    """The parts. Raises SettingsError, naming the flag, for files that cannot be used."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        registry = metrics.registry
        metrics.closed["pd_router_unauthorized.reason"] = REFUSALS
        metrics.closed["pd_router_tenant_limited.limit"] = LIMITS
        self._refused = Bound(
            Counter("pd_router_unauthorized", "Requests without a proven principal", ["reason"], registry),
            REFUSALS,
        )
        self.limited = Bound(
            Counter(
                "pd_router_tenant_limited",
                "Requests refused, or turns that left no handle or whose lease is not prolonged, because their tenant "
                "was at a limit of its own",
                ["limit"],
                registry,
            ),
            LIMITS,
        )
        self.gate = Gate(settings.access, settings.tenancy, lambda reason: self._refused[reason].inc())
        self.listener = ListenerTls(settings.tls) if settings.tls.certificate else None
        self.engines = EngineTls(settings.tls, settings.timeouts.connect)
        self.meter: Meter = TenantMeter(settings.tenant_limits)
        self.retained: RetainedTokens = Retained(settings.tenant_limits.retained_tokens, settings.reuse.engine_ttl)
        self._files: list[WatchedFile[Any]] = [*self.gate.files()]
        if self.listener is not None:
            self._files.append(self.listener.files)
        if self.engines.files is not None:
            self._files.append(self.engines.files)
        trouble = Gauge(
            "pd_router_stale_files",
            "Files of keys or certificates that changed and could not be used; what was read before is in use",
            registry=registry,
        )
        trouble.set_function(lambda: sum(file.trouble is not None for file in self._files))

    @property
    def listener_context(self) -> ssl.SSLContext | None:
        """For the listener; None is plain HTTP."""
        return self.listener.context if self.listener is not None else None

    def is_own_fault(self, status: int | None) -> bool:
        """Whether an engine's answer is about the router's key and not about the client's request."""
        if status not in (401, 403) or self.gate.forwards_credentials:
            return False
        log.error("an engine refused the router's key with status %d (--engine-api-key-file)", status)
        return True

    def refresh(self, now: float) -> None:
        """Look at the files, and forget what tenants no longer hold."""
        for file in self._files:
            file.refresh()
        self.retained.expire(now)
