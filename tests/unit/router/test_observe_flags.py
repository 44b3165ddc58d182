"""Flags of log and traces; traces cost nothing when they are off, and say what is missing when they can't be on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd_router.__main__ import main, parse_settings
from pd_router.core.addresses import SettingsError
from pd_router.core.observe import Logging, Tracing

BASE = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:1", "--prefill", "http://a:1", "--decode", "http://b:1"]


def test_defaults() -> None:
    settings, logging = parse_settings(BASE)
    assert logging == Logging("info", "json")
    assert settings.tracing == Tracing("", 1.0)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/", "https://collector/otlp/v1/traces"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
    ],
)
def test_where_spans_go(endpoint: str, url: str) -> None:
    settings, _ = parse_settings([*BASE, "--otlp-endpoint", endpoint, "--trace-sampling-ratio", "0.25"])
    assert settings.tracing.url == url
    assert settings.tracing.sampling_ratio == 0.25


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "grpc://c:4317", "http://", "http://c:0", "http://c:65536", "http://c:x", "http://c/?k=1",
     "http://c/#x", "http://user:hunter2@c:4318", "http://c d", "http://ç:1"],
)  # fmt: skip
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"--otlp-endpoint: .* must be http://HOST:PORT or https://") as refused:
        parse_settings([*BASE, "--otlp-endpoint", endpoint])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("ratio", ["-0.1", "1.01", "nan", "inf"])
def test_a_ratio_that_is_none(ratio: str) -> None:
    with pytest.raises(SettingsError, match=r"--trace-sampling-ratio: must be finite and from 0 to 1, got"):
        parse_settings([*BASE, f"--trace-sampling-ratio={ratio}"])


def test_a_format_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*BASE, "--log-format", "xml"])
    assert "--log-format" in capsys.readouterr().err


def test_a_router_without_traces_loads_nothing_for_them() -> None:
    # The client of the shared store may load the API by itself.
    look = "import sys, pd_router.shell.server as s; print('opentelemetry.exporter' in sys.modules, s.__name__)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False pd_router.shell.server"


@pytest.mark.parametrize("missing", ["opentelemetry.exporter.otlp", "opentelemetry.sdk", "opentelemetry"])
def test_without_the_extra(missing: str) -> None:
    start = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"from pd_router.__main__ import main; sys.exit(main({[*BASE, '--otlp-endpoint', 'http://c:4318']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pd-router: --otlp-endpoint: needs the extra `tracing`")
    assert "pip install 'pd-operator[tracing]'" in done.stderr
    assert done.stderr.count("\n") == 1
