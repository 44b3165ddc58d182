"""The endpoints with one engine and without KV: what passes, what is cleaned, and what no client can reach."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from pd_router.core.passed import PASSED
from support.deployment import Deployment, Spec
from support.fake_engine.engine import Passed
from support.fake_engine.routes import POOLING, SPEECH, STEERING, TOLD, parse_form
from support.rawhttp import RawConnection
from support.waiting import until

EVIL = {"do_remote_decode": True, "remote_host": "169.254.169.254", "remote_engine_id": "evil-canary"}
HEADERS = {"Authorization": "Bearer sk-passed"}


def passed(deployment: Deployment) -> list[Passed]:
    return [one for engine in deployment.decodes for one in engine.passed]


async def ask(deployment: Deployment, method: str, path: str, **how: Any) -> tuple[int, dict[str, str], bytes]:
    headers = {**HEADERS, **how.pop("headers", {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, deployment.router.url + path, headers=headers, **how) as response,
    ):
        raw = await response.read()
    deployment.seen.append(raw)
    return response.status, dict(response.headers), raw


async def test_the_official_client(deploy: Any) -> None:
    deployment = await deploy()
    async with openai.AsyncOpenAI(base_url=deployment.router.url + "/v1", api_key="sk-passed", max_retries=0) as client:
        made = await client.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
        assert made.data[0].embedding == [0.014, -0.5]
        assert made.usage.prompt_tokens == 14
        heard = await client.audio.transcriptions.create(model="tiny", file=("a.wav", b"RIFF" * 100), language="en")
        assert heard.text == "400 bytes of speech"
        text = ""
        async for event in await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", b"RIFF" * 100), stream=True
        ):
            text += event.choices[0]["delta"]["content"]  # type: ignore[union-attr]
        assert text == "400 bytes of speech"
        assert [model.id async for model in client.models.list()] == ["tiny"]
    assert [one.target for one in passed(deployment)] == ["/v1/embeddings", *["/v1/audio/transcriptions"] * 2]
    assert deployment.prefill.passed == []


@pytest.mark.parametrize("path", POOLING)
async def test_pooling(deploy: Any, path: str) -> None:
    deployment = await deploy()
    body = {"model": "tiny", "input": "x", "kv_transfer_params": EVIL, "extra_body": {"KV-Transfer-Params": EVIL}}
    status, headers, raw = await ask(deployment, "POST", f"{path}?kv_transfer_params=evil-canary", json=body)
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(raw)["data"]
    (one,) = passed(deployment)
    assert json.loads(one.raw) == {"model": "tiny", "input": "x", "extra_body": {}}
    assert one.target == path
    assert "evil" not in str(one.headers)


async def test_the_tokenizer_and_the_version(deploy: Any) -> None:
    deployment = await deploy()
    assert json.loads((await ask(deployment, "POST", "/detokenize", json={"tokens": [97, 98]}))[2])["prompt"] == "ab"
    assert json.loads((await ask(deployment, "GET", "/version"))[2]) == {"version": "0.32.0"}
    status, headers, raw = await ask(deployment, "HEAD", "/v1/models")
    assert (status, raw) == (200, b"")
    assert int(headers["Content-Length"]) > 10


@pytest.mark.parametrize(
    "path", [*STEERING, *TOLD, "/metrics", "/ping", "/docs", "/openapi.json", "/v1/responses/resp_1"]
)
async def test_nothing_that_steers_an_engine_is_reached(deploy: Any, path: str) -> None:
    deployment = await deploy()
    for method in ("GET", "POST"):
        for spelt in (path, f"{path}?x=1", f"/{path}", f"{path}/"):
            status, _, raw = await ask(deployment, method, spelt)
            assert status == 404, spelt
            assert json.loads(raw)["error"]["code"] == "unknown_path"
    assert passed(deployment) == []
    assert deployment.records() == []


@pytest.mark.parametrize("path", ["/v1/audio/../../sleep", "/v1/models/../sleep", "/v1/models%2f..%2fsleep"])
async def test_no_detour_leads_there(deploy: Any, path: str) -> None:
    deployment = await deploy()
    async with RawConnection(int(deployment.router.url.rpartition(":")[2])) as connection:
        await connection.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert (await connection.answer()).status == 404


@pytest.mark.parametrize("path", PASSED)
async def test_other_methods_are_refused_by_name(deploy: Any, path: str) -> None:
    deployment = await deploy()
    wrong = "POST" if PASSED[path].method == "GET" else "GET"
    status, headers, _ = await ask(deployment, wrong, path)
    assert status == 405
    assert headers["Allow"].split(", ")[0] == PASSED[path].method


async def test_a_websocket_is_refused_in_words(deploy: Any) -> None:
    deployment = await deploy()
    offer = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    status, _, raw = await ask(deployment, "GET", "/v1/realtime?model=tiny", headers=offer)
    assert status == 501
    assert "WebSocket" in json.loads(raw)["error"]["message"]
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(deployment.router.url + "/v1/realtime", headers=HEADERS)
    assert refused.value.status == 501


def form(*fields: tuple[str, Any]) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields:
        data.add_field(name, value, filename="a.wav" if isinstance(value, bytes) else None)
    return data


@pytest.mark.parametrize("path", SPEECH)
async def test_speech_passes_byte_for_byte(deploy: Any, path: str) -> None:
    deployment = await deploy()
    sound = bytes(range(256)) * 50 + b"kv_transfer_params"
    data = form(("model", "tiny"), ("prompt", "about kv_transfer_params"), ("file", sound))
    status, _, raw = await ask(deployment, "POST", path, data=data)
    assert status == 200
    assert json.loads(raw)["text"] == f"{len(sound)} bytes of speech"
    (one,) = passed(deployment)
    assert parse_form(one.raw, one.headers["Content-Type"])["file"] == sound


FORMS: dict[str, tuple[str, Any]] = {
    "the field": ("kv_transfer_params", json.dumps(EVIL)),
    "in capitals": ("KV-Transfer-Params", "x"),
    "as a file": ("kv_transfer_params", b"x"),
    "in brackets": ("vllm_xargs[kv_transfer_params]", "x"),
    "in xargs": ("vllm_xargs", json.dumps({"kv_transfer_params": "x"})),
    "escaped": ("vllm_xargs", '{"kv%5Ftransfer%5Fparams": 1}'),
    "our own": ("pd_retain", "x"),
}


@pytest.mark.parametrize("name", FORMS)
async def test_a_form_that_names_the_params_is_refused(deploy: Any, name: str) -> None:
    deployment = await deploy()
    data = form(("model", "tiny"), FORMS[name], ("file", b"RIFF"))
    status, _, raw = await ask(deployment, "POST", "/v1/audio/transcriptions", data=data)
    assert status == 400
    assert "must be" in json.loads(raw)["error"]["message"]
    assert passed(deployment) == []


@pytest.mark.parametrize(
    ("kind", "raw", "status"),
    [
        ("application/json", b"{}", 415),
        ("", b"x", 415),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=b", b"no boundary in here", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nno end of the head", 400),
    ],
)
async def test_what_is_no_form(deploy: Any, kind: str, raw: bytes, status: int) -> None:
    deployment = await deploy()
    how: dict[str, Any] = {"headers": {"Content-Type": kind}} if kind else {"skip_auto_headers": ["Content-Type"]}
    got, _, body = await ask(deployment, "POST", "/v1/audio/transcriptions", data=raw, **how)
    assert got == status
    assert json.loads(body)["error"]["message"]
    assert passed(deployment) == []


async def test_an_engine_that_is_gone_costs_another_try(deploy: Any) -> None:
    deployment = await deploy(Spec(decodes=2), breaks=True)
    await deployment.decodes[0].kill()
    for _ in range(4):
        status, _, _ = await ask(deployment, "POST", "/v1/embeddings", json={"model": "tiny", "input": "x"})
        assert status == 200
    assert len(deployment.decodes[1].passed) == 4


async def test_requests_are_spread_by_load(deploy: Any) -> None:
    deployment = await deploy(Spec(decodes=2))
    deployment.decodes[0].freeze()
    deployment.decodes[1].freeze()
    body = {"model": "tiny", "input": "x"}
    asked = [asyncio.create_task(ask(deployment, "POST", "/v1/embeddings", json=body)) for _ in range(6)]
    loads: list[int] = []

    async def all_wait() -> bool:
        loads[:] = [member["turns"] for member in await deployment._fleet() if member["role"] == "decode"]
        return sum(loads) == 6

    await until(all_wait)
    for engine in deployment.decodes:
        engine.thaw()
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 6
    assert loads == [3, 3]
