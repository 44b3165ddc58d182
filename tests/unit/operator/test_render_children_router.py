"""The router's pods: restricted, drained before they end, with room for their handles."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.render_children import RenderContext, render_children
from support.pddeployments import deployment, flag_table
from support.spec_edits import SHARED

Edit = tuple[str, Any]

IMAGE: Edit = ("spec.engine.image", "r.example/vllm:v0.32.0")
CONTEXT = RenderContext(
    "uid-1", "r.example/pd-router:1", "r.example/pd-connector:1", "IfNotPresent", ("operators-pull",)
)


def spec_of(*edits: Edit) -> dict[str, Any]:
    [found] = [child for child in render_children(deployment(IMAGE, *edits), CONTEXT) if child["kind"] == "Deployment"]
    spec = found["spec"]
    assert isinstance(spec, dict)
    return spec


def pod(*edits: Edit) -> dict[str, Any]:
    found = spec_of(*edits)["template"]["spec"]
    assert isinstance(found, dict)
    return found


def container(*edits: Edit) -> dict[str, Any]:
    [found] = pod(*edits)["containers"]
    assert isinstance(found, dict)
    return found


def test_it_finds_the_engines_itself() -> None:
    flags = flag_table(tuple(container()["command"]))
    assert container()["command"][0] == "pd-router"
    assert flags["--listen"] == ["0.0.0.0:8000"]
    assert flags["--admin"] == ["0.0.0.0:9000"]
    assert flags["--discover-kubernetes"] == ["default/qwen"]
    assert not {"--prefill", "--decode", "--generation"} & flags.keys()


def test_ports_and_probes() -> None:
    router = container()
    assert [(port["name"], port["containerPort"]) for port in router["ports"]] == [("http", 8000), ("admin", 9000)]
    assert router["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert router["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert router[probe]["timeoutSeconds"] > 1, "a busy router answers late"


def test_it_passes_the_restricted_standard() -> None:
    assert pod()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod().keys()
    assert all("emptyDir" in volume for volume in pod()["volumes"])
    assert container()["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]


def test_its_token_is_its_own() -> None:
    assert pod()["serviceAccountName"] == "qwen-router"
    assert pod()["automountServiceAccountToken"] is True
    assert pod()["enableServiceLinks"] is False


@pytest.mark.parametrize("drain", [1, 120, 3600])
def test_grace_covers_the_sleep_and_the_drain(drain: int) -> None:
    found = pod(("spec.router.timeouts.drainSeconds", drain))
    sleep = found["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert found["terminationGracePeriodSeconds"] > sleep + drain


def test_an_update_never_takes_a_router_away_first() -> None:
    assert spec_of(("spec.router.replicas", 3))["replicas"] == 3
    assert spec_of()["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_routers_prefer_different_hosts() -> None:
    [term] = pod()["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in pod()["affinity"]["podAntiAffinity"]


def test_routers_do_not_ask_for_the_engines_nodes() -> None:
    assert not {"nodeSelector", "tolerations"} & pod().keys()


@pytest.mark.parametrize(
    ("edits", "resources"),
    [
        ([], {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1024Mi"}}),
        ([("spec.router.handleStore.maxBytes", 1 << 30)],
         {"requests": {"cpu": "250m", "memory": "1280Mi"}, "limits": {"memory": "2560Mi"}}),
        ([SHARED, ("spec.router.handleStore.maxBytes", 1 << 30)],
         {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}),
        ([("spec.router.workers", 2)],
         {"requests": {"cpu": "750m", "memory": "768Mi"}, "limits": {"memory": "1536Mi"}}),
        ([("spec.router.workers", 64), ("spec.router.resources", {"requests": {"cpu": 48}})],
         {"requests": {"cpu": "48", "memory": "8704Mi"}, "limits": {"memory": "17408Mi"}}),
        ([("spec.router.resources", {"requests": {"cpu": 2}, "limits": {"cpu": 4}})],
         {"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"cpu": "4", "memory": "1024Mi"}}),
    ],
)  # fmt: skip
def test_memory_follows_the_store_and_cpu_the_workers(edits: list[Edit], resources: dict[str, Any]) -> None:
    assert container(*edits)["resources"] == resources


def test_images_and_secrets() -> None:
    assert container()["image"] == "r.example/pd-router:1"
    assert container(("spec.router.image", "r.example/mine:2"))["image"] == "r.example/mine:2"
    assert container()["imagePullPolicy"] == "IfNotPresent"
    secrets = pod(("spec.imagePullSecrets", [{"name": "mine"}, {"name": "operators-pull"}]))["imagePullSecrets"]
    assert secrets == [{"name": "operators-pull"}, {"name": "mine"}]


def test_the_users_metadata_is_added() -> None:
    template = spec_of(("spec.router.pod", {"labels": {"team": "x"}, "annotations": {"a": "b"}}))["template"]
    assert template["metadata"]["labels"]["team"] == "x"
    assert template["metadata"]["annotations"] == {"a": "b"}


def test_why_it_died_is_kept() -> None:
    assert container()["terminationMessagePolicy"] == "FallbackToLogsOnError"


SECRET = {"name": "own", "key": "text"}
SECRETS: list[tuple[Edit, str, dict[str, Any]]] = [
    (
        ("spec.router.tls", {"secretName": "certificate"}),
        "tls",
        {
            "secretName": "certificate",
            "items": [{"key": "tls.crt", "path": "tls.crt"}, {"key": "tls.key", "path": "tls.key"}],
        },
    ),
    (("spec.router.auth", {"apiKeysSecretRef": SECRET}), "api-keys", {}),
    (("spec.router.auth", {"engineKeySecretRef": SECRET}), "engine-key", {}),
    (("spec.router.auth", {"tenantFrom": "Header", "gateway": {"secretRef": SECRET}}), "gateway", {}),
]


@pytest.mark.parametrize(("edit", "volume", "source"), SECRETS, ids=[row[1] for row in SECRETS])
def test_a_secret_is_mounted_whole_so_that_its_changes_arrive(edit: Edit, volume: str, source: dict[str, Any]) -> None:
    expected = source or {"secretName": "own", "items": [{"key": "text", "path": "text"}]}
    assert {"name": volume, "secret": expected} in pod(edit)["volumes"]
    [mount] = [mount for mount in container(edit)["volumeMounts"] if mount["name"] == volume]
    assert mount == {"name": volume, "mountPath": f"/etc/pd-router/{volume}", "readOnly": True}
    paths = {f"/etc/pd-router/{volume}/{item['path']}" for item in expected["items"]}
    assert paths <= set(container(edit)["command"])


def test_with_tls_the_port_stays_and_probes_are_plain() -> None:
    edit: Edit = ("spec.router.tls", {"secretName": "certificate"})
    [service] = [
        child
        for child in render_children(deployment(IMAGE, edit), CONTEXT)
        if child["kind"] == "Service" and child["metadata"]["name"].endswith("-router")
    ]
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "https"}
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(edit)[probe]["httpGet"].get("scheme", "HTTP") == "HTTP"


def test_engines_demand_the_key_that_routers_send() -> None:
    edit: Edit = ("spec.router.auth", {"engineKeySecretRef": SECRET})
    for child in render_children(deployment(IMAGE, edit), CONTEXT):
        if child["kind"] == "StatefulSet":
            [engine] = child["spec"]["template"]["spec"]["containers"]
            [variable] = [one for one in engine["env"] if one["name"] == "VLLM_API_KEY"]
            assert variable["valueFrom"] == {"secretKeyRef": SECRET}


def test_the_collectors_headers_come_from_a_secret_and_stand_on_no_command_line() -> None:
    tracing = {"endpoint": "http://c:4318", "headersSecretRef": {"name": "otlp", "key": "headers"}}
    router = container(("spec.router.tracing", tracing))
    reference = {"secretKeyRef": {"name": "otlp", "key": "headers"}}
    assert router["env"] == [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": reference}]
    assert "otlp" not in {word for word in router["command"] if word != "http://c:4318"}
    assert "env" not in container(("spec.router.tracing", {"endpoint": "http://c:4318"}))
