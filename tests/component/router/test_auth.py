"""Clients prove who they are, by key or through a gateway; engines see the router's key and never a client's."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.chat import TEXT, Talk, send
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Fault, Kind
from support.rawhttp import RawConnection, post
from support.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
KEYS = {"team-a": "sk-canary-key-of-a", "team-b": "sk-canary-key-of-b"}
ENGINE_KEY = "engine-canary-key"
SECRET = "gateway-canary-secret"


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("".join(line(name, key) for name, key in KEYS.items()))
    (folder / "engine").write_text(ENGINE_KEY + "\n")
    (folder / "gateway").write_text(SECRET + "\n")
    return folder


@pytest.fixture
def by_key(files: Path) -> Spec:
    return Spec(flags=(("--api-keys-file", f"{files}/keys"), ("--engine-api-key-file", f"{files}/engine")))


@pytest.fixture
def by_gateway(files: Path) -> Spec:
    return Spec(flags=(("--tenant-from", "header"), ("--gateway-secret-file", f"{files}/gateway")))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def assert_nothing_told(deployment: Deployment, *more: str) -> None:
    """No key in the log, the metrics or the decisions."""
    pages = [deployment.router.log]
    async with aiohttp.ClientSession() as session:
        for path in ("/metrics", "/debug/explain", "/debug/fleet", "/status"):
            async with session.get(deployment.router.admin_url + path) as response:
                pages.append(await response.text())
    for key in (*KEYS.values(), ENGINE_KEY, SECRET, *more):
        for page in pages:
            assert key not in page
            assert hashlib.sha256(key.encode()).hexdigest() not in page


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-canary-wrong"),
        bearer(hashlib.sha256(KEYS["team-a"].encode()).hexdigest()),
        {"Authorization": f"Basic {KEYS['team-a']}"},
        {"x-api-key": "sk-canary-wrong"},
        {"X-PD-Tenant": "team-a"},
        {"Authorization": ""},
    ],
    ids=["none", "wrong", "its hash", "basic", "wrong x-api-key", "tenant header", "empty"],
)
async def test_without_a_known_key_nothing_is_served(deploy: Any, by_key: Spec, headers: dict[str, str]) -> None:
    deployment = await deploy(by_key)
    turn = await send(deployment, BODY, headers)
    assert turn.status == 401
    assert turn.headers["WWW-Authenticate"].startswith("Bearer")
    assert turn.headers["X-Request-Id"]
    error = turn.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert b"canary" not in turn.raw
    for path in ("/v1/models", "/tokenize", "/no/such/path", "/v1/completions"):
        assert (await send(deployment, BODY, headers, path=path)).status == 401, path
    assert deployment.records() == []
    await assert_nothing_told(deployment, "sk-canary-wrong")


async def test_a_key_is_a_tenant_whichever_header_brings_it(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    talk = Talk(deployment, tenant=None, headers=bearer(KEYS["team-a"]))
    await talk.say()
    talk.headers = {"x-api-key": KEYS["team-a"]}
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    talk.headers = bearer(KEYS["team-b"])
    turn = await talk.say("And on.")
    assert turn.attached == []
    await assert_nothing_told(deployment)


async def test_engines_see_the_routers_key_only(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    for headers in (bearer(KEYS["team-a"]), {"x-api-key": KEYS["team-b"]}):
        assert (await send(deployment, BODY, headers)).status == 200
        assert (await send(deployment, {**BODY, "n": 2}, headers)).status == 200
        assert (await send(deployment, {"model": "tiny", "prompt": "x"}, headers, path="/tokenize")).status == 200
    records = deployment.records()
    assert len(records) == 6
    for record in records:
        assert record.header("authorization") == f"Bearer {ENGINE_KEY}"
        assert record.header("x-api-key") is None
        assert not any("canary-key-of" in value for _, value in record.headers)


async def test_health_is_open(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.answer()).status == 200


async def test_the_connection_of_a_client_with_a_wrong_key_is_kept(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(post(CHAT, BODY, "Authorization: Bearer wrong"))
        assert (await raw.answer()).status == 401
        await raw.send(post(CHAT, BODY, f"Authorization: Bearer {KEYS['team-a']}"))
        assert (await raw.answer()).status == 200


@pytest.mark.parametrize("how", ["length", "chunks", "expect"])
async def test_a_large_body_is_not_read_from_strangers(deploy: Any, by_key: Spec, how: str) -> None:
    deployment = await deploy(by_key)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n"
    rest = {
        "length": b"Content-Length: 10000000\r\n\r\n",
        "chunks": b"Transfer-Encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 3,
        "expect": b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n",
    }[how]
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(head.encode() + rest)
        assert (await raw.answer()).status == 401
        assert await raw.at_end()


async def test_two_credentials_in_one_request_are_none(deploy: Any, by_key: Spec, by_gateway: Spec) -> None:
    """A proxy in front may have judged the other one."""
    for spec, name in ((by_key, "Authorization"), (by_key, "x-api-key"), (by_gateway, "X-PD-Tenant")):
        deployment = await deploy(spec)
        async with RawConnection(deployment.router.port) as raw:
            await raw.send(post(CHAT, BODY, f"{name}: one", f"{name.lower()}: two"))
            assert (await raw.answer()).status == 400
        assert deployment.records() == []


async def test_an_engine_that_refuses_the_routers_key_is_not_the_clients_fault(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=401)))
    turn = await send(deployment, BODY, bearer(KEYS["team-a"]))
    assert turn.status == 502
    assert "WWW-Authenticate" not in turn.headers
    assert "--engine-api-key-file" in deployment.router.log


async def test_keys_change_while_it_runs_and_a_broken_file_changes_nothing(deploy: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line("team-a", "sk-canary-first"))
    deployment = await deploy(Spec(flags=(("--api-keys-file", str(path)),)), fresh=True)

    async def status(key: str) -> int:
        url = deployment.router.url + "/v1/models"
        async with aiohttp.ClientSession(headers=bearer(key)) as session, session.get(url) as response:
            return response.status

    async def stale() -> float:
        return (await deployment.metrics())["pd_router_stale_files"]

    async def works(key: str, expected: int = 200) -> bool:
        return await status(key) == expected

    assert await works("sk-canary-first")
    # As the kubelet does it: a new folder, and a symlink that is swapped.
    (tmp_path / "new").write_text(line("team-a", "sk-canary-first") + line("team-b", "sk-canary-second"))
    (tmp_path / "new").rename(path)
    await until(lambda: works("sk-canary-second"))
    for broken in ("team-a:sk-canary-raw\n", "", "\xff"):
        path.write_bytes(broken.encode("latin-1"))
        await until(lambda: _is(stale, 1.0))
        assert await works("sk-canary-first")
        assert "what was read before stays in use" in deployment.router.log
        path.write_text(line("team-a", "sk-canary-first"))
        await until(lambda: _is(stale, 0.0))
    assert await works("sk-canary-second", 401)
    path.unlink()
    await until(lambda: _is(stale, 1.0))
    assert await works("sk-canary-first")
    await assert_nothing_told(deployment, "sk-canary-raw", "sk-canary-first", "sk-canary-second")


async def _is(ask: Any, expected: float) -> bool:
    return bool(await ask() == expected)


async def test_only_the_gateway_names_tenants(deploy: Any, by_gateway: Spec) -> None:
    deployment = await deploy(by_gateway)
    trusted = {"X-PD-Tenant": "acme", "X-PD-Gateway-Secret": SECRET, "Authorization": "Bearer sk-canary-client"}
    talk = Talk(deployment, tenant=None, headers=trusted)
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == 1
    for wrong in ({"X-PD-Tenant": "acme"}, {"X-PD-Tenant": "acme", "X-PD-Gateway-Secret": SECRET + "x"}):
        turn = await send(deployment, BODY, wrong)
        assert turn.status == 403
        assert turn.json["error"]["code"] == "untrusted_gateway"
    # Nobody is named: served, without reuse.
    assert (await send(deployment, BODY)).status == 200
    for record in deployment.records():
        for name in ("authorization", "x-pd-tenant", "x-pd-gateway-secret"):
            assert record.header(name) is None, name
    await assert_nothing_told(deployment, "sk-canary-client")


@pytest.mark.parametrize(("cidr", "reused"), [("127.0.0.0/8", 1), ("10.0.0.0/8", 0)])
async def test_a_gateway_by_its_address(deploy: Any, cidr: str, reused: int) -> None:
    flags = (("--tenant-from", "header"), ("--gateway-cidr", cidr), ("--untrusted-tenant", "ignore"))
    deployment = await deploy(Spec(flags=flags))
    talk = Talk(deployment, tenant=None, headers={"X-PD-Tenant": "acme"})
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == reused


async def test_refusals_are_counted_by_reason(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    before = await deployment.metrics()
    await send(deployment, BODY)
    await send(deployment, BODY, bearer("wrong"))
    await send(deployment, BODY, bearer("wrong"))
    after = await deployment.metrics()

    def gained(reason: str) -> float:
        name = f'pd_router_unauthorized_total{{reason="{reason}"}}'
        return after[name] - before[name]

    assert gained("missing_api_key") == 1
    assert gained("invalid_api_key") == 2


async def test_denied_requests_get_an_error_of_their_api(deploy: Any, by_key: Spec) -> None:
    deployment = await deploy(by_key)
    async with RawConnection(deployment.router.port) as raw:
        for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/metrics"):
            await raw.send(post(path, BODY))
            answer = await raw.answer()
            assert answer.status == 401
            error = answer.json["error"]
            if path == "/v1/messages":
                assert (answer.json["type"], error["type"]) == ("error", "authentication_error")
            else:
                assert error["code"] == "missing_api_key"


async def test_every_worker_asks_for_keys_and_sees_them_change(deploy: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line("team-a", "sk-canary-first"))
    deployment = await deploy(Spec(flags=(("--api-keys-file", str(path)), ("--workers", "2"))), fresh=True)

    async def statuses(key: str) -> set[int]:
        # Each request has a connection of its own, which the kernel gives to either worker.
        found = await asyncio.gather(*(send(deployment, BODY, bearer(key)) for _ in range(12)))
        return {turn.status for turn in found}

    assert await statuses("sk-canary-first") == {200}
    assert await statuses("sk-canary-second") == {401}
    (tmp_path / "new").write_text(line("team-b", "sk-canary-second"))
    (tmp_path / "new").rename(path)

    async def changed() -> bool:
        return await statuses("sk-canary-second") == {200} and await statuses("sk-canary-first") == {401}

    await until(changed)
    await assert_nothing_told(deployment, "sk-canary-first", "sk-canary-second")
