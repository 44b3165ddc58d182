"""What the operator counts about itself. One registry per process, made explicitly so that tests can have their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Every metric of the operator; resident memory comes from `process_resident_memory_bytes`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconciles = Counter(
            "pd_operator_reconciles",
            "Reconciles by result: settled, beginning (pods have not begun), waiting (a child or pod is refused), "
            "soon (the API server is not ready for it), invalid (bad spec), standing_back (another operator's), gone, "
            "failed.",
            ("result",),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "pd_operator_reconcile_seconds", "Duration of one reconcile.", buckets=_BUCKETS, registry=self.registry
        )
        self.last_reconcile = Gauge(
            "pd_operator_last_reconcile_timestamp_seconds",
            "When an object was last looked at and found or brought in order.",
            ("namespace", "name"),
            registry=self.registry,
        )
        self.writes = Counter(
            "pd_operator_writes", "Writes by kind of object and cause.", ("kind", "why"), registry=self.registry
        )
        self.api_calls = Counter(
            "pd_operator_api_calls",
            "API calls without watches; code 0 = no answer.",
            ("method", "code"),
            registry=self.registry,
        )
        self.router_polls = Counter(
            "pd_operator_router_polls", "Questions to routers by result.", ("result",), registry=self.registry
        )
        self.deployments = Gauge("pd_operator_deployments", "PDDeployments that are served.", registry=self.registry)
        self.standing_back = Gauge(
            "pd_operator_standing_back",
            "PDDeployments that this operator leaves alone because another one manages them.",
            registry=self.registry,
        )
        self.takeovers = Counter(
            "pd_operator_takeovers",
            "PDDeployments that were taken over from another operator that gave no answer.",
            registry=self.registry,
        )
        self.waiting = Gauge("pd_operator_waiting", "PDDeployments that wait for a reconcile.", registry=self.registry)
        self.resyncs = Counter(
            "pd_operator_resyncs", "Complete looks at the cluster by result.", ("result",), registry=self.registry
        )
        self.namespace_served = Gauge(
            "pd_operator_namespace_served",
            "1 for each listed namespace, 0 while it is gone or forbidden; no series when the whole cluster is served.",
            ("name",),
            registry=self.registry,
        )
        self.missed = Counter(
            "pd_operator_watch_missed",
            "Changes that a complete look found and no watch ever brought.",
            registry=self.registry,
        )
