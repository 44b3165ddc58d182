"""`pdctl top --name`: routers and engines in pods, through an API server that forwards ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from pdctl.shell.top_cluster import open_cluster
from pdctl.shell.top_source import SourceError
from support.chat import Talk
from support.deployment import Deployment
from support.pod_deployment import PodDeployment
from support.port_forwarding import ForwardingServer
from support.ports import free_ports
from support.top_process import run


def place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[ForwardingServer]:
    made = ForwardingServer()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def talked(deploy: Any) -> Deployment:
    deployment: Deployment = await deploy()
    talk = Talk(deployment)
    await talk.say()
    await talk.say("Go on.")
    return deployment


def flags(server: ForwardingServer, folder: Path) -> tuple[str, ...]:
    return ("--json", "--name", "qwen", "-n", "llm", "--kubeconfig", str(server.kubeconfig(folder / "config")))


async def test_routers_and_engines_in_pods(talked: Deployment, server: ForwardingServer, tmp_path: Path) -> None:
    server.add("qwen-router-0", "router", ("admin", 9000), place(talked.router.admin_url))
    server.add("qwen-router-1", "router", ("admin", 9000), place(talked.router.admin_url))
    server.add("qwen-router-2", "router", ("admin", 9000), ("127.0.0.1", 9), phase="Pending")
    code, out, error = await run(*flags(server, tmp_path))
    assert (code, error) == (0, "")
    found = json.loads(out)
    metrics = await talked.metrics()
    assert found["routers"] == 2
    answered = sum(count for name, count in metrics.items() if name.startswith("pd_router_requests_total"))
    assert found["answers"] == 2 * answered > 0
    assert {one["engine"] for one in found["engines"]} == {talked.prefill.url, talked.decode.url}


async def test_engines_are_asked_in_their_pods(pods: PodDeployment, server: ForwardingServer, tmp_path: Path) -> None:
    await Talk(pods).say()
    server.add("qwen-router-0", "router", ("admin", 9000), place(pods.router.admin_url))
    async with aiohttp.ClientSession() as session, session.get(pods.router.admin_url + "/debug/fleet") as response:
        fleet = await response.json()
    for one in fleet:
        server.add(one["engine"], one["role"], ("http", 8200), place(f"http://{one['address']}"))
    code, out, error = await run(*flags(server, tmp_path))
    assert (code, error) == (0, "")
    usage = {one["engine"]: one["kv_usage"] for one in json.loads(out)["engines"]}
    assert set(usage) == {one["engine"] for one in fleet}
    assert all(0 <= value < 1 for value in usage.values())
    assert max(usage.values()) > 0, "decode keeps what a next turn may read"


async def trouble(path: Path) -> str:
    """What is said of a look that fails."""
    with pytest.raises(SourceError) as failed:
        async with open_cluster(str(path), "", "llm", "qwen", True) as source:
            await source.read()
    return str(failed.value)


@pytest.mark.parametrize("phase", ["Pending", None])
async def test_no_router_runs(server: ForwardingServer, tmp_path: Path, phase: str | None) -> None:
    if phase is not None:
        server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", 9), phase=phase)
    said = await trouble(server.kubeconfig(tmp_path / "config"))
    assert said == "no router of PDDeployment llm/qwen is running: see kubectl -n llm describe pdd qwen"


async def test_a_router_that_does_not_listen(server: ForwardingServer, tmp_path: Path) -> None:
    server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", free_ports(1)[0]))
    said = await trouble(server.kubeconfig(tmp_path / "config"))
    assert said.startswith("pod qwen-router-0, port 9000: error forwarding port 9000")


async def test_a_port_that_speaks_no_http(server: ForwardingServer, tmp_path: Path) -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    server.add("qwen-router-0", "router", ("admin", 9000), other.sockets[0].getsockname())
    said = await trouble(server.kubeconfig(tmp_path / "config"))
    other.close()
    assert said.startswith("pod qwen-router-0, port 9000: no HTTP answer")


async def test_without_the_rights(server: ForwardingServer, tmp_path: Path) -> None:
    server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", 9))
    server.refuse = 403
    assert "403; it needs get and create on pods/portforward" in await trouble(server.kubeconfig(tmp_path / "config"))
    server.token = "canary-other"
    path = server.kubeconfig(tmp_path / "config")
    server.token = "canary"
    said = await trouble(path)
    assert said.startswith("the API server refuses to list pods: 401")
    assert "canary" not in said


async def test_an_api_server_that_is_away(server: ForwardingServer, tmp_path: Path) -> None:
    path = server.kubeconfig(tmp_path / "config")
    await server.stop()
    assert (await trouble(path)).startswith("the API server can't be reached: ")


@pytest.mark.parametrize(
    ("content", "said"), [(None, "there is no kubeconfig"), ("a: [canary", "is no YAML"), ("{}", "can't be used")]
)
async def test_kubeconfigs_of_no_use(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    found = await trouble(path)
    assert said in found
    assert str(path) in found
    assert "canary" not in found


async def test_one_of_both() -> None:
    code, _, error = await run("--once", "--name", "qwen", "--admin", "http://127.0.0.1:1")
    assert (code, "--name" in error, "give one of them" in " ".join(error.split())) == (2, True, True)
