"""The flags of `core.observe`. Separate from the other flags because they belong together on one page of `--help`."""

from __future__ import annotations

import argparse

from pd_router.core.observe import Logging, Tracing


def add_observe_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, in two groups."""
    tracing = Tracing()
    add = parser.add_argument_group("log", "to standard error; one line per turn at level info").add_argument
    add("--log-level", choices=("debug", "info", "warning"), default=Logging().level, help="least level that is shown")
    add("--log-format", choices=("json", "text"), default=Logging().format, help="one object per line, or for people")
    add = parser.add_argument_group("traces", "OpenTelemetry, over OTLP/HTTP; needs the extra `tracing`").add_argument
    add(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="a collector, such as http://collector:4318; further headers from OTEL_EXPORTER_OTLP_HEADERS",
    )
    add(
        "--trace-sampling-ratio",
        type=float,
        default=tracing.sampling_ratio,
        metavar="RATIO",
        help="share of turns to trace, 0 to 1; a client's traceparent decides for its own",
    )


def read_logging(args: argparse.Namespace) -> Logging:
    """Flags to settings."""
    return Logging(args.log_level, args.log_format)


def read_tracing(args: argparse.Namespace) -> Tracing:
    """Flags to settings, not checked yet."""
    return Tracing(args.otlp_endpoint, args.trace_sampling_ratio)
