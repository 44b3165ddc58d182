"""`spec.router`: the data plane's size, limits and deadlines. Whether it reuses KV is `spec.kvTransfer`'s decision."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import Scaling, ServiceType, SessionAffinity, Switch
from pd_operator.core.fields import Port, Replicas, Seconds, SpecModel
from pd_operator.core.spec_pod import Annotations, PodSettings, Resources
from pd_operator.core.spec_router_access import RouterAuth, RouterTls, TenantLimits
from pd_operator.core.spec_router_observe import RouterLogging, RouterTracing
from pd_operator.core.spec_router_placement import RouterPlacement
from pd_operator.core.spec_router_store import HandleStore

MIB = 1 << 20
MOST_REQUESTS: Final = 100_000
"""Per router, in work or waiting: each holds a connection or two, and a router has some hundred thousand."""


class RouterLimits(SpecModel):
    """Bounds that protect the router and the engines."""

    max_body_bytes: int = Field(
        default=16 * MIB,
        strict=True,
        ge=1024,
        le=256 * MIB,
        description="Largest request body; larger ones get a 413.",
    )
    max_inflight: int = Field(
        default=1024, strict=True, ge=1, le=MOST_REQUESTS, description="Most requests in work at once, per router."
    )
    max_queue: int = Field(
        default=1024,
        strict=True,
        ge=0,
        le=MOST_REQUESTS,
        description="Most requests that wait for a place, per router; further ones get a 429 with Retry-After.",
    )
    response_bytes: int = Field(
        default=64 * MIB,
        strict=True,
        ge=0,
        le=4096 * MIB,
        description="Items of finished responses that each router keeps in memory, for previous_response_id of the "
        "Responses API. 0 keeps none; then clients have to send all items.",
    )


class RouterTimeouts(SpecModel):
    """Deadlines in whole seconds. Each leg has its own, because a dead peer may stay silent."""

    queue_seconds: Seconds = Field(
        default=30, description="Waiting for a place when maxInflight is reached; then a 429 with Retry-After."
    )
    connect_seconds: Seconds = Field(default=2, description="Opening a connection to an engine.")
    prefill_seconds: Seconds = Field(
        default=600,
        description="The whole prefill leg, from sending it to P's answer, waiting inside P included.",
    )
    pull_seconds: Seconds = Field(
        default=30,
        description="The same for a prefill with a handle; then it is tried once more without. Short, because a read "
        "from a dead D may hang without a sign. Never more than prefillSeconds.",
    )
    first_byte_seconds: Seconds = Field(
        default=60, description="Decode leg, from sending it to the first byte of the answer."
    )
    idle_seconds: Seconds = Field(default=120, description="Decode leg, between two pieces of a stream.")
    answer_seconds: Seconds = Field(default=1800, description="Decode leg, the whole answer when it is not streamed.")
    drain_seconds: Seconds = Field(
        default=120, description="After SIGTERM, how long running requests may finish before they are cut."
    )


class RouterService(SpecModel):
    """The Service that clients talk to."""

    type: ServiceType = Field(default=ServiceType.CLUSTER_IP, description="How the Service is exposed.")
    port: Port = Field(default=80, description="Port of the Service.")
    annotations: Annotations = Field(
        default={}, description="Annotations of the Service, for a load-balancer controller."
    )
    session_affinity: SessionAffinity = Field(
        default=SessionAffinity.NONE,
        description="ClientIP: requests of one address go to one router. Useful with several routers and store type "
        "Memory, when clients are not behind a common proxy.",
    )


class RouterSpec(SpecModel):
    """The router."""

    replicas: Replicas = Field(
        default=1,
        description="Number of routers. With store type Memory, more than one needs a load balancer that keeps a "
        "conversation on one router; otherwise turns that change router are recomputed. With Valkey any number works "
        "as one.",
    )
    workers: int = Field(
        default=1,
        strict=True,
        ge=1,
        le=64,
        description="Processes that serve clients in each router. One uses one core; more share the handle store, the "
        "port and the limits, and connections are spread over them. maxInflight and maxQueue are divided among them.",
    )
    scaling: Scaling = Field(
        default=Scaling.FIXED,
        description="Fixed: `replicas` decides. External: an autoscaler that targets the router's Deployment decides, "
        "and `replicas` is not applied.",
    )
    handle_store: HandleStore = Field(default=HandleStore(), description="Where handles are kept between turns.")
    auth: RouterAuth = Field(default=RouterAuth(), description="Who a request belongs to.")
    tls: RouterTls | None = Field(default=None, description="TLS for clients. Absent: plain HTTP.")
    tenant_limits: TenantLimits = Field(
        default=TenantLimits(), description="What one tenant may use of each router; no limits unless set."
    )
    limits: RouterLimits = Field(default=RouterLimits(), description="Bounds on size and number of requests.")
    placement: RouterPlacement = Field(
        default=RouterPlacement(), description="Which engines serve a turn, and how long a router trusts them."
    )
    timeouts: RouterTimeouts = Field(default=RouterTimeouts(), description="Deadlines per leg.")
    logging: RouterLogging = Field(default=RouterLogging(), description="The routers' log.")
    tracing: RouterTracing | None = Field(default=None, description="Spans per turn and leg. Absent: none.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        pattern=fields.IMAGE,
        description="Image of the router. Absent: the operator's, so that a new operator brings a new router.",
    )
    resources: Resources = Field(
        default=Resources(),
        description="Requests and limits of the router. Absent: derived from handleStore.maxBytes and workers.",
    )
    pod: PodSettings = Field(default=PodSettings(), description="Placement and metadata of the pods.")
    pod_disruption_budget: Switch = Field(
        default=Switch.ENABLED,
        description="Enabled: node drains evict one router at a time. There is none for a single router.",
    )
    service: RouterService = Field(default=RouterService(), description="The Service that clients talk to.")
