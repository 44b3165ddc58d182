"""TLS at both sides of the router: who is let in, what is verified, and certificates that are renewed while it runs."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import trustme

from support.chat import TEXT
from support.fake_engine import Behaviour, ConnectorConfig, EngineConfig, Fabric, FakeEngine, Gate
from support.legs import events_of
from support.router_process import RouterFailed, RouterProcess
from support.tls_front import TlsFront
from support.waiting import until

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
NAME = "engines.example"


class Bench:
    """Two engines behind TLS, files of certificates, and routers that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.other_ca = trustme.CA(), trustme.CA()
        self.ca.cert_pem.write_to_path(f"{folder}/ca.pem")
        self.other_ca.cert_pem.write_to_path(f"{folder}/other-ca.pem")
        self.fabric = Fabric()
        self.engines = [self._engine("prefill"), self._engine("decode")]
        self.fronts: list[TlsFront] = []
        self.urls: list[str] = []
        self.routers: list[RouterProcess] = []
        self.certify(self.ca)

    def _engine(self, role: Any) -> FakeEngine:
        return FakeEngine(EngineConfig(ConnectorConfig(role, mode="verified"), max_model_len=1 << 20), self.fabric)

    def certify(self, ca: trustme.CA) -> None:
        """Give the router a certificate of this authority."""
        cert = ca.issue_cert("127.0.0.1", "router.example")
        for name, blobs in (("tls.key", [cert.private_key_pem]), ("tls.crt", cert.cert_chain_pems)):
            (self.folder / f"{name}.new").write_bytes(b"".join(blob.bytes() for blob in blobs))
        for name in ("tls.key", "tls.crt"):
            (self.folder / f"{name}.new").rename(self.folder / name)

    async def start(self) -> None:
        for engine in self.engines:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.ca.issue_cert("127.0.0.1", NAME).configure_cert(context)
            await engine.start()
            self.fronts.append(TlsFront(engine.url, context))
            self.urls.append(await self.fronts[-1].start())

    async def router(
        self, *more: str, tls: bool = True, engines_tls: bool = False, ready: bool = True
    ) -> RouterProcess:
        urls = self.urls if engines_tls else [engine.url for engine in self.engines]
        repeated = list(more)
        if tls:
            repeated += ["--tls-cert", f"{self.folder}/tls.crt", "--tls-key", f"{self.folder}/tls.key"]
        for engine in self.engines:
            repeated += ["--allow-handle-host", engine.connector.host]
        made = RouterProcess(urls[:1], urls[1:], repeated=repeated)
        self.routers.append(made)
        await made.start(ready=ready)
        return made

    async def stop(self) -> None:
        for router in self.routers:
            await router.stop()
            log = router.log
            router.discard()
            assert "Traceback" not in log, log
        for front in self.fronts:
            await front.stop()
        for engine in self.engines:
            await engine.kill()
        assert self.fabric.take_violations() == []


@pytest_asyncio.fixture(loop_scope="session")
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.start()
    yield made
    await made.stop()


def trusting(ca: trustme.CA, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if client is not None:
        client.configure_cert(context)
    return context


async def ask(router: RouterProcess, context: ssl.SSLContext | bool, body: dict[str, Any] = BODY) -> bytes:
    url = f"https://127.0.0.1:{router.port}/v1/chat/completions"
    connector = aiohttp.TCPConnector(ssl=context)
    headers = {"Authorization": "Bearer sk-tenant"}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.post(url, json=body) as response,
    ):
        raw = await response.read()
        assert response.status == 200, raw
        return raw


async def talk(router: RouterProcess, context: ssl.SSLContext, bench: Bench) -> None:
    """Three turns, streamed; the second and third reuse."""
    messages: list[dict[str, Any]] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"{number} {TEXT}"})
        raw = await ask(router, context, {"model": "tiny", "messages": messages, "stream": True})
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events_of(raw)[:-1]]
        messages.append({"role": "assistant", "content": "".join(deltas)})
        attached = [record.handle_id for record in bench.engines[0].generates if record.handle_id is not None]
        assert len(attached) == number


async def shaken(router: RouterProcess, context: ssl.SSLContext) -> ssl.SSLObject:
    """Handshake, and nothing more."""
    _, writer = await asyncio.open_connection("127.0.0.1", router.port, ssl=context, server_hostname="router.example")
    found: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return found


async def test_tls_on_both_sides_with_reuse(bench: Bench) -> None:
    router = await bench.router("--engine-ca", f"{bench.folder}/ca.pem", engines_tls=True)
    await talk(router, trusting(bench.ca), bench)
    assert all(front.connections for front in bench.fronts)


async def test_who_is_let_in(bench: Bench) -> None:
    router = await bench.router()
    context = trusting(bench.ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    seen = await shaken(router, context)
    assert seen.selected_alpn_protocol() == "http/1.1"
    assert seen.version() == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (await shaken(router, context)).version() == "TLSv1.2"
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await shaken(router, old)
    with pytest.raises(ssl.SSLError):
        await shaken(router, trusting(bench.other_ca))
    # A client that speaks no TLS costs its connection only.
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"HTTP/1.1 200" not in await reader.read()
    writer.close()
    await ask(router, trusting(bench.ca))


async def test_a_renewed_certificate_is_shown_and_open_connections_go_on(bench: Bench) -> None:
    router = await bench.router()
    connector = aiohttp.TCPConnector(ssl=trusting(bench.ca), limit=1)
    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": "Bearer sk"}) as session:
        url = f"https://127.0.0.1:{router.port}/v1/chat/completions"
        async with session.post(url, json=BODY) as response:
            assert response.status == 200
        bench.certify(bench.other_ca)

        async def renewed() -> bool:
            try:
                await shaken(router, trusting(bench.other_ca))
            except ssl.SSLError:
                return False
            return True

        await until(renewed)
        with pytest.raises(ssl.SSLError):
            await shaken(router, trusting(bench.ca))
        async with session.post(url, json=BODY) as response:
            assert response.status == 200
    good = (bench.folder / "tls.key").read_bytes()
    (bench.folder / "tls.key").write_text("nothing that a key looks like")
    await until(lambda: _logs(router, "--tls-cert, --tls-key"))
    assert await renewed()
    (bench.folder / "tls.key").write_bytes(good)
    bench.certify(bench.ca)
    await until(lambda: _shakes(router, trusting(bench.ca)))


async def _logs(router: RouterProcess, words: str) -> bool:
    return any(words in line and "stays in use" in line for line in router.log.splitlines())


async def _shakes(router: RouterProcess, context: ssl.SSLContext) -> bool:
    try:
        await shaken(router, context)
    except (ssl.SSLError, ConnectionError):
        return False
    return True


def resume(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
    """Ask for the health, with the session of an earlier connection; whether there is an answer, and the session."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain,
            context.wrap_socket(plain, server_hostname="router.example", session=session) as secure,
        ):
            secure.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return secure.recv(4096).startswith(b"HTTP/1.1 200"), secure.session
    except (ssl.SSLError, ConnectionError):
        return False, None


async def test_clients_by_certificate_and_another_authority_while_it_runs(bench: Bench) -> None:
    path = bench.folder / "clients.pem"
    path.write_bytes(bench.ca.cert_pem.bytes())
    router = await bench.router("--tls-client-ca", str(path))
    ours = trusting(bench.ca, bench.ca.issue_cert("client.example"))
    theirs = trusting(bench.ca, bench.other_ca.issue_cert("client.example"))

    async def served(context: ssl.SSLContext) -> bool:
        try:
            await ask(router, context)
        except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
            return False
        return True

    assert await served(ours)
    answered, session = await asyncio.to_thread(resume, router.port, ours, None)
    assert answered
    assert not await served(theirs)
    assert not await served(trusting(bench.ca))
    (bench.folder / "new.pem").write_bytes(bench.other_ca.cert_pem.bytes())
    (bench.folder / "new.pem").rename(path)
    await until(lambda: served(theirs))
    assert not await served(ours), "an authority that was taken away still counts"
    answered, _ = await asyncio.to_thread(resume, router.port, ours, session)
    assert not answered, "an earlier session carries an authority over"


@pytest.mark.parametrize(
    ("flags", "ready"),
    [
        (("--engine-ca", "other-ca.pem"), False),
        ((), False),
        (("--engine-ca", "ca.pem", "--engine-server-name", "another.example"), False),
        (("--engine-ca", "ca.pem", "--engine-server-name", NAME), True),
    ],
    ids=["another authority", "the system's authorities", "another name", "a common name"],
)
async def test_engines_are_verified(bench: Bench, flags: tuple[str, ...], ready: bool) -> None:
    words = [f"{bench.folder}/{word}" if word.endswith(".pem") else word for word in flags]
    router = await bench.router(*words, tls=False, engines_tls=True, ready=False)
    if ready:
        await router.wait_ready()
    else:
        # Both engines were tried more than once.
        await until(lambda: _tried(bench))
        told = [line for line in router.log.splitlines() if "--engine-server-name" in line]
        assert len(told) == len(bench.engines), router.log
        assert all("certificate" in line or "mismatch" in line for line in told)
        async with aiohttp.ClientSession() as session:
            async with session.get(router.admin_url + "/readyz") as response:
                assert response.status == 503
            async with session.post(router.url + "/v1/chat/completions", json=BODY) as response:
                assert response.status == 503
                assert "certificate" not in await response.text()
    assert [engine for engine in bench.engines if engine.generates] == []


async def _tried(bench: Bench) -> bool:
    return all(front.attempts > 2 for front in bench.fronts)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-cert", "{0}/tls.crt"], "--tls-cert, --tls-key: must be given together"),
        (["--tls-cert", "{0}/tls.crt", "--tls-key", "{0}/gone"], "No such file"),
        (["--tls-cert", "{0}/ca.pem", "--tls-key", "{0}/tls.key"], "--tls-cert, --tls-key"),
        (["--engine-ca", "{0}/ca.pem"], "--engine-ca"),
    ],
)
async def test_files_of_no_use_are_told_at_the_start(bench: Bench, flags: list[str], words: str) -> None:
    with pytest.raises(RouterFailed) as caught:
        await bench.router(*[flag.format(bench.folder) for flag in flags], tls=False)
    assert "status 2" in str(caught.value)
    assert words in str(caught.value)


async def test_a_crowd_that_says_nothing_leaves_room_for_the_rest(bench: Bench) -> None:
    """It never comes to a handshake, and takes descriptors all the same."""
    router = await bench.router()
    resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (256, 256))
    crowd = []
    try:
        for _ in range(300):
            crowd.append(await asyncio.open_connection("127.0.0.1", router.port))

        async def refused() -> bool:
            return "client connections are refused" in router.log

        await until(refused)
        await router.wait_ready()
    finally:
        for _, writer in crowd:
            writer.transport.abort()
    await until(lambda: _shakes(router, trusting(bench.ca)))
    await ask(router, trusting(bench.ca))


async def test_a_client_that_says_nothing_is_not_waited_for(bench: Bench) -> None:
    router = await bench.router()
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_sigterm_lets_a_stream_over_tls_finish(bench: Bench) -> None:
    router = await bench.router()
    gate = Gate(2)
    bench.engines[1].next(Behaviour(gate=gate))
    running = asyncio.create_task(ask(router, trusting(bench.ca), {**BODY, "stream": True}))
    await gate.reached.wait()
    router.terminate()

    async def refused() -> bool:
        return not await _shakes(router, trusting(bench.ca))

    await until(refused)
    gate.open()
    assert events_of(await running)[-1] == "[DONE]"
    assert await router.wait() == 0


def push(port: int, context: ssl.SSLContext, body: bytes) -> bytes:
    """Send all of a body that is not wanted, and read the answer only then."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20.0) as plain,
        context.wrap_socket(plain, server_hostname="router.example") as secure,
    ):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        secure.sendall(head.encode())
        for start in range(0, len(body), 65536):
            secure.sendall(body[start : start + 65536])
        return secure.recv(65536)


async def test_who_sends_too_much_is_told_so(bench: Bench) -> None:
    """The connection must not be reset while the client still sends, or the answer is lost."""
    router = await bench.router("--max-body-bytes", "100000")
    for _ in range(5):
        answer = await asyncio.to_thread(push, router.port, trusting(bench.ca), b"x" * 3_000_000)
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_port_that_is_taken(bench: Bench) -> None:
    router = await bench.router()
    with pytest.raises(RouterFailed, match="cannot listen"):
        await bench.router(f"--listen=127.0.0.1:{router.port}")
