"""Settings of what a router tells about itself besides its metrics: its log and its traces, with their rules.

Separate from `settings`, which ties all groups together, because nothing here changes what happens to a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pd_router.core.hosts import is_host

TRACES_PATH = "/v1/traces"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Logging:
    """The log goes to standard error."""

    level: str = "info"
    """`debug`, `info` or `warning`; the line about each turn is of level info."""
    format: str = "json"
    """`json`: an object per line. `text`: for people."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """Spans over OTLP/HTTP; none without an endpoint."""

    endpoint: str = ""
    """The collector's base URL; `/v1/traces` is added unless it is there. Headers that it asks for come from
    `OTEL_EXPORTER_OTLP_HEADERS`, so that no key stands on a command line."""
    sampling_ratio: float = 1.0
    """Share of the turns to trace, from 0 to 1, of those whose client has not decided it in its `traceparent`."""

    @property
    def url(self) -> str:
        """Where spans are sent."""
        base = self.endpoint.rstrip("/")
        return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def tracing_problems(tracing: Tracing) -> list[str]:
    """What is wrong with `tracing`, each naming the flag and the value allowed."""
    problems: list[str] = []
    if tracing.endpoint and not _is_collector(tracing.endpoint):
        problems.append(
            f"--otlp-endpoint: {_shown(tracing.endpoint)} must be http://HOST:PORT or https://HOST:PORT, with or "
            "without a path, without a query and without credentials"
        )
    if not 0.0 <= tracing.sampling_ratio <= 1.0:
        problems.append(
            f"--trace-sampling-ratio: must be finite and from 0 to 1, got {tracing.sampling_ratio:g}; "
            "0.1 is one turn in ten"
        )
    return problems


def _is_collector(value: str) -> bool:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        return False
    fits = (
        parts.scheme in ("http", "https") and is_host(parts.hostname or "") and (port is None or 0 < port <= MAX_PORT)
    )
    plain = value.isascii() and value.isprintable() and " " not in value
    return fits and plain and not (parts.query or parts.fragment or parts.username or parts.password)


def _shown(value: str) -> str:
    """The value without what may be a password."""
    _, at, rest = value.rpartition("@")
    return repr(f"…@{rest}" if at else value)
