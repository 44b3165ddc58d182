"""The router's client of the Kubernetes API in a pod: the service account, its CA, and a token that changes."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pd_router.shell.pod_api import CLOSING_SECONDS, ApiFailed, PodApi, Trouble
from support.fake_api_server import FakeApiServer
from support.pods import make_pod
from support.waiting import until

SELECTOR = "pdserving.dev/pddeployment=tiny"


def make_identity(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, and its key, in the folder."""
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=fake-api-server"
    more = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(["openssl", *words.split(), *more.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_identity(tmp_path_factory.mktemp("identity"))


@pytest.fixture(scope="module")
def other_identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_identity(tmp_path_factory.mktemp("other"))


@pytest_asyncio.fixture(loop_scope="session")
async def server(identity: Path) -> AsyncIterator[FakeApiServer]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    server = FakeApiServer(token="first", tls=tls)
    await server.start()
    server.put(make_pod("d-0"))
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def api(
    server: FakeApiServer, identity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PodApi]:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    (tmp_path / "ca.crt").write_bytes((identity / "cert.pem").read_bytes())
    (tmp_path / "token").write_text("first")
    api = PodApi("default", SELECTOR, "", tmp_path)
    yield api
    await api.close()


async def names(api: PodApi) -> list[str]:
    return [pod["metadata"]["name"] async for page in api.pages() for pod in page.pods]


async def test_a_service_account(api: PodApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    await api.connect()
    assert await names(api) == ["d-0"]


async def test_a_token_that_was_replaced(api: PodApi, server: FakeApiServer, tmp_path: Path) -> None:
    await api.connect()
    assert await names(api) == ["d-0"]
    server.token = "second"
    (tmp_path / "token").write_text("second")
    with pytest.raises(ApiFailed) as refused:
        await names(api)
    assert refused.value.trouble is Trouble.REFUSED
    await api.connect()
    assert await names(api) == ["d-0"]


async def test_an_authority_that_is_not_the_servers(api: PodApi, other_identity: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes((other_identity / "cert.pem").read_bytes())
    await api.connect()
    with pytest.raises(ApiFailed) as failed:
        await names(api)
    assert failed.value.trouble is Trouble.LOST
    assert "certificate" in str(failed.value).lower()


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
async def test_an_incomplete_service_account(api: PodApi, tmp_path: Path, missing: str) -> None:
    (tmp_path / missing).unlink()
    with pytest.raises(ApiFailed) as failed:
        await api.connect()
    assert failed.value.trouble is Trouble.CREDENTIALS


async def test_events_that_come_in_pieces(api: PodApi, server: FakeApiServer) -> None:
    await api.connect()
    server.bookmark_seconds = 30.0
    line = json.dumps({"type": "ADDED", "object": make_pod("d-9")}).encode() + b"\n"
    events = api.watch(str(server.version), 60, 30)
    first = asyncio.create_task(anext(events))

    async def watched() -> bool:
        return server.watching == 1

    await until(watched)
    for piece in (line[:100], line[100:-1], line[-1:] + line + b"\n" + line[:7]):
        server.garble(piece)
    assert (await first).pod["metadata"]["name"] == "d-9"
    assert (await anext(events)).kind == "ADDED"
    server.end()
    with pytest.raises(ApiFailed) as failed:
        await anext(events)
    assert failed.value.trouble is Trouble.LOST


async def test_whoever_cuts_a_close_short_waits_for_the_rest(api: PodApi) -> None:
    await api.connect()
    assert await names(api) == ["d-0"]
    loop = asyncio.get_running_loop()
    began = loop.time()
    first = asyncio.create_task(api.close())
    await asyncio.sleep(CLOSING_SECONDS / 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await api.close()
    assert loop.time() - began >= CLOSING_SECONDS
