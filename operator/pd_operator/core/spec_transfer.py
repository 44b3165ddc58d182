"""`spec.kvTransfer`: the one switch for reuse, and everything that has to move with it.

The engines' flags, the router's use of handles and both time limits are derived from this block, since each of them is
useless or dangerous without the others.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import Backend, Connector, LoadFailurePolicy, Retention, Switch
from pd_operator.core.fields import SpecModel
from pd_wire.lease import DEFAULT_SECONDS, DEFAULT_SHARE, MAX_SECONDS

TTL_MARGIN_SECONDS: Final = 30
"""The router forgets a handle this long before D frees its blocks, so that a slow hand-off is still in time."""

READ_MARGIN_SECONDS: Final = 10
"""Least distance between the two limits: P declines reads in D's last 5 s, and the prefill may wait in a queue."""


class ExtraConfigEntry(SpecModel):
    """One more key of the connector's `kv_connector_extra_config`."""

    name: str = Field(min_length=1, max_length=128, pattern=fields.WORD, description="The connector's own key.")
    value: str = Field(
        min_length=1, max_length=1024, pattern=fields.PRINTABLE, description="The value, written as JSON: 4, true."
    )


class Lease(SpecModel):
    """With retention Leased: how long and how much decode keeps for turns that nobody has continued yet."""

    seconds: int = Field(
        default=DEFAULT_SECONDS,
        strict=True,
        ge=1,
        le=MAX_SECONDS,
        description="How long decode keeps a finished turn's blocks, unless a request would have to wait for them. "
        "Routers prolong it while a turn of the conversation runs, while the client runs tools, and as long as its "
        "header X-Conversation-Hold says.",
    )
    share_percent: int = Field(
        default=round(100 * DEFAULT_SHARE),
        strict=True,
        ge=1,
        le=95,
        description="Most of decode's KV blocks that leases may hold together, in percent. What of a turn goes "
        "beyond that is as with Unpinned.",
    )
    tool_hold_seconds: int = Field(
        default=600,
        strict=True,
        ge=0,
        le=MAX_SECONDS,
        description="How long routers prolong a lease after an answer that calls tools; 0 leaves it as it is.",
    )


class KVTransferSpec(SpecModel):
    """How KV moves between the roles."""

    bidirectional: Switch = Field(
        default=Switch.ENABLED,
        description="Reuse of D's KV by P on the next turn: sets the flag on both roles and the router's replay of "
        "handles together. Disabled moves KV from P to D only.",
    )
    decoder_blocks_ttl_seconds: int = Field(
        default=480,
        alias="decoderBlocksTTLSeconds",
        strict=True,
        ge=20,
        le=86400,
        description="How long D keeps the blocks of a finished turn with retention Pinned. They cost decode memory "
        "until they are read or this time is over.",
    )
    router_ttl_seconds: int | None = Field(
        default=None,
        alias="routerTTLSeconds",
        strict=True,
        ge=1,
        le=86400,
        description="How long the router uses a handle; at least 10 s less than decoderBlocksTTLSeconds. "
        "Absent: 30 s less, or half of it when it is under a minute; an hour for handles to blocks that D has no timer "
        "for (retention Unpinned and Leased).",
    )
    recompute_threshold_tokens: int = Field(
        default=64,
        strict=True,
        ge=0,
        le=1_000_000,
        description="P computes instead of reading when it would read fewer tokens than this. 0 always reads.",
    )
    backend: Backend | None = Field(
        default=None, description="NIXL backend of both roles. Absent: LIBFABRIC on EFA, UCX elsewhere."
    )
    connector: Connector = Field(
        default=Connector.VERIFIED,
        description="Verified: our connector, which proves that the blocks hold the prompt before it reads them. "
        "Stock: vLLM's pull connector; the router then reuses only what the history itself proves. Push connectors "
        "are not supported.",
    )
    connector_image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        pattern=fields.IMAGE,
        description="Image that carries our connector into the engines' pods. Absent: the operator's, so that a new "
        "operator restarts the engines once. Name one here to choose that moment.",
    )
    retention: Retention | None = Field(
        default=None,
        description="What becomes of a finished turn's blocks on D. Unpinned: they go back to the pool, are the last "
        "to be taken, and P makes sure that they are intact after it has read them; decode memory is never held for "
        "turns that may not come. Pinned: vLLM's own way, D keeps them for decoderBlocksTTLSeconds and admits nothing "
        "into that memory. Leased: as Unpinned, and D keeps them out of other requests' reach for `lease.seconds` and "
        "while routers prolong it; it gives them up before a request has to wait. Absent: Unpinned with connector "
        "Verified, Pinned with Stock. Engines that can't do Unpinned (vLLM before 0.32, several KV cache groups, "
        "context parallelism) retain Pinned; the condition BidirectionalActive tells it.",
    )
    lease: Lease | None = Field(
        default=None, description="Only with retention Leased. Absent: the defaults of its fields."
    )
    load_failure_policy: LoadFailurePolicy = Field(
        default=LoadFailurePolicy.FAIL,
        description="Fail: the engine answers with an error and the router retries without the handle. Recompute: "
        "the engine recomputes; needs connector Verified, since the stock one then waits for ever. With retention "
        "Unpinned prefill always recomputes.",
    )
    lease_duration_seconds: int = Field(
        default=30,
        strict=True,
        ge=6,
        le=3600,
        description="How long P keeps blocks for D without a sign of life. D renews it while a request waits.",
    )
    extra_config: Annotated[tuple[ExtraConfigEntry, ...], Field(max_length=16)] = Field(
        default=(), description="Keys of the connector that have no field here."
    )

    @property
    def retention_mode(self) -> Retention:
        """What the engines are told to do; they fall back to Pinned where they can't do it."""
        if self.retention is not None:
            return self.retention
        return Retention.UNPINNED if self.connector is Connector.VERIFIED else Retention.PINNED

    @property
    def leases(self) -> Lease | None:
        """With retention Leased its numbers, with their defaults; None with any other."""
        return (self.lease or Lease()) if self.retention_mode is Retention.LEASED else None

    @property
    def handle_ttl_seconds(self) -> int:
        """How long the router may use a handle, in seconds; always less than `decoderBlocksTTLSeconds`."""
        if self.router_ttl_seconds is not None:
            return self.router_ttl_seconds
        ttl = self.decoder_blocks_ttl_seconds
        return max(ttl - TTL_MARGIN_SECONDS, ttl // 2)
