"""`spec.router.logging` and `spec.router.tracing`: what a router tells besides its metrics.

Separate from the rest of the router's section because nothing here changes how a request is served.
"""

from __future__ import annotations

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import LogFormat, LogLevel
from pd_operator.core.fields import SpecModel
from pd_operator.core.spec_engine import SecretKeyRef

WHOLE = 100
"""Per cent; then every turn is traced."""


class RouterLogging(SpecModel):
    """The routers' log."""

    level: LogLevel = Field(
        default=LogLevel.INFO, description="Least level that is shown. Each turn leaves one line of level Info."
    )
    format: LogFormat = Field(
        default=LogFormat.JSON, description="JSON: one object per line, for collectors. Text: for people."
    )


class RouterTracing(SpecModel):
    """OpenTelemetry spans: one per turn, with its wait and its legs below. Engines continue the trace if they trace."""

    endpoint: str = Field(
        min_length=1,
        max_length=512,
        pattern=fields.COLLECTOR,
        description="The collector's base URL for OTLP over HTTP, such as http://collector.monitoring:4318. Its path, "
        "if any, is kept, and /v1/traces added.",
    )
    headers_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Headers that the collector asks for, as NAME=VALUE pairs with commas between them "
        "(OTEL_EXPORTER_OTLP_HEADERS), in a Secret of the same namespace. Routers read it when they start.",
    )
    sampling_percent: int = Field(
        default=WHOLE,
        strict=True,
        ge=0,
        le=WHOLE,
        description="Share of the turns to trace among those whose client sent no traceparent; a client that sent one "
        "has decided for its own.",
    )
