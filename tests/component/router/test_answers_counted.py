"""Every answer counts in `requests_total`, once: turns, refusals of any kind, what is passed on, what is no path."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from support.chat import TEXT
from support.deployment import Deployment, Spec
from support.rawhttp import RawConnection, post

KEY = "sk-canary-key-of-a"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
OWN = f"Authorization: Bearer {KEY}"
BARE = b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("".join(f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in [("team-a", KEY)]))
    return Spec(flags=(("--api-keys-file", str(keys)), ("--max-body-bytes", "20000"), ("--max-inflight", "5")))


async def counted(deployment: Deployment) -> dict[tuple[str, str], float]:
    found = {}
    for name, value in (await deployment.metrics()).items():
        if name.startswith("pd_router_requests_total{") and value:
            api, status = (part.split('"')[1] for part in sorted(name.partition("{")[2].split(",")))
            found[api, status] = value
    return found


@pytest.mark.parametrize(
    ("request_", "api", "status"),
    [
        (post(CHAT, BODY, OWN), "chat.completions", 200),
        (post(CHAT, b"{", OWN), "chat.completions", 400),
        (post(CHAT, BODY), "chat.completions", 401),
        (post("/v1/messages?beta=true", BODY, "Authorization: Bearer x"), "messages", 401),
        (BARE % CHAT.encode(), "chat.completions", 405),
        (BARE % b"/v1/models", "/v1/models", 200),
        (BARE % b"/v1/nothing", "other", 404),
        (BARE % b"/v1/realtime", "other", 501),
        (post("/v1/embeddings", b"{", OWN), "/v1/embeddings", 400),
        (BARE % b"/v1/embeddings", "/v1/embeddings", 405),
        (post("/v1/embeddings", BODY), "/v1/embeddings", 401),
        (post(CHAT, b"x" * 30_000, OWN), "other", 413),
        (b"nonsense\r\n\r\n", "other", 400),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else str(value),
)
async def test_an_answer(deploy: Any, spec: Spec, request_: bytes, api: str, status: int) -> None:
    deployment = await deploy(spec)
    before = await counted(deployment)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(request_)
        assert (await raw.answer()).status == status
    after = await counted(deployment)
    assert after == {**before, (api, str(status)): before.get((api, str(status)), 0.0) + 1}


async def test_a_health_check_is_no_request(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec)
    before = await counted(deployment)
    async with RawConnection(deployment.router.port) as raw:
        await raw.send(BARE % b"/health")
        assert (await raw.answer()).status == 200
    assert await counted(deployment) == before


async def test_a_tenant_at_its_limit(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--tenant-rate", "0.01"), ("--tenant-burst", "1"))))
    before = await counted(deployment)
    async with RawConnection(deployment.router.port) as raw:
        answers = []
        for _ in range(3):
            await raw.send(post(CHAT, BODY, "Authorization: Bearer someone"))
            answers.append((await raw.answer()).status)
    after = await counted(deployment)
    assert answers == [200, 429, 429]
    assert after["chat.completions", "429"] == before.get(("chat.completions", "429"), 0.0) + 2
