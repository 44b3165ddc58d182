"""One legal edit of every field of the spec, with the pods that it restarts.

Shared by the unit tests, which compare templates, and the cluster tests, which ask a real API server to accept them.
"""

from __future__ import annotations

from typing import Any

Edit = tuple[str, Any]

IMAGE: Edit = ("spec.engine.image", "r.example/vllm:v0.32.0")
SECRET = {"name": "hub", "key": "token"}

P, D, R = "prefill", "decode", "router"
ENGINES = {P, D}
ALL = {P, D, R}
NOBODY: set[str] = set()

CUSTOM: tuple[Edit, ...] = (("spec.nodeProfile", "Custom"), ("spec.customProfile", {}))
UNEQUAL: tuple[Edit, ...] = (("spec.kvTransfer.bidirectional", "Disabled"),)
RESTRICTED: tuple[Edit, ...] = (("spec.engine.securityProfile", "Restricted"),)
LISTED: tuple[Edit, ...] = (("spec.model.source", {"persistentVolumeClaim": {"claimName": "a"}}),)
EMPTY: tuple[Edit, ...] = (("spec.model.source", {"emptyDir": {}}),)
TRACED: Edit = ("spec.router.tracing", {"endpoint": "http://collector:4318"})
VALKEY = {"url": "valkey://cache.team:6379", "keySecretRef": SECRET}
SHARED: Edit = ("spec.router.handleStore", {"type": "Valkey", "valkey": VALKEY})
WITH_PASSWORD: Edit = (SHARED[0], {"type": "Valkey", "valkey": {**VALKEY, "passwordSecretRef": SECRET}})
WITH_TLS: Edit = (SHARED[0], {"type": "Valkey", "valkey": {**VALKEY, "url": "valkeys://cache.team:6380"}})
BY_HEADER: Edit = ("spec.router.auth", {"tenantFrom": "Header", "gateway": {"cidrs": ["192.168.0.0/16"]}})

Row = tuple[str, Any, set[str], tuple[Edit, ...]]

TABLE: list[Row] = [
    ("model.name", "Qwen/Qwen3-8B", ALL, ()),
    ("model.servedName", "chat", ALL, ()),
    ("model.revision", "abc", ENGINES, ()),
    ("model.maxModelLen", 4096, ENGINES, ()),
    ("model.dtype", "float16", ENGINES, ()),
    ("model.source.download", "Forbidden", ENGINES, ()),
    ("model.source.tokenSecretRef", SECRET, ENGINES, ()),
    ("model.source.persistentVolumeClaim.claimName", "b", ENGINES, LISTED),
    ("model.source.persistentVolumeClaim.readOnly", True, ENGINES, LISTED),
    ("model.source.emptyDir.sizeLimitGiB", 10, ENGINES, EMPTY),
    ("model.source.hostPath.path", "/mnt/b", ENGINES, (("spec.model.source", {"hostPath": {"path": "/mnt/a"}}),)),
    ("model.source.mountPath", "/weights", ENGINES, EMPTY),
    ("engine.image", "r.example/vllm:v0.33.0", ENGINES, ()),
    ("engine.imagePullPolicy", "Always", ENGINES, ()),
    ("engine.vllmVersion", "0.32.0", ENGINES, ()),
    ("engine.maxNumSeqs", 4, ENGINES, ()),
    ("engine.blockSize", 32, ENGINES, ()),
    ("engine.gpuMemoryUtilizationPercent", 80, ENGINES, ()),
    ("engine.startupTimeoutSeconds", 600, ENGINES, ()),
    ("engine.shutdownTimeoutSeconds", 60, ENGINES, ()),
    ("engine.preStopSeconds", 1, ENGINES, ()),
    ("engine.sharedMemoryGiB", 1, ENGINES, ()),
    ("engine.securityProfile", "Privileged", ENGINES, ()),
    ("engine.runAsUser", 1000, ENGINES, RESTRICTED),
    ("engine.hostNetwork", "Enabled", ENGINES, ()),
    ("engine.selfTest", "Disabled", ENGINES, ()),
    ("engine.extraArgs", ["--enforce-eager"], ENGINES, ()),
    ("engine.env", [{"name": "A", "value": "b"}], ENGINES, ()),
    ("engine.volumes", [{"name": "ca", "mountPath": "/etc/ca", "configMap": {"name": "ca"}}], ENGINES, ()),
    ("nodeProfile", "CPU", ENGINES, ()),
    ("customProfile.device", "CPU", ENGINES, CUSTOM),
    ("customProfile.acceleratorsPerNode", 4, NOBODY, CUSTOM),
    ("customProfile.defaultBackend", "LIBFABRIC", ENGINES, CUSTOM),
    ("router.replicas", 3, NOBODY, ()),
    ("router.scaling", "External", NOBODY, ()),
    ("router.handleStore.maxBytes", 1 << 20, {R}, ()),
    ("router.handleStore.maxEntries", 5, {R}, ()),
    ("router.handleStore.valkey.url", "rediss://other:6380/3", {R}, (SHARED,)),
    ("router.handleStore.valkey.keySecretRef", {"name": "keys", "key": "handles"}, {R}, (SHARED,)),
    ("router.handleStore.valkey.username", "pd", {R}, (WITH_PASSWORD,)),
    ("router.handleStore.valkey.passwordSecretRef", SECRET, {R}, (SHARED,)),
    ("router.handleStore.valkey.caSecretRef", SECRET, {R}, (WITH_TLS,)),
    ("router.handleStore.valkey.timeoutMilliseconds", 100, {R}, (SHARED,)),
    ("router.handleStore.valkey.maxEntryBytes", 1 << 20, {R}, (SHARED,)),
    ("router.auth.gateway.secretRef", SECRET, {R}, (BY_HEADER,)),
    ("router.auth.gateway.cidrs", ["10.0.0.0/8"], {R}, (BY_HEADER,)),
    ("router.auth.gateway.untrusted", "Ignore", {R}, (BY_HEADER,)),
    ("router.auth.apiKeysSecretRef", SECRET, {R}, ()),
    ("router.auth.engineKeySecretRef", SECRET, ALL, ()),
    ("router.tls.secretName", "certificate", {R}, ()),
    ("router.tls.clientCASecretRef", SECRET, {R}, (("spec.router.tls", {"secretName": "a"}),)),
    ("router.tenantLimits.requestsPerSecond", 5, {R}, ()),
    ("router.tenantLimits.burst", 5, {R}, (("spec.router.tenantLimits", {"requestsPerSecond": 1}),)),
    ("router.tenantLimits.maxInflight", 5, {R}, ()),
    ("router.tenantLimits.queuePercent", 50, {R}, ()),
    ("router.tenantLimits.retainedTokens", 5, {R}, ()),
    ("router.auth.anonymous", "Allowed", {R}, ()),
    ("router.limits.maxBodyBytes", 2048, {R}, ()),
    ("router.limits.responseBytes", 0, {R}, ()),
    ("router.logging.level", "Warning", {R}, ()),
    ("router.logging.format", "Text", {R}, ()),
    ("router.tracing.endpoint", "https://collector:4318", {R}, (TRACED,)),
    ("router.tracing.samplingPercent", 5, {R}, (TRACED,)),
    ("router.tracing.headersSecretRef", SECRET, {R}, (TRACED,)),
    ("router.limits.maxInflight", 5, {R}, ()),
    ("router.limits.maxQueue", 5, {R}, ()),
    ("router.workers", 4, {R}, ()),
    *((f"router.timeouts.{name}Seconds", 7, {R}, ()) for name in
      ("queue", "connect", "prefill", "pull", "firstByte", "idle", "answer", "drain")),
    *((f"router.placement.{name}", 7, {R}, ()) for name in
      ("decodeOverloadTurns", "pairQuarantineSeconds", "retryPercent", "bypass.maxNewTokens", "bypass.maxNewPercent",
       "bypass.maxDecodeTurns")),
    ("router.image", "r.example/pd-router:2", {R}, ()),
    ("router.resources.requests", {"cpu": 2}, {R}, ()),
    ("router.resources.limits", {"cpu": 2}, {R}, ()),
    ("router.podDisruptionBudget", "Disabled", NOBODY, ()),
    ("router.service.type", "NodePort", NOBODY, ()),
    ("router.service.port", 8080, NOBODY, ()),
    ("router.service.annotations", {"a": "b"}, NOBODY, ()),
    ("router.service.sessionAffinity", "ClientIP", NOBODY, ()),
    ("kvTransfer.bidirectional", "Disabled", ALL, ()),
    ("kvTransfer.decoderBlocksTTLSeconds", 120, ALL, ()),
    ("kvTransfer.routerTTLSeconds", 60, {R}, ()),
    ("kvTransfer.recomputeThresholdTokens", 128, ALL, ()),
    ("kvTransfer.backend", "LIBFABRIC", ENGINES, CUSTOM),
    ("kvTransfer.connector", "Stock", ENGINES, ()),
    ("kvTransfer.connectorImage", "r.example/pd-connector:2", ENGINES, ()),
    ("kvTransfer.retention", "Pinned", ENGINES, ()),
    ("kvTransfer.retention", "Leased", {D, R}, ()),
    ("kvTransfer.lease.seconds", 30, {D}, (("spec.kvTransfer.retention", "Leased"),)),
    ("kvTransfer.lease.sharePercent", 30, {D}, (("spec.kvTransfer.retention", "Leased"),)),
    ("kvTransfer.lease.toolHoldSeconds", 30, {R}, (("spec.kvTransfer.retention", "Leased"),)),
    ("kvTransfer.loadFailurePolicy", "Recompute", {D}, ()),
    ("kvTransfer.loadFailurePolicy", "Recompute", ENGINES, (("spec.kvTransfer.retention", "Pinned"),)),
    ("kvTransfer.leaseDurationSeconds", 60, ALL, ()),
    ("kvTransfer.extraConfig", [{"name": "num_threads", "value": "4"}], ENGINES, ()),
    ("topology.zone", "Any", ENGINES, ()),
    ("topology.hosts", "Any", ENGINES, ()),
    ("networkPolicy.mode", "Disabled", NOBODY, ()),
    ("networkPolicy.monitoringNamespaces", ["monitoring"], NOBODY, ()),
    ("imagePullSecrets", [{"name": "pull"}], ALL, ()),
    *((f"{part}.pod.{name}", value, {part}, ()) for part in (P, D, R) for name, value in (
        ("labels", {"team": "x"}),
        ("annotations", {"a": "b"}),
        ("nodeSelector", {"pool": "x"}),
        ("nodeMatchExpressions", [{"key": "a", "operator": "Exists"}]),
        ("tolerations", [{"key": "a", "operator": "Exists"}]),
        ("priorityClassName", "high"),
        ("runtimeClassName", "nvidia"),
        ("schedulerName", "volcano"),
    )),
    *((f"{role}.{name}", value, who and {role}, ()) for role in (P, D) for name, value, who in (
        ("replicas", 4, NOBODY),
        ("scaling", "External", NOBODY),
        ("maxNumSeqs", 2, ALL),
        ("prefixCaching", False, ALL),
        ("extraArgs", ["--enforce-eager"], ALL),
        ("env", [{"name": "A", "value": "b"}], ALL),
        ("resources.requests", {"cpu": 7}, ALL),
        ("resources.limits", {"memory": "500Gi"}, ALL),
        ("pod.serviceAccountName", "engines", ALL),
        ("pod.resourceClaims", [{"name": "nics", "resourceClaimTemplateName": "nics"}], ALL),
        ("updateStrategy.type", "OnDelete", NOBODY),
        ("updateStrategy.partition", 1, NOBODY),
        ("updateStrategy.maxUnavailable", 2, NOBODY),
        ("minReadySeconds", 0, NOBODY),
        ("podDisruptionBudget", "Disabled", NOBODY),
    )),
    # Both roles count in the generation, since each reads what the other wrote.
    ("prefill.tensorParallelSize", 2, ENGINES, UNEQUAL),
    ("decode.tensorParallelSize", 2, ENGINES, UNEQUAL),
]  # fmt: skip
"""Field, new value, whose pods restart, and what must be set before."""
