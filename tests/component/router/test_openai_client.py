"""The official client, unchanged and without any id: streamed and not, tools included, reuse from turn 2 on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from support.chat import TEXT
from support.deployment import Deployment
from support.fake_engine import AnswerStyle, Behaviour, Fault, Gate, Kind, Point

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"kv": {"type": "string"}, "unit": {"type": "string"}}},
        },
    }
]


async def client_of(deployment: Deployment, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=deployment.router.url + "/v1", api_key=key, max_retries=0) as client:
        yield client


async def read_through(stream: Any, gate: Gate) -> None:
    """Read a stream to its end, opening ``gate`` at the first content."""
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            gate.open()


def last_pull(deployment: Deployment) -> int:
    return deployment.prefill.generates[-1].pulled_tokens or 0


def right(deployment: Deployment, messages: list[Any], **fields: Any) -> str:
    return deployment.right({"model": "tiny", "messages": messages, **fields}).content


async def test_chat(deploy: Any) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": TEXT}]
    async for client in client_of(deployment, "sk-openai-chat"):
        for turn in range(4):
            answer = await client.chat.completions.create(model="tiny", messages=messages)
            message = answer.choices[0].message
            assert message.content == right(deployment, messages)
            assert answer.usage is not None
            assert (last_pull(deployment) > 100) is (turn > 0)
            messages += [message, {"role": "user", "content": "And then?"}]
            messages[-2] = message.model_dump()


async def test_streamed_chat(deploy: Any) -> None:
    deployment = await deploy()
    messages: list[Any] = [{"role": "user", "content": "Streamed. " + TEXT}]
    async for client in client_of(deployment, "sk-openai-stream"):
        for turn in range(4):
            text = ""
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
            assert usage is not None
            assert text == right(deployment, messages)
            assert (last_pull(deployment) > 100) is (turn > 0)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("dump", [{}, {"exclude_unset": True}, {"exclude_none": True}], ids=str)
async def test_tool_calls(deploy: Any, dump: dict[str, Any]) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=AnswerStyle(calls_tool=True))
    messages: list[Any] = [{"role": "user", "content": f"Tools {dump}. {TEXT}"}]
    async for client in client_of(deployment, f"sk-openai-tools-{dump}"):
        one = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        calls = one.choices[0].message.tool_calls
        assert calls
        assert one.choices[0].finish_reason == "tool_calls"
        messages.append(one.choices[0].message.model_dump(**dump))
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "rain, 12 degrees"})
        two = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert two.choices[0].message.content == right(deployment, messages, tools=TOOLS)
        assert last_pull(deployment) > 100


async def test_streamed_tool_calls(deploy: Any) -> None:
    deployment = await deploy()
    deployment.decode.default = Behaviour(style=AnswerStyle(calls_tool=True), piece_chars=3)
    messages: list[Any] = [{"role": "user", "content": "Streamed tools. " + TEXT}]
    async for client in client_of(deployment, "sk-openai-stream-tools"):
        async with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls
        messages.append(final.choices[0].message.model_dump(exclude={"parsed"}))
        for call in messages[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "rain, 12 degrees"})
        two = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert two.choices[0].message.content == right(deployment, messages, tools=TOOLS)
        assert last_pull(deployment) > 100


async def test_completions_with_an_id_in_the_extra_body(deploy: Any) -> None:
    deployment = await deploy()
    prompt = "Completion. " + TEXT
    async for client in client_of(deployment, "sk-openai-completions"):
        for turn in range(3):
            answer = await client.completions.create(
                model="tiny", prompt=prompt, extra_body={"conversation_id": "story"}, max_tokens=60
            )
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 60}
            assert answer.choices[0].text == deployment.right(body).content
            assert (last_pull(deployment) > 100) is (turn > 0)
            prompt += answer.choices[0].text + " And then? "


async def test_errors_are_the_clients_exceptions(deploy: Any) -> None:
    deployment = await deploy()
    async for client in client_of(deployment, "sk-openai-errors"):
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="huge", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": 5}])  # type: ignore[list-item, misc]
        assert caught.value.param == "messages[0].content"
        gate = Gate(2)
        deployment.decode.next(Behaviour(fault=Fault(Kind.CLOSE, Point.AFTER_FIRST_CONTENT), gate=gate))
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": TEXT}], stream=True
        )
        with pytest.raises(openai.APIError):
            await read_through(stream, gate)
        assert [model.id async for model in client.models.list()] == ["tiny"]
