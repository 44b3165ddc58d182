"""The router's command: each field is one flag, and reuse and time limits follow `spec.kvTransfer`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.generation import generation
from pd_operator.core.render_router import render_router
from support.pddeployments import deployment, flag_table


def options(*edits: tuple[str, Any]) -> dict[str, list[str]]:
    argv = render_router(deployment(*edits), "127.0.0.1:8000", "127.0.0.1:9000", ["http://p"], ["http://d"]).argv
    assert argv[0] == "pd-router"
    return flag_table(argv)


DEFAULTS = [
    ("--listen", "127.0.0.1:8000"),
    ("--admin", "127.0.0.1:9000"),
    ("--prefill", "http://p"),
    ("--decode", "http://d"),
    ("--model", "Qwen/Qwen3-32B"),
    ("--reuse", "on"),
    ("--handle-ttl", "450"),
    ("--engine-ttl", "480"),
    ("--lease", "30"),
    ("--workers", "1"),
    ("--recompute-threshold", "64"),
    ("--tenant-from", "authorization"),
    ("--anonymous", "no-reuse"),
    ("--handle-cap-bytes", "268435456"),
    ("--handle-cap-entries", "100000"),
    ("--max-body-bytes", "16777216"),
    ("--response-cap-bytes", "67108864"),
    ("--max-inflight", "1024"),
    ("--max-queue", "1024"),
    ("--connect-timeout", "2"),
    ("--queue-timeout", "30"),
    ("--prefill-timeout", "600"),
    ("--pull-timeout", "30"),
    ("--first-byte-timeout", "60"),
    ("--idle-timeout", "120"),
    ("--answer-timeout", "1800"),
    ("--drain-timeout", "120"),
    ("--decode-overload", "4"),
    ("--pair-quarantine", "30"),
    ("--retry-share", "0.2"),
    ("--bypass-tokens", "0"),
    ("--bypass-share", "0.1"),
    ("--bypass-decode-turns", "4"),
    ("--log-level", "info"),
    ("--log-format", "json"),
]


def test_defaults_are_these_and_no_others() -> None:
    expected = {flag: [value] for flag, value in DEFAULTS}
    assert options() == expected | {"--generation": [generation(deployment())]}


@pytest.mark.parametrize(
    ("path", "value", "flag", "expected"),
    [
        ("spec.model.servedName", "chat", "--model", "chat"),
        ("spec.kvTransfer.bidirectional", "Disabled", "--reuse", "off"),
        ("spec.kvTransfer.decoderBlocksTTLSeconds", 120, "--engine-ttl", "120"),
        ("spec.kvTransfer.decoderBlocksTTLSeconds", 120, "--handle-ttl", "90"),
        ("spec.kvTransfer.routerTTLSeconds", 17, "--handle-ttl", "17"),
        ("spec.kvTransfer.leaseDurationSeconds", 12, "--lease", "12"),
        ("spec.kvTransfer.recomputeThresholdTokens", 0, "--recompute-threshold", "0"),
        ("spec.router.workers", 8, "--workers", "8"),
        ("spec.router.tenantLimits.requestsPerSecond", 5, "--tenant-rate", "5"),
        ("spec.router.tenantLimits.maxInflight", 6, "--tenant-max-inflight", "6"),
        ("spec.router.tenantLimits.queuePercent", 25, "--tenant-queue-share", "0.25"),
        ("spec.router.tenantLimits.retainedTokens", 7000, "--tenant-retained-tokens", "7000"),
        ("spec.router.auth.anonymous", "Allowed", "--anonymous", "reuse"),
        ("spec.router.handleStore.maxBytes", 2097152, "--handle-cap-bytes", "2097152"),
        ("spec.router.handleStore.maxEntries", 7, "--handle-cap-entries", "7"),
        ("spec.router.limits.maxBodyBytes", 2048, "--max-body-bytes", "2048"),
        ("spec.router.limits.responseBytes", 0, "--response-cap-bytes", "0"),
        ("spec.router.limits.maxInflight", 5, "--max-inflight", "5"),
        ("spec.router.logging.level", "Warning", "--log-level", "warning"),
        ("spec.router.logging.format", "Text", "--log-format", "text"),
        ("spec.router.tracing", {"endpoint": "http://c:4318/x"}, "--otlp-endpoint", "http://c:4318/x"),
        ("spec.router.tracing", {"endpoint": "http://c:4318"}, "--trace-sampling-ratio", "1"),
        ("spec.router.tracing", {"endpoint": "http://c", "samplingPercent": 3}, "--trace-sampling-ratio", "0.03"),
        ("spec.router.limits.maxQueue", 0, "--max-queue", "0"),
        ("spec.router.timeouts.connectSeconds", 3, "--connect-timeout", "3"),
        ("spec.router.timeouts.prefillSeconds", 31, "--prefill-timeout", "31"),
        ("spec.router.timeouts.firstByteSeconds", 32, "--first-byte-timeout", "32"),
        ("spec.router.timeouts.idleSeconds", 33, "--idle-timeout", "33"),
        ("spec.router.timeouts.queueSeconds", 29, "--queue-timeout", "29"),
        ("spec.router.timeouts.pullSeconds", 35, "--pull-timeout", "35"),
        ("spec.router.timeouts.answerSeconds", 36, "--answer-timeout", "36"),
        ("spec.router.timeouts.drainSeconds", 34, "--drain-timeout", "34"),
        ("spec.router.placement.decodeOverloadTurns", 9, "--decode-overload", "9"),
        ("spec.router.placement.pairQuarantineSeconds", 41, "--pair-quarantine", "41"),
        ("spec.router.placement.retryPercent", 5, "--retry-share", "0.05"),
        ("spec.router.placement.bypass.maxNewTokens", 300, "--bypass-tokens", "300"),
        ("spec.router.placement.bypass.maxNewPercent", 25, "--bypass-share", "0.25"),
        ("spec.router.placement.bypass.maxDecodeTurns", 3, "--bypass-decode-turns", "3"),
    ],
)
def test_field_becomes_flag(path: str, value: Any, flag: str, expected: str) -> None:
    assert options((path, value))[flag] == [expected]


def test_on_one_machine_a_gateway_without_networks_connects_from_it() -> None:
    auth = {"tenantFrom": "Header", "gateway": {"secretRef": {"name": "a", "key": "b"}, "untrusted": "Ignore"}}
    found = options(("spec.router.auth", auth))
    assert found["--tenant-from"] == ["header"]
    assert found["--gateway-cidr"] == ["127.0.0.0/8", "::1/128"]
    assert found["--untrusted-tenant"] == ["ignore"]
    auth["gateway"]["cidrs"] = ["10.0.0.0/8", "fd00::/8"]  # type: ignore[index]
    assert options(("spec.router.auth", auth))["--gateway-cidr"] == ["10.0.0.0/8", "fd00::/8"]


def test_every_engine_is_named_in_order() -> None:
    argv = render_router(deployment(), "l:1", "a:2", ["http://p0", "http://p1"], ["http://d0"]).argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--prefill"] == ["http://p0", "http://p1"]


@given(st.integers(20, 86400))
@settings(deadline=None)
def test_the_router_always_forgets_first(ttl: int) -> None:
    found = options(("spec.kvTransfer.decoderBlocksTTLSeconds", ttl))
    [handle], [engine] = found["--handle-ttl"], found["--engine-ttl"]
    assert 0 < int(handle) <= int(engine) - 10
