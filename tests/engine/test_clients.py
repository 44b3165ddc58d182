"""The official clients, `openai` and `anthropic`, unchanged, against a real pair.

Reuse from turn 2 on, with and without an id, and nothing of a handle in what it receives.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from support.engine_pair import Answer, Message, Pair, Pairs, parts_at_a_tie, tiny_deployment, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

WORDS = 400
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 12}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]
FORCED = {"type": "function", "function": {"name": "weather"}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(pairs: Pairs) -> Pair:
    """One pair for all clients."""
    return await pairs.use(tiny_deployment(), "verified")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(pair: Pair) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client with nothing but a base URL and a key."""
    made = openai.AsyncOpenAI(base_url=f"{pair.deployment.urls.router}/v1", api_key="tenant-a", max_retries=0)
    yield made
    await made.close()


async def say(client: openai.AsyncOpenAI, messages: list[Any], stream: bool, **more: Any) -> tuple[Any, str, str]:
    """One turn. Returns the assistant message as an application keeps it, the request id, and all that came."""
    arguments: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, **more}
    if not stream:
        raw = await client.chat.completions.with_raw_response.create(**arguments)
        return raw.parse().choices[0].message, raw.headers["x-request-id"], raw.text
    raw = await client.chat.completions.with_raw_response.create(stream=True, **arguments)
    kept: dict[str, Any] = {"role": "assistant", "content": ""}
    seen: list[str] = []
    async for chunk in raw.parse():
        seen.append(json.dumps(chunk.model_dump()))
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        kept["content"] += delta.content or ""
        for call in delta.tool_calls or []:
            calls = kept.setdefault("tool_calls", [])
            if call.index >= len(calls):
                calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
            calls[call.index]["function"]["name"] += (call.function and call.function.name) or ""
            calls[call.index]["function"]["arguments"] += (call.function and call.function.arguments) or ""
    return kept, raw.headers["x-request-id"], "".join(seen)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_several_turns_without_an_id(pair: Pair, client: openai.AsyncOpenAI, stream: bool) -> None:
    messages: list[Any] = [user(pair.text(WORDS))]
    for turn in range(4):
        message, request_id, seen = await say(client, messages, stream)
        decision = await pair.decision(request_id)
        assert "kv_transfer_params" not in seen
        assert "remote_engine_id" not in seen
        if turn:
            assert decision.get("pulled_tokens", 0) > 0, decision
            assert decision["linked_by"] == "history"
        messages += [message, user(pair.text(40))]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_tool_calls(pair: Pair, client: openai.AsyncOpenAI, stream: bool) -> None:
    messages: list[Any] = [user(pair.text(WORDS))]
    message, _, _ = await say(client, messages, stream, tools=TOOLS, tool_choice=FORCED, max_tokens=60)
    calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
    call = calls[0] if isinstance(calls[0], dict) else calls[0].model_dump()
    assert call["function"]["name"] == "weather"
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": pair.text(20)}, user(pair.text(30))]
    for _ in range(2):
        message, request_id, seen = await say(client, messages, stream, tools=TOOLS)
        decision = await pair.decision(request_id)
        assert decision.get("pulled_tokens", 0) > 0, decision
        assert "remote_engine_id" not in seen
        messages += [message, user(pair.text(40))]


@pytest.mark.parametrize("choice", ["auto", "required", "none", FORCED], ids=["auto", "required", "none", "named"])
async def test_a_tool_choice_leaves_prefill_and_decode_with_one_prompt(
    pair: Pair, client: openai.AsyncOpenAI, choice: Any
) -> None:
    messages: list[Any] = [user(pair.text(200))]
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=0
    )
    decision = await pair.decision(raw.headers["x-request-id"])
    usage = raw.parse().usage
    assert usage is not None
    assert decision["prompt_tokens"] == usage.prompt_tokens


async def test_structured_output(pair: Pair, client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[user(pair.text(200))],
        max_tokens=40,
        response_format=wanted,  # type: ignore[arg-type]
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


IDS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {"extra_body": {name: "conv-" + name}})
        for name in ("conversation_id", "session_id", "previous_response_id")
    ),
    ("prompt_cache_key", {"prompt_cache_key": "conv-key"}),
    ("X-Session-ID", {"extra_headers": {"X-Session-ID": "conv-session-header"}}),
    ("X-Conversation-ID", {"extra_headers": {"X-Conversation-ID": "conv-conversation-header"}}),
]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", [how for _, how in IDS], ids=[name for name, _ in IDS])
async def test_each_name_of_an_id_links_turns_whose_history_does_not(
    pair: Pair, client: openai.AsyncOpenAI, how: dict[str, Any], stream: bool
) -> None:
    how = json.loads(json.dumps(how).replace('"conv-', f'"{stream}-conv-'))
    first: Message = user(pair.text(WORDS))
    await say(client, [first], stream, **how)
    # The application keeps its own summary instead of the reply, so only the id leads to the handle.
    messages = [first, {"role": "assistant", "content": pair.text(10)}, user(pair.text(40))]
    _, request_id, _ = await say(client, messages, stream, **how)
    decision = await pair.decision(request_id)
    assert decision["attached"], decision
    assert decision["linked_by"] != "history"
    assert decision.get("pulled_tokens", 0) > 0, decision


async def test_what_a_client_sends_as_kv_parameters_reaches_no_engine(pair: Pair, client: openai.AsyncOpenAI) -> None:
    evil = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_host": "127.0.0.9",
        "remote_port": 9,
        "remote_engine_id": "evil",
        "remote_request_id": "evil",
        "remote_block_ids": [[1]],
        "remote_num_tokens": 128,
    }
    messages: list[Any] = [user(pair.text(200))]
    extra = {"kv_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": "evil"}}
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, max_tokens=4, extra_body=extra
    )
    assert raw.http_response.status_code == 200
    for role in ("prefill", "decode"):
        assert "127.0.0.9" not in pair.deployment.log(role).read_text(errors="replace")


async def test_completions_link_by_id(pair: Pair, client: openai.AsyncOpenAI) -> None:
    prompt = pair.text(WORDS)
    how = {"extra_body": {"conversation_id": "completion"}}
    first = await client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, **how)  # type: ignore[call-overload]
    longer = prompt + first.choices[0].text + " " + pair.text(40)
    raw = await client.completions.with_raw_response.create(model="tiny", prompt=longer, max_tokens=8, **how)  # type: ignore[call-overload]
    decision = await pair.decision(raw.headers["x-request-id"])
    assert decision.get("pulled_tokens", 0) > 0, decision


async def respond(client: openai.AsyncOpenAI, stream: bool, **arguments: Any) -> tuple[Any, str, str]:
    """One response: the object, the request id, and all that came."""
    how: dict[str, Any] = {"model": "tiny", "max_output_tokens": 24, "temperature": 0, **arguments}
    if not stream:
        raw = await client.responses.with_raw_response.create(**how)
        return raw.parse(), raw.headers["x-request-id"], raw.text
    raw = await client.responses.with_raw_response.create(stream=True, **how)
    final, seen = None, []
    async for event in raw.parse():
        seen.append(json.dumps(event.model_dump(mode="json", warnings=False)))
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert final is not None
    return final, raw.headers["x-request-id"], "".join(seen)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("chained", [False, True], ids=["items", "chained"])
async def test_responses(pair: Pair, client: openai.AsyncOpenAI, chained: bool, stream: bool) -> None:
    items: list[Any] = [user(pair.text(WORDS))]
    named: dict[str, Any] = {}
    for turn in range(3):
        given = items[-1]["content"] if chained else items
        answer, request_id, seen = await respond(client, stream, input=given, **named)
        decision = await pair.decision(request_id)
        assert "kv_transfer_params" not in seen
        assert "remote_engine_id" not in seen
        assert answer.usage.input_tokens == decision["prompt_tokens"]
        assert answer.usage.input_tokens_details.cached_tokens == decision["cached_tokens"]
        if turn:
            assert decision.get("pulled_tokens", 0) > 0, decision
            assert decision["linked_by"] == "history"
            assert decision["cached_tokens"] >= decision["pulled_tokens"]
        said = [item.model_dump(mode="json", warnings=False) for item in answer.output]
        assert answer.output_text
        items += [*said, user(pair.text(40))]
        named = {"previous_response_id": answer.id} if chained else {}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def claude(pair: Pair) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client with nothing but a base URL and a key."""
    made = anthropic.AsyncAnthropic(base_url=pair.deployment.urls.router, api_key="tenant-a", max_retries=0)
    yield made
    await made.close()


async def test_messages(pair: Pair, claude: anthropic.AsyncAnthropic) -> None:
    messages: list[Any] = [user(pair.text(WORDS))]
    for turn in range(4):
        raw = await claude.messages.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=24, extra_body={"temperature": 0}
        )
        answer, decision = await raw.parse(), await pair.decision(raw.headers["x-request-id"])
        seen = await raw.text()
        assert "kv_transfer_params" not in seen
        assert "remote_engine_id" not in seen
        usage = answer.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == decision["prompt_tokens"]
        assert (usage.cache_read_input_tokens or 0) == decision["cached_tokens"]
        if turn:
            assert decision.get("pulled_tokens", 0) > 0, decision
            assert decision["linked_by"] == "history"
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": content}, user(pair.text(40))]


@pytest.mark.parametrize("streams", [(True, True, True), (False, True, False)], ids=["streamed", "mixed"])
async def test_streamed_messages(pair: Pair, claude: anthropic.AsyncAnthropic, streams: tuple[bool, ...]) -> None:
    messages: list[Any] = [user(pair.text(WORDS))]
    marked = {"cache_control": {"type": "ephemeral"}}
    system: list[Any] = [{"type": "text", "text": pair.text(20), **marked}]
    for turn, stream in enumerate(streams):
        how: dict[str, Any] = {"messages": messages, "system": system, "extra_body": {"temperature": 0}}
        answer, request_id = await converse(claude, stream, **how)
        decision = await pair.decision(request_id)
        assert decision.get("stored") == "stored", decision
        if turn:
            assert decision.get("pulled_tokens", 0) > 0, decision
            assert decision["linked_by"] == "history"
        usage = answer.usage
        assert (usage.cache_read_input_tokens or 0) == decision["cached_tokens"] >= decision.get("pulled_tokens", 0)
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == decision["prompt_tokens"]
        counted = await claude.messages.count_tokens(model="tiny", messages=messages, system=system)
        assert counted.input_tokens == decision["prompt_tokens"]
        assert answer.stop_reason in ("max_tokens", "end_turn")
        text = "".join(block.text for block in answer.content if block.type == "text")
        messages += [{"role": "assistant", "content": text}, user(pair.text(40))]


async def converse(claude: anthropic.AsyncAnthropic, stream: bool, **fields: Any) -> tuple[Any, str]:
    """One message as an application gets it, and its request id."""
    how: dict[str, Any] = {"model": "tiny", "max_tokens": 24, **fields}
    if not stream:
        raw = await claude.messages.with_raw_response.create(**how)
        return await raw.parse(), raw.headers["x-request-id"]
    async with claude.messages.stream(**how) as streaming:
        return await streaming.get_final_message(), streaming.response.headers["x-request-id"]


async def test_tool_use_in_streamed_messages(pair: Pair, claude: anthropic.AsyncAnthropic) -> None:
    function = TOOLS[0]["function"]
    # Without `strict` vLLM lets the forced input be any JSON, and this model's is seldom an object.
    tools = [{"name": function["name"], "input_schema": function["parameters"], "strict": True}]
    messages: list[Any] = [user(pair.text(WORDS))]
    how: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60}
    answer, _ = await converse(claude, True, messages=messages, **how)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": pair.text(20)}
    content = [block.model_dump(exclude_none=True) for block in answer.content]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    for _ in range(2):
        answer, request_id = await converse(claude, True, messages=messages, tools=tools)
        decision = await pair.decision(request_id)
        assert decision.get("pulled_tokens", 0) > 0, decision
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": content}, user(pair.text(40))]


async def test_the_bytes_of_streamed_messages_and_their_answers(pair: Pair) -> None:
    """Plain HTTP: nothing of a handle among them, and what was read back answers as what was computed."""
    messages: list[Any] = [user(pair.text(WORDS))]
    for turn in range(3):
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
        url, headers = f"{pair.deployment.urls.router}/v1/messages", {"x-api-key": "tenant-a"}
        async with pair.session.post(url, json=body, headers=headers) as response:
            seen = (await response.read()).decode()
            assert response.status == 200, seen
            decision = await pair.decision(response.headers["x-request-id"])
        for word in ("kv_transfer_params", "remote_", "pd_proof", "pd_mode", "127.0.0.1"):
            assert word not in seen, word
        names = [line.removeprefix("event: ") for line in seen.splitlines() if line.startswith("event: ")]
        assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
        events = [json.loads(line.removeprefix("data: ")) for line in seen.splitlines() if line.startswith("data: ")]
        assert [event["type"] for event in events] == names
        assert (decision.get("pulled_tokens", 0) > 0) is (turn > 0), decision
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        await pair.assert_text_equals_recompute(text, messages, max_tokens=12)
        messages += [{"role": "assistant", "content": text}, user(pair.text(40))]


async def test_a_text_that_parts_elsewhere_than_at_a_tie_is_noticed() -> None:
    fresh = Answer({}, [-1.0, -2.0], [" a", " b"], {}, [{" a": -1.0, " x": -1.05}, {" b": -2.0, " y": -2.3}])
    assert [parts_at_a_tie(text, fresh) for text in (" a b", " x q", " x", " a y", " a z", " a", " a b c")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
