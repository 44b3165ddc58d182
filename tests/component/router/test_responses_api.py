"""The Responses API by the official client: reuse from turn 2 on, by the whole history or by the answer's id alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from support.chat import TEXT, Turn, send
from support.deployment import Deployment, Spec
from support.fake_engine import EARLY_FAULTS, AnswerStyle, Behaviour, Fault, Gate, Kind, Point

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"kv": {"type": "string"}, "unit": {"type": "string"}}},
    }
]
PATH = "/v1/responses"


async def client_of(deployment: Deployment, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=deployment.router.url + "/v1", api_key=key, max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """One response, put together by the client; its text is also what the deltas say."""
    if not stream:
        return await client.responses.create(model="tiny", **fields)
    final, text = None, ""
    async for event in await client.responses.create(model="tiny", stream=True, **fields):
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            final = event.response
    assert final is not None
    assert final.output_text == text
    return final


def right(deployment: Deployment, **body: Any) -> str:
    return deployment.right({"model": "tiny", **body}).content


def last_pull(deployment: Deployment) -> int:
    return deployment.prefill.generates[-1].pulled_tokens or 0


def items_of(response: Any, **dump: Any) -> list[Any]:
    return [item.model_dump(mode="json", **dump) for item in response.output]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dump", [{}, {"exclude_none": True}, {"exclude_unset": True}], ids=str)
async def test_turns_that_send_all_items(deploy: Any, dump: dict[str, Any], stream: bool) -> None:
    deployment = await deploy()
    items: list[Any] = [{"role": "user", "content": f"Items {stream} {dump}. {TEXT}"}]
    async for client in client_of(deployment, f"sk-responses-{stream}-{dump}"):
        for turn in range(4):
            response = await ask(client, stream, input=items, instructions="Be kind.")
            assert response.status == "completed"
            assert response.output_text == right(deployment, input=items, instructions="Be kind.")
            assert (last_pull(deployment) > 100) is (turn > 0)
            usage = response.usage
            assert usage.input_tokens_details.cached_tokens == last_pull(deployment)
            items += [*items_of(response, **dump), {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_turns_that_name_the_one_before(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    items: list[Any] = [{"type": "message", "role": "user", "content": f"Chain {stream}. " + TEXT}]
    named: dict[str, Any] = {}
    async for client in client_of(deployment, f"sk-responses-chain-{stream}"):
        for turn in range(4):
            response = await ask(client, stream, input=items[-1]["content"], **named)
            assert response.output_text == right(deployment, input=items)
            assert (last_pull(deployment) > 100) is (turn > 0)
            for record in deployment.records():
                assert "previous_response_id" not in record.body
            named = {"previous_response_id": response.id}
            items += [*items_of(response), {"type": "message", "role": "user", "content": f"And then, {turn}?"}]


async def test_one_response_may_be_continued_twice(deploy: Any) -> None:
    deployment = await deploy()
    async for client in client_of(deployment, "sk-responses-fork"):
        first = await ask(client, False, input="Fork. " + TEXT)
        for way in ("Left?", "Right?"):
            items = ["Fork. " + TEXT, *items_of(first), way]
            whole = [{"role": "user", "content": item} if isinstance(item, str) else item for item in items]
            response = await ask(client, False, input=way, previous_response_id=first.id)
            assert response.output_text == right(deployment, input=whole)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chained", [False, True], ids=["items", "chained"])
async def test_tool_calls(deploy: Any, chained: bool, stream: bool) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=AnswerStyle(calls_tool=True), piece_chars=5)
    items: list[Any] = [{"role": "user", "content": f"Tools {stream} {chained}. " + TEXT}]
    async for client in client_of(deployment, f"sk-responses-tools-{stream}-{chained}"):
        one = await ask(client, stream, input=items, tools=TOOLS)
        (call,) = (item for item in one.output if item.type == "function_call")
        assert json.loads(call.arguments)["unit"] == "celsius"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain, 12 degrees"}
        whole = [*items, *items_of(one), output]
        how = {"input": [output], "previous_response_id": one.id} if chained else {"input": whole}
        two = await ask(client, stream, tools=TOOLS, **how)
        assert two.output_text == right(deployment, input=whole, tools=TOOLS)
        assert last_pull(deployment) > 100


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reasoning_items(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    style = AnswerStyle(reasoning="field")
    deployment.decode.default = Behaviour(style=style)
    items: list[Any] = [{"role": "user", "content": f"Think {stream}. " + TEXT}]
    async for client in client_of(deployment, f"sk-responses-think-{stream}"):
        for turn in range(3):
            response = await ask(client, stream, input=items)
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output_text == deployment.right({"model": "tiny", "input": items}, style).content
            assert (last_pull(deployment) > 100) is (turn > 0)
            items += [*items_of(response, exclude_none=True), {"role": "user", "content": "And then?"}]


async def test_a_limit_ends_the_response_as_incomplete(deploy: Any) -> None:
    deployment = await deploy()
    async for client in client_of(deployment, "sk-responses-limit"):
        response = await client.responses.create(model="tiny", input="Short. " + TEXT, max_output_tokens=5)
        assert response.status == "incomplete"
        assert response.output_text == right(deployment, input="Short. " + TEXT, max_output_tokens=5)


async def test_what_is_not_kept_cannot_be_named(deploy: Any) -> None:
    deployment = await deploy()
    async for client in client_of(deployment, "sk-responses-store"):
        secret = await client.responses.create(model="tiny", input="Forget. " + TEXT, store=False)
        kept = await client.responses.create(model="tiny", input="Remember. " + TEXT)
        for name in (secret.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(model="tiny", input="And?", previous_response_id=name)
            assert caught.value.param == "previous_response_id"
    async for other in client_of(deployment, "sk-responses-store-of-another-tenant"):
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="tiny", input="And?", previous_response_id=kept.id)
    assert len(deployment.records()) == 4


async def test_a_router_that_keeps_nothing(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--response-cap-bytes", "0"),)))
    async for client in client_of(deployment, "sk-responses-nothing"):
        first = await client.responses.create(model="tiny", input=TEXT)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)


ALONE: dict[str, dict[str, Any]] = {
    "web search": {"tools": [{"type": "web_search_preview"}]},
    "code interpreter": {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    "mcp": {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]},
    "truncation": {"truncation": "auto"},
    "previous input": {"previous_input_messages": [{"role": "user", "content": "x"}]},
}


def plain(deployment: Deployment, turn: Turn) -> None:
    """Decode alone did the turn, without params, and keeps nothing of it."""
    assert turn.status == 200, turn.raw
    assert turn.prefills == []
    assert [record.params for record in turn.decodes] == [None]
    ids = [record.request_id for record in turn.decodes]
    assert not deployment.decode.connector.retained().keys() & set(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ALONE)
async def test_what_one_engine_does_alone(deploy: Any, name: str, stream: bool) -> None:
    deployment = await deploy()
    body = {"model": "tiny", "input": f"{name}. {TEXT}", "stream": stream, **ALONE[name]}
    for _ in range(2):
        turn = await send(deployment, body, {"Authorization": f"Bearer sk-alone-{name}"}, path=PATH)
        plain(deployment, turn)


@pytest.mark.parametrize("stream", [False, True])
async def test_media_are_never_linked(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
    content = [{"type": "input_text", "text": TEXT}, image]
    body = {"model": "tiny", "input": [{"role": "user", "content": content}], "stream": stream}
    headers = {"Authorization": f"Bearer sk-responses-media-{stream}"}
    for _ in range(2):
        turn = await send(deployment, {**body, "conversation_id": "media"}, headers, path=PATH)
        assert turn.status == 200, turn.raw
        assert turn.attached == []
    assert (await deployment.explain())[-1]["link_fault"] == "media"


@pytest.mark.parametrize("place", ["first", "finish"])
async def test_a_handle_on_any_event_is_found_and_removed(deploy: Any, place: Any) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(handle_on=place)
    async for client in client_of(deployment, f"sk-responses-place-{place}"):
        first = await ask(client, True, input="Place. " + TEXT)
        second = await ask(client, True, input="Go on.", previous_response_id=first.id)
        assert second.output_text
        assert last_pull(deployment) > 100


@pytest.mark.parametrize("cuts", [1, 7, 64, 1000])
async def test_a_stream_in_any_pieces_is_the_same_but_for_the_handle(deploy: Any, cuts: int) -> None:
    deployment = await deploy()
    sent: list[bytes] = []
    deployment.decode.tap = sent.append
    deployment.decode.default = Behaviour(cuts=tuple(range(cuts, 20_000, cuts * 7)))
    body = {"model": "tiny", "input": f"Pieces {cuts}. {TEXT}", "stream": True}
    turn = await send(deployment, body, {"Authorization": f"Bearer sk-pieces-{cuts}"}, path=PATH)
    events = [json.loads(event.split(b"data: ")[1]) for event in sent]
    names = [event.split(b"\n")[0] for event in sent]
    assert [event.split(b"\n")[0] for event in turn.raw.split(b"\n\n")[:-1]] == names
    shown = turn.events
    for event in events:
        if "response" in event:
            del event["response"]["kv_transfer_params"]
    assert shown == events


@pytest.mark.parametrize("kind", [Kind.ERROR_EVENT, Kind.CLOSE, Kind.RESET, Kind.TRUNCATE])
async def test_a_stream_that_breaks_after_content_ends_with_one_error(deploy: Any, kind: Kind) -> None:
    deployment = await deploy(breaks=True)
    gate = Gate(3)
    behaviour = Behaviour(fault=Fault(kind, Point.AFTER_FIRST_CONTENT), gate=gate, errors_carry_params=True)
    deployment.decode.next(behaviour, times=None)

    def opened(raw: bytes) -> None:
        if b"output_text.delta" in raw or b"output_item.added" in raw:
            gate.open()

    body = {"model": "tiny", "input": f"Break {kind}. {TEXT}", "stream": True}
    turn = await send(deployment, body, {"Authorization": f"Bearer sk-break-{kind}"}, path=PATH, seen=opened)
    last = turn.events[-1]
    assert last["type"] == "error"
    assert last["message"]
    assert last["error"]["message"] == last["message"]
    assert sum(event["type"] == "error" for event in turn.events) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", EARLY_FAULTS, ids=lambda fault: f"{fault.kind}-{fault.at}")
async def test_what_fails_before_content_is_tried_again(deploy: Any, fault: Fault, role: str, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    engine = deployment.prefill if role == "prefill" else deployment.decode
    engine.next(Behaviour(fault=fault))
    async for client in client_of(deployment, f"sk-again-{fault.kind}-{role}-{stream}"):
        text = f"Again {fault.kind} {role} {stream}. {TEXT}"
        response = await ask(client, stream, input=text)
        assert response.output_text == right(deployment, input=text)
    assert (await deployment.explain())[-1]["attempts"] == 2
    deployment.fabric.clock.advance(31)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_handle_fails_is_tried_without_it(deploy: Any, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    async for client in client_of(deployment, f"sk-responses-retry-{stream}"):
        first = await ask(client, stream, input="Retry. " + TEXT)
        deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_HEADERS, 500)))
        second = await ask(client, stream, input="Go on.", previous_response_id=first.id)
        items = [{"role": "user", "content": "Retry. " + TEXT}, *items_of(first), {"role": "user", "content": "Go on."}]
        assert second.output_text == right(deployment, input=items)
    assert (await deployment.explain())[-1]["attempts"] == 2
