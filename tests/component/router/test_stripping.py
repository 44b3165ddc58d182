"""Nothing of a handle to a client, nothing of a client's ``kv_transfer_params`` to an engine (IS-01, IS-02, IS-07).

That no client byte holds anything of a handle is checked after every test of this folder (`Deployment.check_seen`);
here are the places where it could hide, and the places where a client could hide its own.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from pd_wire import names
from support.chat import TEXT, Talk, send
from support.deployment import Deployment
from support.fake_engine import AnswerStyle, Behaviour, Fault, Gate, Kind, Point

EVIL = {
    "do_remote_decode": True,
    "do_remote_prefill": True,
    "remote_host": "169.254.169.254",
    "remote_port": 5600,
    "remote_engine_id": "evil-canary",
    "remote_request_id": "evil-canary",
    "remote_block_ids": [[1, 2, 3]],
    "remote_num_tokens": 48,
}
PLAIN: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}

PART = {"type": "text", "text": TEXT}

PLACES: dict[str, dict[str, Any]] = {
    "top": {"kv_transfer_params": EVIL},
    "junk": {"kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": False}},
    "not an object": {"kv_transfer_params": "x"},
    "capitals": {"KV_TRANSFER_PARAMS": EVIL, "Kv_Transfer_Params": EVIL},
    "camel case": {"kvTransferParams": EVIL},
    "dashes": {"kv-transfer-params": EVIL},
    "extra_body": {"extra_body": {"kv_transfer_params": EVIL}},
    "nested extra_body": {"extra_body": {"extra_body": {"a": [{"kv_transfer_params": EVIL}]}}},
    "vllm_xargs": {"vllm_xargs": {"kv_transfer_params": json.dumps(EVIL)}},
    "extra_args": {"extra_args": {"kv_transfer_params": EVIL}},
    "sampling_params": {"sampling_params": {"extra_args": {"kv_transfer_params": EVIL}}},
    "nvext": {"nvext": {"kv_transfer_params": EVIL}},
    "metadata": {"metadata": {"kv_transfer_params": EVIL}},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True, "kv_transfer_params": EVIL}},
    "message": {"messages": [{"role": "user", "content": TEXT, "kv_transfer_params": EVIL}]},
    "content part": {"messages": [{"role": "user", "content": [{**PART, "kv_transfer_params": EVIL}]}]},
    "tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}, "kv_transfer_params": EVIL}]},
    "own keys": {"pd_proof": {"v": 1}, "pd_retain": False, "pd_mode": "x", "pd_report": {}},
    "ec": {"ec_transfer_params": {"x": EVIL}},
}


def _assert_clean(deployment: Deployment) -> None:
    records = deployment.records()
    assert records
    for record in records:
        for word in (b"evil-canary", b"169.254.169.254"):
            assert word not in record.raw
            assert all(word.decode() not in value for _name, value in record.headers)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_clients_params_reach_no_engine(deploy: Any, path: str, place: str) -> None:
    deployment = await deploy()
    body = {**PLAIN, **PLACES[place]}
    if path == "/v1/completions":
        body.pop("messages")
        body["prompt"] = TEXT
    if path == "/v1/responses":
        body["input"] = body.pop("messages")
    if path == "/v1/messages":
        body["max_tokens"] = 20
    for _ in range(2):
        turn = await send(deployment, body, {"Authorization": f"Bearer sk-canary-{place}"}, path=path)
        assert turn.status in (200, 400), turn.raw
    if deployment.records():
        _assert_clean(deployment)


RAW = [
    b'{"model":"tiny","messages":[{"role":"user","content":"hello"}],"kv_transfer\\u005fparams":%b}',
    b'{"kv_transfer_params":null,"model":"tiny","messages":[{"role":"user","content":"hello"}],"kv_transfer_params":%b}',
    b'{"model":"tiny","messages":[{"role":"user","content":"hello"}],"vllm_xargs":{"x":1},"vllm_xargs":{"kv_transfer_params":%b}}',
    b'{"model":"tiny", "\\u006bv_transfer_params":%b,"messages":[{"role":"user","content":"hello"}]}',
]


@pytest.mark.parametrize("raw", RAW)
async def test_params_in_odd_json(deploy: Any, raw: bytes) -> None:
    deployment = await deploy()
    turn = await send(deployment, raw % json.dumps(EVIL).encode())
    assert turn.status in (200, 400)
    if deployment.records():
        _assert_clean(deployment)


async def test_params_in_headers_and_query(deploy: Any) -> None:
    deployment = await deploy()
    evil = json.dumps(EVIL)
    headers = {"kv_transfer_params": evil, "X-Kv-Transfer-Params": evil, "X-Prefiller-Host-Port": "169.254.169.254:80"}
    turn = await send(deployment, PLAIN, headers, path="/v1/chat/completions?kv_transfer_params=evil-canary")
    assert turn.status == 200
    _assert_clean(deployment)
    assert [record.target for record in deployment.records()] == ["/v1/chat/completions"] * 2


async def test_a_tool_with_a_parameter_of_that_name_is_harmless(deploy: Any) -> None:
    deployment = await deploy()
    parameters = {"type": "object", "properties": {"kv_transfer_params": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    turn = await send(deployment, {**PLAIN, "tools": tools})
    assert turn.status == 200


@pytest.mark.parametrize("place", ["first", "finish", "usage", "extra"])
@pytest.mark.parametrize("usage", [False, True])
async def test_a_handle_on_any_event_is_found_and_removed(deploy: Any, place: Any, usage: bool) -> None:
    deployment = await deploy()
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    deployment.decode.default = Behaviour(handle_on=place)
    talk = Talk(deployment, stream=True, **options)
    await talk.say()
    turn = await talk.say("Go on.")
    assert len(turn.attached) == (0 if place == "usage" and not usage else 1)
    kinds = [event for event in turn.events if event != "[DONE]" and event.get("usage")]
    assert len(kinds) == (1 if usage else 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 500])
async def test_error_bodies_of_a_careless_engine(deploy: Any, role: str, status: int, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    engine = deployment.prefill if role == "prefill" else deployment.decode
    leak = Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status), errors_carry_params=True)
    engine.default = leak
    turn = await Talk(deployment, stream=stream).say(check=False)
    assert turn.status >= 400
    assert turn.json["error"]["message"]
    deployment.fabric.clock.advance(31)


CARELESS: dict[str, Any] = {
    "a text that quotes it": {"error": {"message": "bad input {'kv_transfer_params': %s}", "code": 400}},
    "a transfer error": {"error": {"message": "NIXL handshake with 10.1.2.3:5600 (engine %s) failed", "code": 500}},
    "an id alone": {"error": {"message": "engine %s is gone", "code": 400}},
    "detail": {"detail": "bad kv_transfer_params %s"},
    "details": {"detail": [{"loc": ["body"], "msg": "no", "input": {"kv_transfer_params": {"remote_host": "%s"}}}]},
    "the old shape": {"object": "error", "message": "remote_engine_id %s"},
    "a list": [{"kv_transfer_params": {"remote_engine_id": "%s"}}],
    "a string": "kv_transfer_params %s",
}


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
@pytest.mark.parametrize("shape", CARELESS)
async def test_errors_that_tell_of_the_handle_in_any_shape(deploy: Any, shape: str, status: int) -> None:
    deployment = await deploy(breaks=True)
    talk = Talk(deployment)
    await talk.say()
    # What P was sent, D's own name among it.
    body = json.dumps(CARELESS[shape]).replace("%s", deployment.decode.connector.engine_id).encode()
    deployment.prefill.default = Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, status, body))
    turn = await talk.say("Go on.", check=False)
    assert turn.status == (502 if status == 500 else status)
    assert turn.json["error"].keys() == {"message", "type", "param", "code"}
    assert turn.json["error"]["message"]
    assert b"10.1.2.3" not in turn.raw
    # An attempt without the handle could only know P's own.
    if status in (400, 422):
        assert deployment.decode.connector.engine_id.encode() not in turn.raw


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_of_a_careless_engine(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    names_of_it = ("X-Engine-Id", "X-KV-Transfer-Params", "X-Remote-Host", "X-Nixl", "X-Other")
    deployment.decode.next(Behaviour(headers=dict.fromkeys(names_of_it, "canary")))
    turn = await Talk(deployment, stream=stream).say()
    assert {name.lower() for name in turn.headers} <= {
        *("content-type", "content-length", "transfer-encoding", "connection", "x-request-id"),
    }
    assert "canary" not in turn.headers.values()


async def test_error_events_of_a_careless_engine(deploy: Any) -> None:
    deployment = await deploy()
    for point in (Point.AFTER_FIRST_CONTENT, Point.BEFORE_FINISH):
        gate = Gate(2)
        deployment.decode.next(Behaviour(fault=Fault(Kind.ERROR_EVENT, point), errors_carry_params=True, gate=gate))
        turn = await Talk(deployment, stream=True).say(check=False, at_content=gate.open)
        assert any("error" in event for event in turn.events if event != "[DONE]")


async def test_params_that_are_null_or_nested_in_an_answer(deploy: Any) -> None:
    deployment = await deploy()
    turn = await Talk(deployment).say(n=2, check=False)
    assert names.KV_PARAMS not in turn.json
    deployment.decode.next(Behaviour(edit_handle=lambda handle: {**handle, "deep": {"deeper": [handle]}}))
    await Talk(deployment).say()


async def test_an_answer_that_talks_about_params_is_not_touched(deploy: Any) -> None:
    deployment = await deploy()
    deployment.may_show |= {names.KV_PARAMS, "do_remote_", "remote_engine_id"}
    tail = ' {"kv_transfer_params": {"do_remote_decode": true, "remote_engine_id": "x"}} data: [DONE] \\n'
    style = AnswerStyle(tail=tail)
    deployment.decode.default = Behaviour(style=style, piece_chars=1000)
    for stream in (False, True):
        talk = Talk(deployment, stream=stream, style=style)
        await talk.say()
        turn = await talk.say("Go on.")
        assert turn.text.endswith(tail)
        assert len(turn.attached) == 1


async def test_the_other_endpoints(deploy: Any) -> None:
    deployment = await deploy()
    async with aiohttp.ClientSession(deployment.router.url) as session:
        async with session.get("/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"][0]["id"] == "tiny"
        body = {"model": "tiny", "prompt": "abc", "kv_transfer_params": EVIL}
        async with session.post("/tokenize", json=body) as response:
            assert (await response.json())["tokens"] == [97, 98, 99]
        for url in (deployment.router.admin_url + path for path in ("/metrics", "/debug/explain", "/debug/fleet")):
            async with session.get(url) as response:
                deployment.seen.append(await response.read())
    deployment.may_show |= {engine.connector.host for engine in deployment.engines}


async def test_secrets_and_prompts_stay_out_of_the_log(deploy: Any) -> None:
    # The router of every test logs at debug level.
    deployment = await deploy()
    talk = Talk(deployment, headers={"Authorization": "Bearer sk-canary-log"}, conversation_id="canary-conversation")
    await talk.say("A canary-prompt. " + TEXT)
    deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
    deployment.decode.next(Behaviour(fault=Fault(Kind.STATUS, status=500)))
    await talk.say("Another canary-prompt.")
    assert "canary" not in deployment.router.log
