"""`pdctl top --name`: routers and engines in pods, through an API server that forwards ports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from support.chat import Talk
from support.deployment import Deployment
from support.port_forwarding import ForwardingServer
from support.router_process import free_ports
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
    # In a cluster an engine is named like its pod; here like its URL.
    server.add(
        talked.decode.url.replace("http://", "").replace(":", "-"), "decode", ("http", 8200), place(talked.decode.url)
    )
    code, out, error = await run(*flags(server, tmp_path))
    assert (code, error) == (0, "")
    found = json.loads(out)
    metrics = await talked.metrics()
    assert found["routers"] == 2
    assert found["turns"] == 2 * metrics["pd_router_turn_seconds_count"] > 0
    assert {one["engine"] for one in found["engines"]} == {talked.prefill.url, talked.decode.url}


@pytest.mark.parametrize("phase", ["Pending", None])
async def test_no_router_runs(server: ForwardingServer, tmp_path: Path, phase: str | None) -> None:
    if phase is not None:
        server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", 9), phase=phase)
    code, _, error = await run(*flags(server, tmp_path))
    assert code == 1
    assert error.startswith("pdctl top: no router of PDDeployment llm/qwen is running: see kubectl -n llm describe pdd")


async def test_a_router_that_does_not_listen(server: ForwardingServer, tmp_path: Path) -> None:
    server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", free_ports(1)[0]))
    code, _, error = await run(*flags(server, tmp_path))
    assert code == 1
    assert error.startswith("pdctl top: pod qwen-router-0, port 9000: error forwarding port 9000")


async def test_without_the_rights(server: ForwardingServer, tmp_path: Path) -> None:
    server.add("qwen-router-0", "router", ("admin", 9000), ("127.0.0.1", 9))
    server.refuse = 403
    code, _, error = await run(*flags(server, tmp_path))
    assert (code, "403; it needs get and create on pods/portforward" in error) == (1, True)
    server.token, words = "another", flags(server, tmp_path)
    server.token = "canary"
    code, _, error = await run(*words)
    assert (code, "refuses to list pods: 401" in error, "another" in error) == (1, True, False)


async def test_kubeconfigs_of_no_use(tmp_path: Path) -> None:
    for content, said in ((None, "there is no kubeconfig"), ("a: [", "is no YAML"), ("{}", "can't be used")):
        path = tmp_path / "config"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        code, _, error = await run("--once", "--name", "qwen", "--kubeconfig", str(path))
        assert (code, said in error, str(path) in error, "Traceback" in error) == (1, True, True, False)


async def test_an_api_server_that_is_away(server: ForwardingServer, tmp_path: Path) -> None:
    words = flags(server, tmp_path)
    await server.stop()
    code, _, error = await run(*words)
    assert (code, error.startswith("pdctl top: the API server can't be reached: ")) == (1, True)


async def test_one_of_both() -> None:
    code, _, error = await run("--once", "--name", "qwen", "--admin", "http://127.0.0.1:1")
    assert (code, "--name" in error, "instead of --admin" in " ".join(error.split())) == (2, True, True)
