"""Anthropic's Messages API by its official client: two legs, reuse from turn to turn, streamed or not, nothing leaks.

vLLM's converter leaves the handle out of streamed messages; the fake engine puts it where the connector's plugin does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from support.chat import TEXT, send
from support.deployment import Deployment
from support.fake_engine import EARLY_FAULTS, AnswerStyle, Behaviour, Fault, Gate, Kind, Point

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "input_schema": {"type": "object", "properties": {"kv": {"type": "string"}, "unit": {"type": "string"}}},
    }
]
PATH = "/v1/messages"
MARK = {"cache_control": {"type": "ephemeral"}}


async def client_of(deployment: Deployment, key: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=deployment.router.url, api_key=key, max_retries=0) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **fields: Any) -> Any:
    """One message, put together by the client."""
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 200, **fields}
    if not stream:
        return await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as answer:
        return await answer.get_final_message()


def right(deployment: Deployment, style: AnswerStyle | None = None, **body: Any) -> str:
    return deployment.right({"model": "tiny", "max_tokens": 200, **body}, style, api="messages").content


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def last_pull(deployment: Deployment) -> int:
    return deployment.prefill.generates[-1].pulled_tokens or 0


@pytest.mark.parametrize("echo", ["text", "blocks", "dumped", "marked"])
async def test_whole_turns(deploy: Any, echo: str) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": f"Message {echo}. {TEXT}"}]
    async for client in client_of(deployment, f"sk-messages-{echo}"):
        for turn in range(4):
            answer = await ask(client, False, messages=messages, system="Be kind.")
            assert text_of(answer) == right(deployment, messages=messages, system="Be kind.")
            assert answer.stop_reason == "end_turn"
            assert (last_pull(deployment) > 100) is (turn > 0)
            assert answer.usage.cache_read_input_tokens == last_pull(deployment)
            tokens = deployment.decode.generates[-1].prompt_tokens
            assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == tokens
            block: dict[str, Any] = {"type": "text", "text": text_of(answer)}
            content: Any = {
                "text": text_of(answer),
                "blocks": [block],
                "dumped": [block.model_dump() for block in answer.content],
                "marked": [{**block, **MARK}],
            }[echo]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]


async def test_a_marker_for_a_cache_and_a_line_of_billing_move_and_mean_nothing(deploy: Any) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Marks. " + TEXT, **MARK}]}]
    async for client in client_of(deployment, "sk-messages-marks"):
        for turn in range(3):
            line = {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"}
            system: Any = [line, {"type": "text", "text": "Be kind.", **(MARK if turn % 2 else {})}]
            tools = [{**TOOLS[0], **MARK}] if turn % 2 else TOOLS
            answer = await ask(client, False, messages=messages, system=system, tools=tools)
            assert (last_pull(deployment) > 100) is (turn > 0)
            for message in messages:
                if isinstance(message["content"], list):
                    message["content"][0].pop("cache_control", None)
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": text_of(answer)}]},
                {"role": "user", "content": [{"type": "text", "text": f"And then, {turn}?", **MARK}]},
            ]


@pytest.mark.parametrize("streams", [(True, True, True, True), (True, False, True, True), (False, True, False, False)])
async def test_streamed_turns(deploy: Any, streams: tuple[bool, ...]) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": f"Streamed {streams}. {TEXT}"}]
    system = [{"type": "text", "text": "Be kind.", **MARK}]
    async for client in client_of(deployment, f"sk-messages-stream-{streams}"):
        for turn, stream in enumerate(streams):
            answer = await ask(client, stream, messages=messages, system=system)
            assert text_of(answer) == right(deployment, messages=messages, system=system)
            assert answer.stop_reason == "end_turn"
            assert (last_pull(deployment) > 100) is (turn > 0)
            assert answer.usage.cache_read_input_tokens == last_pull(deployment)
            last = deployment.decode.generates[-1]
            assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == last.prompt_tokens
            assert last.params.get("pd_retain") is None
            assert last.request_id in deployment.decode.connector.retained()
            explained = (await deployment.explain())[-1]
            assert explained["stored"] == "stored"
            if turn:
                assert explained["linked_by"] == "history"
            messages += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "And then?"}]


async def test_a_streamed_turn_is_found_by_its_id(deploy: Any) -> None:
    deployment = await deploy()
    headers = {"X-Session-ID": "streamed-by-id"}
    first = {"role": "user", "content": "By id. " + TEXT}
    async for client in client_of(deployment, "sk-messages-id"):
        await ask(client, True, messages=[first], extra_headers=headers)
        # The application keeps its own summary instead of the reply.
        messages: list[Any] = [first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        answer = await ask(client, True, messages=messages, extra_headers=headers)
        assert text_of(answer) == right(deployment, messages=messages)
        assert last_pull(deployment) > 100
        assert (await deployment.explain())[-1]["linked_by"] == "session_id"


async def test_another_tenants_streamed_turn_is_not_used(deploy: Any) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": "Tenants. " + TEXT}]
    async for client in client_of(deployment, "sk-messages-one"):
        first = await ask(client, True, messages=messages)
    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "And then?"}]
    async for client in client_of(deployment, "sk-messages-two"):
        second = await ask(client, True, messages=messages)
        assert text_of(second) == right(deployment, messages=messages)
        assert last_pull(deployment) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tool_use(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=AnswerStyle(calls_tool=True), piece_chars=5)
    messages: list[Any] = [{"role": "user", "content": f"Tools {stream}. " + TEXT}]
    async for client in client_of(deployment, f"sk-messages-tools-{stream}"):
        one = await ask(client, stream, messages=messages, tools=TOOLS, tool_choice={"type": "any"})
        assert one.stop_reason == "tool_use"
        (call,) = (block for block in one.content if block.type == "tool_use")
        assert call.input["unit"] == "celsius"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
        messages += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in one.content]},
            {"role": "user", "content": [result]},
        ]
        two = await ask(client, stream, messages=messages, tools=TOOLS)
        assert text_of(two) == right(deployment, messages=messages, tools=TOOLS)
        assert last_pull(deployment) > 100


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_thinking(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    style = AnswerStyle(reasoning="field")
    deployment.decode.default = Behaviour(style=style)
    messages: list[Any] = [{"role": "user", "content": f"Think {stream}. {TEXT}"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async for client in client_of(deployment, f"sk-messages-think-{stream}"):
        for turn in range(3):
            answer = await ask(client, stream, messages=messages, max_tokens=2000, thinking=thinking)
            assert [block.type for block in answer.content] == ["thinking", "text"]
            body = {"messages": messages, "max_tokens": 2000}
            assert text_of(answer) == right(deployment, style, **body)
            assert (last_pull(deployment) > 100) is (turn > 0)
            content = [block.model_dump() for block in answer.content]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]


async def test_media_are_never_linked(deploy: Any) -> None:
    deployment = await deploy()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    content = [{"type": "text", "text": TEXT}, image]
    body = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": content}]}
    for _ in range(2):
        headers = {"x-api-key": "sk-messages-media", "X-Session-ID": "media"}
        turn = await send(deployment, body, headers, path=PATH)
        assert turn.status == 200, turn.raw
        assert turn.attached == []
    assert (await deployment.explain())[-1]["link_fault"] == "media"


async def test_count_tokens_and_errors_are_the_clients(deploy: Any) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    async for client in client_of(deployment, "sk-messages-errors"):
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
        answer = await ask(client, False, messages=messages)
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await ask(client, False, messages=messages, model="huge")
        assert missing.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": missing.value.body["error"]["message"]},  # type: ignore[index]
        }
        with pytest.raises(anthropic.BadRequestError):
            await ask(client, False, messages=messages, max_tokens=0)
        deployment.prefill.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 422)))
        with pytest.raises(anthropic.UnprocessableEntityError) as refused:
            await ask(client, False, messages=messages)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("kind", [Kind.ERROR_EVENT, Kind.CLOSE, Kind.RESET, Kind.TRUNCATE, Kind.FINISH_ERROR])
async def test_a_stream_that_breaks_after_content_ends_with_one_error(deploy: Any, kind: Kind) -> None:
    deployment = await deploy(breaks=True)
    gate = Gate(2)
    behaviour = Behaviour(fault=Fault(kind, Point.AFTER_FIRST_CONTENT), gate=gate, errors_carry_params=True)
    deployment.decode.next(behaviour, times=None)

    def opened(raw: bytes) -> None:
        if b"content_block_start" in raw:
            gate.open()

    messages = [{"role": "user", "content": f"Break {kind}. {TEXT}"}]
    body = {"model": "tiny", "max_tokens": 99, "stream": True, "messages": messages}
    turn = await send(deployment, body, {"x-api-key": f"sk-break-{kind}"}, path=PATH, seen=opened)
    assert turn.raw.split(b"\n\n")[-2].startswith(b"event: error\n")
    last = turn.events[-1]
    assert last["type"] == "error"
    assert last["error"].keys() == {"type", "message"}
    assert sum(event["type"] == "error" for event in turn.events) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", EARLY_FAULTS, ids=lambda fault: f"{fault.kind}-{fault.at}")
async def test_what_fails_before_content_is_tried_again(deploy: Any, fault: Fault, role: str, stream: bool) -> None:
    deployment = await deploy(breaks=True)
    engine = deployment.prefill if role == "prefill" else deployment.decode
    engine.next(Behaviour(fault=fault))
    messages: list[Any] = [{"role": "user", "content": f"Again {fault.kind} {role} {stream}. {TEXT}"}]
    async for client in client_of(deployment, f"sk-again-{fault.kind}-{role}-{stream}"):
        answer = await ask(client, stream, messages=messages)
        assert text_of(answer) == right(deployment, messages=messages)
    assert (await deployment.explain())[-1]["attempts"] == 2
    deployment.fabric.clock.advance(31)


@pytest.mark.parametrize("place", ["first", "content", "finish", "extra", "none"])
async def test_no_handle_in_a_stream_is_shown(deploy: Any, place: Any) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(handle_on=place)
    messages: list[Any] = [{"role": "user", "content": f"Place {place}. " + TEXT}]
    for turn in range(2):
        body = {"model": "tiny", "max_tokens": 99, "stream": True, "messages": messages}
        found = await send(deployment, body, {"x-api-key": f"sk-messages-place-{place}"}, path=PATH)
        assert found.status == 200
        for word in (b"kv_transfer_params", b"remote_", b"pd_", deployment.decode.connector.engine_id.encode()):
            assert word not in found.raw, word
        text = "".join(event["delta"].get("text", "") for event in found.events if "delta" in event)
        assert text == deployment.right(body, api="messages").content
        # An event of its own comes before the end, too, and what is found anywhere is kept.
        assert (found.pulled > 100) is (turn > 0 and place in ("first", "finish", "extra"))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("cuts", [1, 7, 64, 1000])
async def test_a_stream_in_any_pieces_is_the_same(deploy: Any, cuts: int) -> None:
    deployment = await deploy()
    sent: list[bytes] = []
    deployment.decode.tap = sent.append
    deployment.decode.default = Behaviour(cuts=tuple(range(cuts, 20_000, cuts * 7)))
    messages = [{"role": "user", "content": f"Pieces {cuts}. {TEXT}"}]
    body = {"model": "tiny", "max_tokens": 99, "stream": True, "messages": messages}
    turn = await send(deployment, body, {"x-api-key": f"sk-pieces-{cuts}"}, path=PATH)
    (event,) = (event for event in sent if event.startswith(b"event: message_delta\n"))
    whole = json.loads(event.split(b"data: ")[1])
    assert whole.pop("kv_transfer_params")["remote_host"]
    sent[sent.index(event)] = b"event: message_delta\ndata: " + json.dumps(whole, ensure_ascii=False).encode() + b"\n\n"
    assert turn.raw == b"".join(sent)
    assert json.loads(sent[-1].split(b"data: ")[1])["type"] == "message_stop"
