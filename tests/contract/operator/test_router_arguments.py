"""The router reads what the operator renders, and both have the same defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.fields import COLLECTOR, VALKEY, VALKEY_LENGTH
from pd_operator.core.generation import generation
from pd_operator.core.render_router import render_router, render_router_in_cluster
from pd_router.__main__ import parse_settings
from pd_router.core.access import Access, Tls
from pd_router.core.settings import Bypass, Limits, Reuse, Settings, Tenancy, Timeouts
from pd_router.core.store_settings import Valkey, parse_url
from pd_router.core.tenant_limits import TenantLimits
from support.pddeployments import EXAMPLES, deployment, example

BY_HEADER = {"tenantFrom": "Header", "gateway": {"cidrs": ["10.0.0.0/8"]}}
URLS = (["http://10.0.0.1:8100"], ["http://10.0.0.2:8200"])


def settings_of(*edits: tuple[str, Any], base: dict[str, Any] | None = None) -> Settings:
    argv = render_router(deployment(*edits, base=base), "127.0.0.1:8000", "127.0.0.1:9000", *URLS).argv
    return parse_settings(argv[1:])[0]


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_the_router_accepts_the_examples(name: str) -> None:
    found = settings_of(base=example(name))
    assert found.generation == generation(deployment(base=example(name)))
    assert found.models == {example(name)["spec"]["model"]["servedName"]}


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_the_router_accepts_the_examples_in_a_cluster(name: str) -> None:
    value = deployment(("metadata.namespace", "team"), base=example(name))
    argv = render_router_in_cluster(value, "0.0.0.0:8000", "0.0.0.0:9000").argv
    found = parse_settings(argv[1:])[0]
    assert found.pods is not None
    assert (found.pods.namespace, found.pods.name) == ("team", value.metadata.name)
    assert (found.valkey is None) is (value.spec.router.handle_store.valkey is None)
    apart = {"pods": None, "valkey": None, "prefill": (), "decode": (), "listen": None, "admin": None}
    assert replace(found, **apart, generation="") == replace(
        settings_of(base=example(name)), prefill=(), decode=(), listen=None, admin=None, generation=""
    )


def test_defaults_are_the_same_on_both_sides() -> None:
    found = settings_of()
    assert found.reuse == Reuse()
    assert found.tenancy == Tenancy()
    assert found.limits == Limits()
    assert found.timeouts == Timeouts()
    assert found.bypass == Bypass()
    assert found.access == Access()
    assert found.tls == Tls()
    assert found.tenant_limits == TenantLimits()


@pytest.mark.parametrize(
    ("edit", "path", "value"),
    [
        (("spec.kvTransfer.bidirectional", "Disabled"), "reuse.enabled", False),
        (("spec.kvTransfer.decoderBlocksTTLSeconds", 120), "reuse.handle_ttl", 90),
        (("spec.kvTransfer.decoderBlocksTTLSeconds", 120), "reuse.engine_ttl", 120),
        (("spec.kvTransfer.routerTTLSeconds", 60), "reuse.handle_ttl", 60),
        (("spec.kvTransfer.routerTTLSeconds", 60), "reuse.shared_ttl", 60),
        (("spec.kvTransfer", {"retention": "Leased"}), "reuse.lease_tool_hold", 600),
        (("spec.kvTransfer", {"retention": "Leased", "lease": {"toolHoldSeconds": 9}}), "reuse.lease_tool_hold", 9),
        (("spec.kvTransfer.recomputeThresholdTokens", 7), "reuse.recompute_threshold", 7),
        (("spec.router.auth", BY_HEADER), "tenancy.source", "header"),
        (("spec.router.auth", BY_HEADER), "access.gateway_networks", ("10.0.0.0/8",)),
        (("spec.router.tenantLimits.queuePercent", 25), "tenant_limits.queue_share", 0.25),
        (("spec.router.auth.anonymous", "Allowed"), "tenancy.anonymous", True),
        (("spec.router.limits.maxQueue", 0), "limits.max_queue", 0),
        (("spec.router.tracing", {"endpoint": "http://c:1", "samplingPercent": 7}), "tracing.endpoint", "http://c:1"),
        (("spec.router.tracing", {"endpoint": "http://c:1", "samplingPercent": 7}), "tracing.sampling_ratio", 0.07),
        (("spec.router.timeouts.pullSeconds", 5), "timeouts.pull", 5),
        (("spec.router.placement.retryPercent", 7), "limits.retry_share", 0.07),
        (("spec.router.placement.pairQuarantineSeconds", 9), "timeouts.pair_quarantine", 9),
        (("spec.router.placement.bypass.maxNewTokens", 300), "bypass.tokens", 300),
        (("spec.router.placement.bypass.maxNewPercent", 25), "bypass.share", 0.25),
    ],
)
def test_a_field_reaches_its_setting(edit: tuple[str, Any], path: str, value: Any) -> None:
    found: Any = settings_of(edit)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_secrets_are_files_that_the_router_is_told_of() -> None:
    secret = {"name": "a", "key": "b"}
    value = deployment(
        ("spec.router.auth", {"apiKeysSecretRef": secret, "engineKeySecretRef": secret}),
        ("spec.router.tls", {"secretName": "c", "clientCASecretRef": secret}),
    )
    found = parse_settings(render_router_in_cluster(value, "0.0.0.0:8000", "0.0.0.0:9000").argv[1:])[0]
    assert found.access == Access(
        api_keys_file="/etc/pd-router/api-keys/b", engine_api_key_file="/etc/pd-router/engine-key/b"
    )
    assert found.tls == Tls("/etc/pd-router/tls/tls.crt", "/etc/pd-router/tls/tls.key", "/etc/pd-router/client-ca/b")


def test_a_shared_store_reaches_the_router_with_files_for_its_secrets() -> None:
    secret = {"name": "a", "key": "b"}
    store = {
        "url": "rediss://valkey.cache:6380/2",
        "keySecretRef": secret,
        "username": "pd",
        "passwordSecretRef": secret,
        "caSecretRef": secret,
        "timeoutMilliseconds": 100,
        "maxEntryBytes": 5000,
    }
    value = deployment(("spec.router.handleStore", {"type": "Valkey", "valkey": store}))
    found = parse_settings(render_router_in_cluster(value, "0.0.0.0:8000", "0.0.0.0:9000").argv[1:])[0]
    assert found.valkey == Valkey(
        url="rediss://valkey.cache:6380/2",
        key_file="/etc/pd-router/handle-key/b",
        username="pd",
        password_file="/etc/pd-router/valkey-password/b",
        ca_file="/etc/pd-router/valkey-ca/b",
        timeout=0.1,
        max_entry_bytes=5000,
    )
    # One machine has one router, and no Secrets.
    assert settings_of(("spec.router.handleStore", {"type": "Valkey", "valkey": store})).valkey is None


def test_a_shared_store_has_the_same_defaults_on_both_sides() -> None:
    store = {"url": "valkey://cache", "keySecretRef": {"name": "a", "key": "b"}}
    value = deployment(("spec.router.handleStore", {"type": "Valkey", "valkey": store}))
    found = parse_settings(render_router_in_cluster(value, "0.0.0.0:8000", "0.0.0.0:9000").argv[1:])[0]
    assert found.valkey == Valkey("valkey://cache", "/etc/pd-router/handle-key/b")


@given(url=st.from_regex(VALKEY, fullmatch=True).filter(lambda url: len(url) <= VALKEY_LENGTH))
@settings(deadline=None)
def test_a_server_that_the_definition_accepts_is_one_for_the_router(url: str) -> None:
    parse_url(url)


@given(endpoint=st.from_regex(COLLECTOR, fullmatch=True).filter(lambda url: len(url.split("/")[2]) <= 253))
@settings(deadline=None)
def test_a_collector_that_the_definition_accepts_is_one_for_the_router(endpoint: str) -> None:
    endpoint = endpoint[:512]
    value = deployment(("spec.router.tracing", {"endpoint": endpoint}))
    argv = render_router(value, "127.0.0.1:8000", "127.0.0.1:9000", *URLS).argv
    assert parse_settings(argv[1:])[0].tracing.endpoint == endpoint
