"""Who may come in: keys by their hashes, and gateways that prove themselves."""

from __future__ import annotations

import hashlib

import pytest

from pd_router.core.access import Access, Tls, access_problems, tls_problems
from pd_router.core.auth import (
    FileProblem,
    parse_engine_key,
    parse_keys,
    parse_networks,
    parse_secrets,
    tenant_by_gateway,
    tenant_by_key,
)
from pd_router.core.errors import ApiError


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


TABLE = f"""
# two keys of one team while one replaces the other
team-a:{hashed("sk-a-old")}
team-a:{hashed("sk-a-new").upper()}

team-b:{hashed("sk-b")}
"""


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"authorization": "Bearer sk-a-old"}, "name:team-a"),
        ({"authorization": "bearer   sk-a-new "}, "name:team-a"),
        ({"x-api-key": "sk-b"}, "name:team-b"),
        ({"authorization": "Bearer sk-b", "x-api-key": "sk-b"}, "name:team-b"),
    ],
)
def test_a_known_key_is_its_name(headers: dict[str, str], tenant: str) -> None:
    assert tenant_by_key(headers, parse_keys(TABLE)) == tenant


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": ""}, "missing_api_key"),
        ({"authorization": "Basic c2stYg=="}, "missing_api_key"),
        ({"authorization": "sk-b"}, "missing_api_key"),
        ({"authorization": "Bearer sk-b2"}, "invalid_api_key"),
        ({"authorization": "Bearer " + hashed("sk-b")}, "invalid_api_key"),
        ({"authorization": "Bearer SK-B"}, "invalid_api_key"),
        ({"x-api-key": "sk-\xfc"}, "invalid_api_key"),
        ({"authorization": "Bearer wrong", "x-api-key": "sk-b"}, "invalid_api_key"),
        ({"authorization": "Bearer sk-b", "x-api-key": "sk-a-old"}, "invalid_api_key"),
        ({"authorization": "Bearer sk-b", "x-api-key": "wrong"}, "invalid_api_key"),
        ({"x-pd-tenant": "team-b"}, "missing_api_key"),
    ],
)
def test_anything_else_is_refused_without_quoting_it(headers: dict[str, str], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        tenant_by_key(headers, parse_keys(TABLE))
    error = caught.value
    assert (error.status, error.code) == (401, code)
    assert (b"www-authenticate", b'Bearer realm="pd-router"') in error.headers()
    assert b"sk-" not in error.body()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("# only a comment\n", "no key"),
        ("team-a:sk-raw-key", "line 1"),
        (f"ok:{hashed('x')}\nteam-a sk-secret", "line 2"),
        (f":{hashed('x')}", "line 1"),
        (f"{'n' * 65}:{hashed('x')}", "line 1"),
        (f"a b:{hashed('x')}", "line 1"),
        (f"a:{hashed('x')}0", "line 1"),
        (f"a:{hashed('x')}\nb:{hashed('x')}", "line 2"),
    ],
)
def test_a_bad_keys_file_is_refused_without_quoting_it(text: str, words: str) -> None:
    with pytest.raises(FileProblem, match=words) as caught:
        parse_keys(text)
    assert "sk-" not in str(caught.value)


SECRETS = parse_secrets("first-long-shared-secret\nsecond-long-shared-secret\n")
LAN = parse_networks(["10.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "secret", "ask_secret", "networks", "trusted"),
    [
        ("10.1.2.3", None, False, LAN, True),
        ("::ffff:10.1.2.3", None, False, LAN, True),
        ("fd00::1%eth0", None, False, LAN, True),
        ("11.1.2.3", None, False, LAN, False),
        ("", None, False, LAN, False),
        ("11.1.2.3", "first-long-shared-secret", True, (), True),
        ("11.1.2.3", "second-long-shared-secret", True, (), True),
        ("11.1.2.3", "third-long-shared-secret", True, (), False),
        ("11.1.2.3", None, True, (), False),
        ("11.1.2.3", "first-long-shared-secret", True, LAN, False),
        ("10.1.2.3", "third-long-shared-secret", True, LAN, False),
        ("10.1.2.3", "first-long-shared-secret", True, LAN, True),
    ],
)
@pytest.mark.parametrize("refuse", [True, False])
def test_only_a_gateway_names_tenants(
    peer: str, secret: str | None, ask_secret: bool, networks: tuple[object, ...], trusted: bool, refuse: bool
) -> None:
    headers = {"x-pd-tenant": "acme"} | ({} if secret is None else {"x-pd-gateway-secret": secret})

    def ask() -> str | None:
        return tenant_by_gateway(
            headers,
            peer,
            secrets=SECRETS if ask_secret else None,
            networks=networks,  # type: ignore[arg-type]
            refuse=refuse,
            anonymous=True,
        )

    if trusted or not refuse:
        assert ask() == ("name:acme" if trusted else "anonymous")
    else:
        with pytest.raises(ApiError) as caught:
            ask()
        assert (caught.value.status, caught.value.code) == (403, "untrusted_gateway")


@pytest.mark.parametrize("text", ["", "\n", "short", "has a space in it now", "tab\tinside-the-secret", "ü" * 20])
def test_weak_secrets_are_refused(text: str) -> None:
    with pytest.raises(FileProblem, match="16 printable"):
        parse_secrets(text)


@pytest.mark.parametrize("text", ["", "two keys", "line\nline-two", "short", "a\r\nInjected: header"])
def test_what_is_no_engine_key(text: str) -> None:
    with pytest.raises(FileProblem, match="one key"):
        parse_engine_key(text)


@pytest.mark.parametrize("cidr", ["10.0.0.1/8", "10.0.0.0/33", "example", ""])
def test_what_is_no_network(cidr: str) -> None:
    with pytest.raises(FileProblem, match="must be a network"):
        parse_networks([cidr])


@pytest.mark.parametrize(
    ("access", "source", "anonymous", "flag"),
    [
        (Access(), "header", False, "--tenant-from"),
        (Access(gateway_networks=("10.0.0.0/8",)), "authorization", False, "--gateway-cidr"),
        (Access(api_keys_file="k", gateway_networks=("10.0.0.0/8",)), "header", False, "--api-keys-file"),
        (Access(api_keys_file="k"), "authorization", True, "--anonymous"),
        (Access(gateway_networks=("10.0.0.1/8",)), "header", False, "--gateway-cidr"),
    ],
)
def test_combinations_that_only_look_safe(access: Access, source: str, anonymous: bool, flag: str) -> None:
    [problem] = access_problems(access, source, anonymous)
    assert problem.startswith(flag) or flag in problem.split(":")[0]


@pytest.mark.parametrize(
    ("tls", "https", "flag"),
    [
        (Tls(certificate="c"), False, "--tls-key"),
        (Tls(client_ca="c"), False, "--tls-client-ca"),
        (Tls(engine_ca="c"), False, "--engine-ca"),
        (Tls(engine_name="c"), False, "--engine-server-name"),
    ],
)
def test_tls_flags_that_would_do_nothing(tls: Tls, https: bool, flag: str) -> None:
    [problem] = tls_problems(tls, https)
    assert flag in problem
