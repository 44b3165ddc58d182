"""Numbers and ports on the command line: what cannot work is refused by name, with what is allowed."""

from __future__ import annotations

import argparse

import pytest

from pd_router.__main__ import build_parser, main, parse_settings
from pd_router.core.access import Access, Tls
from pd_router.core.addresses import Endpoint, SettingsError, parse_endpoint, parse_engine_url
from pd_router.core.tenant_limits import TenantLimits

BASE = ["--listen", "127.0.0.1:8000", "--admin", "127.0.0.1:9000", "--prefill", "http://a:1", "--decode", "http://b:1"]
PODS = ["--listen", "127.0.0.1:8000", "--admin", "127.0.0.1:9000", "--discover-kubernetes", "prod/qwen"]


def flags_of(kind: type) -> list[str]:
    actions: list[argparse.Action] = build_parser()._actions
    return [action.option_strings[0] for action in actions if action.type is kind]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-0.001"])
@pytest.mark.parametrize("flag", flags_of(float))
def test_a_float_that_is_no_time_is_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings([*(PODS if "discovery" in flag else BASE), f"{flag}={value}"])
    assert f"{flag}: must be" in str(refused.value)
    assert "finite" in str(refused.value)


def test_there_are_float_flags_to_test() -> None:
    assert {"--handle-ttl", "--engine-ttl", "--queue-timeout", "--drain-timeout"} <= set(flags_of(float))


@pytest.mark.parametrize("flag", flags_of(int))
def test_a_negative_count_is_refused_by_name(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}: must be"):
        parse_settings([*BASE, f"{flag}=-1"])


@pytest.mark.parametrize("flag", ["--queue-timeout", "--drain-timeout"])
def test_no_waiting_at_all_can_be_asked_for(flag: str) -> None:
    parse_settings([*BASE, flag, "0"])


@pytest.mark.parametrize(
    ("handle", "engine", "works"),
    [
        ("450", "480", True),
        ("470", "480", True),
        ("470.1", "480", False),
        ("480", "480", False),
        ("500", "480", False),
        ("450", "nan", False),
        ("nan", "480", False),
        ("nan", "nan", False),
        ("450", "inf", False),
        ("inf", "inf", False),
    ],
)
def test_the_routers_ttl_ends_well_before_the_engines(handle: str, engine: str, works: bool) -> None:
    arguments = [*BASE, "--handle-ttl", handle, "--engine-ttl", engine]
    if works:
        assert parse_settings(arguments)[0].reuse.handle_ttl == float(handle)
        return
    with pytest.raises(SettingsError, match="-ttl: "):
        parse_settings(arguments)


@pytest.mark.parametrize(
    "value",
    [
        "²:5",
        "h:²",
        "h:٣",
        "h:",
        "h",
        "",
        "h:-1",
        "h:+1",
        "h:1_0",
        "h: 1",
        "h:65536",
        "h:" + "9" * 5000,
        "a b:5",
        "..:5",
        "a..b:5",
        "a" * 64 + ":5",
        "::1:5",
        "[h]:5",
        "[::1:5",
    ],
)
def test_an_endpoint_that_is_none(value: str) -> None:
    with pytest.raises(SettingsError, match=r"--listen: .* port from 0 to 65535"):
        parse_endpoint(value, "--listen")


@pytest.mark.parametrize(
    ("value", "endpoint"),
    [
        ("h:0", Endpoint("h", 0)),
        ("h:65535", Endpoint("h", 65535)),
        (":80", Endpoint("0.0.0.0", 80)),
        ("[::1]:80", Endpoint("::1", 80)),
        ("10.0.0.1:80", Endpoint("10.0.0.1", 80)),
        ("my-host.example:80", Endpoint("my-host.example", 80)),
    ],
)
def test_an_endpoint(value: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(value, "--listen") == endpoint


@pytest.mark.parametrize(
    "value",
    [
        *("http://h:0", "http://h:65536", "http://h:²", "http://h:-1", "http://h:x", "ftp://h:1", "h:1", "https://:1"),
        *("http://h:1/v1", "http://h:1?a=b", "http://user:secret@h:1", "https://user@h:1"),
        *("http://h:1#x", "http://h:1#", "http://h:1?", "http://a b:1", "http://a..b:1", "http://h\n:1", "http://ü:1"),
        *(f"http://{300 * 'a'}:1", f"http://{60 * 'abcd.'}:1", "http://[::g]:1", "http://.h:1", "http://[1.2.3.4]:1"),
    ],
)
def test_an_engine_url_that_is_none(value: str) -> None:
    with pytest.raises(SettingsError, match="--prefill: ") as refused:
        parse_engine_url(value, "--prefill")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "endpoint"),
    [
        ("http://h", Endpoint("h", 80)),
        ("http://h:1/", Endpoint("h", 1)),
        ("https://h", Endpoint("h", 443, True)),
        ("https://[::1]:8443", Endpoint("::1", 8443, True)),
    ],
)
def test_an_engine_url(value: str, endpoint: Endpoint) -> None:
    assert parse_engine_url(value, "--prefill") == endpoint


@pytest.mark.parametrize("host", ["a..b", "a b", 64 * "a", 60 * "abcd.", "[:::::]", "::1", "[::1", "[h]"])
def test_an_endpoint_with_a_host_that_is_none(host: str) -> None:
    with pytest.raises(SettingsError, match="--listen: "):
        parse_endpoint(f"{host}:80", "--listen")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--model", name) for name in ("", " ", " a", "a ", "a\nb", "a\x00b", 257 * "a")),
        *(("--allow-handle-host", host) for host in ("", " ", "a b", "http://h", "h:5600", "[::1]", "a..b", 300 * "a")),
        *(("--generation", value) for value in ("a b", "a\nb", "a/b", 64 * "a")),
        *(("--otlp-endpoint", f"http://{host}:4318") for host in ("a..b", 300 * "a")),
        *((flag, "9") for flag in ("--discovery-relist", "--discovery-stall", "--discovery-retry-max")),
        ("--discovery-relist", "nan"),
    ],
)
def test_names_and_flags_of_no_use_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}: "):
        parse_settings([*BASE, flag, value])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--model", name) for name in ("org/Model-1.5B", "a b", "模型", 256 * "a")),
        *(("--allow-handle-host", host) for host in ("10.0.0.1", "fe80::1%eth0", "pod-0.svc.cluster.local", "h.")),
        ("--generation", "g-1.a_b"),
    ],
)
def test_names_that_may_be_given(flag: str, value: str) -> None:
    assert parse_settings([*BASE, flag, value])


@pytest.mark.parametrize("flag", ["--mode", "--prefil", "--tenant-r", "--admi"])
def test_no_flag_has_a_short_form(flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_settings([*BASE, flag, "1"])


def test_access_flags_reach_the_settings() -> None:
    words = "--api-keys-file k --engine-api-key-file e --tls-cert c --tls-key d --tls-client-ca a --tenant-rate 0.5"
    words += " --tenant-burst 2 --tenant-max-inflight 3 --tenant-queue-share 0.25 --tenant-retained-tokens 4"
    found = parse_settings([*BASE, *words.split(), "--tenants-tracked", "5"])[0]
    assert found.access == Access(api_keys_file="k", engine_api_key_file="e")
    assert found.tls == Tls("c", "d", "a")
    assert found.tenant_limits == TenantLimits(0.5, 2, 3, 0.25, 4, 5)
    gateway = (
        "--tenant-from header --gateway-secret-file s --gateway-cidr 10.0.0.0/8 fd00::/8 --untrusted-tenant ignore"
    )
    found = parse_settings([*BASE, *gateway.split()])[0]
    assert found.access == Access(
        gateway_secret_file="s", gateway_networks=("10.0.0.0/8", "fd00::/8"), refuse_untrusted=False
    )


def test_pods_that_speak_tls() -> None:
    found = parse_settings([*PODS, "--pods-scheme", "https", "--engine-ca", "c", "--engine-server-name", "n"])[0]
    assert found.pods is not None
    assert found.pods.tls
    assert found.tls == Tls(engine_ca="c", engine_name="n")
    with pytest.raises(SettingsError, match="--pods-scheme: is for --discover-kubernetes"):
        parse_settings([*BASE, "--pods-scheme", "https"])


@pytest.mark.parametrize(
    ("lease", "late", "handoff"), [("30", 5.0, 15.0), ("12", (8 - 1) / 3, 6.0), ("6", 1.0, 3.0), ("1", 1 / 3, 0.5)]
)
def test_a_silent_engine_is_noticed_within_the_lease(lease: str, late: float, handoff: float) -> None:
    timeouts = parse_settings([*BASE, "--lease", lease])[0].timeouts
    assert (timeouts.probe_late, timeouts.handoff) == (pytest.approx(late), handoff)


def test_bad_flags_end_with_one_line_each_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--listen", "h:²"]) == 2
    assert main([*BASE, "--engine-ttl", "nan", "--idle-timeout", "nan"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("pd-router: --") for line in lines)
