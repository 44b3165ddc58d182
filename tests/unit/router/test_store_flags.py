"""Flags of the handle store: what is refused says which flag and what instead, and repeats no password."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_router.__main__ import parse_settings
from pd_router.core.addresses import SettingsError
from pd_router.core.linking import MIN_SECRET_BYTES
from pd_router.core.settings import Settings
from pd_router.core.store_memory import MemoryStore
from pd_router.core.store_settings import Target, Valkey, parse_url
from pd_router.shell.metrics import Metrics
from pd_router.shell.store_metrics import SharedStoreMetrics
from pd_router.shell.stores import make_keyring, make_store
from pd_router.shell.valkey_store import ValkeyStore

BASE = ["--listen", "127.0.0.1:8000", "--admin", "127.0.0.1:9000", "--prefill", "http://a:1", "--decode", "http://b:1"]
VALKEY = ["--handle-store", "valkey", "--valkey-url", "valkey://cache:6379", "--handle-key-file", "/k"]


def parse(*flags: str) -> Settings:
    return parse_settings([*BASE, *flags])[0]


def test_handles_stay_in_memory_unless_told() -> None:
    assert parse().valkey is None


def test_everything_reaches_the_settings() -> None:
    found = parse(
        *VALKEY,
        *("--valkey-username", "pd", "--valkey-password-file", "/p", "--valkey-timeout", "0.1"),
        *("--valkey-max-entry-bytes", "5", "--valkey-connections", "3"),
    )
    assert found.valkey == Valkey("valkey://cache:6379", "/k", "pd", "/p", "", 0.1, 5, 3)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("valkey://cache", Target("cache", 6379, False, 0)),
        ("redis://cache.team.svc:1/15", Target("cache.team.svc", 1, False, 15)),
        ("valkeys://[fd00::1]:6380", Target("fd00::1", 6380, True, 0)),
        ("rediss://10.0.0.1:6380/", Target("10.0.0.1", 6380, True, 0)),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "cache:6379",
            "http://cache",
            "valkey://",
            "valkey://cache:0",
            "valkey://cache:x",
            "valkey://cache:70000",
        ),
        *("valkey://cache/a", "valkey://cache/12345", "valkey://cache?db=1", "valkey://cache#x", "valkey://a b"),
        *("valkey+sentinel://cache", "unix:///socket"),
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(SettingsError, match=r"--valkey-url: .*must be valkey://HOST:PORT"):
        parse(*VALKEY, "--valkey-url", url)


@pytest.mark.parametrize("url", ["valkey://u:canary@cache", "valkey://:canary@cache:1", "valkey://canary@cache"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError, match="--valkey-password-file") as refused:
        parse(*VALKEY, "--valkey-url", url)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--handle-store", "valkey", "--valkey-url", "valkey://c"], "--handle-key-file: is needed with"),
        (["--handle-store", "valkey", "--handle-key-file", "/k"], "--valkey-url: '' must be valkey://HOST:PORT"),
        (["--valkey-url", "valkey://c"], "--valkey-url: is for --handle-store valkey, which is not given"),
        (["--handle-key-file", "/k"], "--handle-key-file: is for --handle-store valkey"),
        (["--valkey-password-file", "/k"], "--valkey-password-file: is for --handle-store valkey"),
        ([*VALKEY, "--valkey-username", "pd"], "--valkey-username: needs --valkey-password-file"),
        ([*VALKEY, "--valkey-ca-file", "/c"], "--valkey-ca-file: is for valkeys://"),
        ([*VALKEY, "--valkey-timeout", "5.1"], "--valkey-timeout: must be above 0, finite and at most 5 s"),
        ([*VALKEY, "--valkey-timeout", "nan"], "--valkey-timeout: must be above 0"),
        ([*VALKEY, "--valkey-connections", "0"], "--valkey-connections: must be from 1 to 1024"),
        ([*VALKEY, "--valkey-max-entry-bytes", "0"], "--valkey-max-entry-bytes: must be above 0"),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(*flags)
    assert text in str(refused.value)


def test_problems_come_together() -> None:
    with pytest.raises(SettingsError) as refused:
        parse("--handle-store", "valkey", "--valkey-timeout", "9")
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "--valkey-url",
        "--handle-key-file",
        "--valkey-timeout",
    ]


def shared(folder: Path, secret: bytes, *more: str) -> Settings:
    (folder / "key").write_bytes(secret)
    return parse(*VALKEY, "--handle-key-file", str(folder / "key"), *more)


def test_routers_with_one_key_file_make_equal_keys(tmp_path: Path) -> None:
    made = [
        make_keyring(shared(tmp_path, secret)).key("t", b"s", "history", "x")
        for secret in (b"0" * 32, b"0" * 32 + b"\n", b"0" * 32 + b"\r\n", b"1" * 32)
    ]
    assert made[0] == made[1] == made[2]
    assert made[3] != made[0]


def test_a_router_alone_has_a_secret_that_nobody_knows() -> None:
    assert make_keyring(parse()).key("t", b"s", "history", "x") != make_keyring(parse()).key("t", b"s", "history", "x")


@pytest.mark.parametrize("secret", [b"", b"\n", b"canary", b"0" * (MIN_SECRET_BYTES - 1)])
def test_a_short_key_is_refused_and_not_repeated(tmp_path: Path, secret: bytes) -> None:
    with pytest.raises(SettingsError, match=r"--handle-key-file: .* at least 16 bytes") as refused:
        make_keyring(shared(tmp_path, secret))
    assert "canary" not in str(refused.value)


async def test_files_that_are_not_there_are_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--handle-key-file: cannot be read: No such file"):
        make_keyring(parse(*VALKEY))
    missing = str(tmp_path / "missing")
    for flag in ("--valkey-password-file", "--valkey-ca-file"):
        settings = shared(tmp_path, b"0" * 32, "--valkey-url", "valkeys://cache", flag, missing)
        with pytest.raises(SettingsError, match=f"{flag}: cannot be read: No such file"):
            make_store(settings, SharedStoreMetrics(Metrics()), lambda *_: "")


async def test_which_store_is_made(tmp_path: Path) -> None:
    metrics = Metrics()
    store = make_store(parse(), SharedStoreMetrics(metrics), lambda *_: "")
    assert isinstance(store, MemoryStore)
    assert metrics.registry.get_sample_value("pd_router_handle_store_up") == 1
    metrics = Metrics()
    store = make_store(shared(tmp_path, b"0" * 32), SharedStoreMetrics(metrics), lambda *_: "")
    assert isinstance(store, ValkeyStore)
    assert metrics.registry.get_sample_value("pd_router_handle_store_up") == 0
