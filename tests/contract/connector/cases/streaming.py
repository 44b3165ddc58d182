"""The patch that puts the handle into streamed answers: where it applies, and that it is loud where it can't."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HANDLE = {"remote_block_ids": [[1, 2]], "do_remote_decode": True}
TEXT = 'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
FINISH = 'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"total_tokens":4}}\n\n'
DONE = "data: [DONE]\n\n"


def case_the_real_completion_stream_carries_the_handle(lab: Any) -> None:
    chunks = _completion_chunks(patched=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]] == ["a", "日", "b"]
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None, None, HANDLE, None]
    assert chunks[2]["choices"][0]["finish_reason"] == "length"


def case_the_real_chat_stream_carries_the_handle(lab: Any) -> None:
    from pd_connector import compat

    if compat.handle_in_stream(compat.parse_version(lab.version)):
        # vLLM's own since 0.33: `starting` reads it in the source; the generator needs a whole server there.
        return
    chunks = _chat_chunks()
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None, None, None, HANDLE, None]
    assert chunks[3]["choices"][0]["finish_reason"] == "length"


def case_stock_streams_carry_none_below_0_33(lab: Any) -> None:
    from pd_connector import compat

    found = [chunk.get("kv_transfer_params") for chunk in _completion_chunks(patched=False)]
    native = compat.handle_in_stream(compat.parse_version(lab.version))
    assert found == [None, None, HANDLE if native else None, None]


def case_the_real_message_stream_carries_the_handle(lab: Any) -> None:
    from pd_connector import compat

    if compat.handle_in_stream(compat.parse_version(lab.version)):
        chunks = _chat_objects(TURN)
    else:
        # From the engine's outputs through both patched generators, as the API server chains them.
        chunks = _real_chat_stream()
    events = _message_events(chunks)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "a日b"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert [event.get("kv_transfer_params") for event in events] == [*[None] * 6, HANDLE, None]


def case_a_message_of_any_blocks_carries_the_handle(lab: Any) -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas = [
        {"reasoning": "hm"},
        {"content": '"kv_transfer_params":{"remote_host":"evil"}'},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"kv_transfer_params":{}}'}}]},
    ]
    events = _message_events(_chat_stream(lab, deltas, "tool_calls"))
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert [event["type"] for event in events if "kv_transfer_params" in event] == ["message_delta"]
    assert events[-2]["kv_transfer_params"] == HANDLE
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def case_a_message_without_a_handle_is_as_vllm_makes_it(lab: Any) -> None:
    plain = _message_events(_chat_stream(lab, [{"content": "a"}], "stop", handle=None), patched=False)
    assert _message_events(_chat_stream(lab, [{"content": "a"}], "stop", handle=None)) == plain
    # The next message is not given the handle of the one before.
    with_handle = _message_events(_chat_stream(lab, [{"content": "a"}], "stop"))
    assert [{**event, "kv_transfer_params": None} for event in with_handle] == [
        {**event, "kv_transfer_params": None} for event in plain
    ]
    assert _message_events(_chat_stream(lab, [{"content": "a"}], "stop", handle=None)) == plain


def case_stock_messages_carry_none(lab: Any) -> None:
    events = _message_events(_chat_stream(lab, [{"content": "a"}], "stop"), patched=False)
    assert not any("kv_transfer_params" in event for event in events), "the patch of messages may go"


def case_the_real_message_usage_tells_what_was_reused(lab: Any) -> None:
    """At its end; the first event has the whole prompt, since vLLM does not know more then."""
    events = _message_events(_chat_stream(lab, [{"content": "a"}], "stop"))
    assert events[0]["message"]["usage"] == {"input_tokens": 9, "output_tokens": 0}
    assert events[-2]["usage"] == {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 6}


def case_the_finish_chunk_carries_the_handle(lab: Any) -> None:
    for pack in (lambda output: output, lambda output: (0, output)):
        outputs = [SimpleNamespace(kv_transfer_params=None), SimpleNamespace(kv_transfer_params=HANDLE)]
        chunks = _relay(_server(), [pack(output) for output in outputs])
        assert chunks == [
            TEXT,
            FINISH[:-3] + ',"kv_transfer_params":{"remote_block_ids":[[1,2]],"do_remote_decode":true}}\n\n',
            USAGE,
            DONE,
        ]


def case_without_a_handle_nothing_changes(lab: Any) -> None:
    outputs = [SimpleNamespace(kv_transfer_params=None), SimpleNamespace(kv_transfer_params=None)]
    assert _relay(_server(), outputs) == [TEXT, FINISH, USAGE, DONE]


def case_wrapping_twice_is_wrapping_once(lab: Any) -> None:
    from pd_connector.shell import stream

    server = _server()
    once = server.Server.relay
    stream.apply(server, _target())
    assert server.Server.relay is once


def case_a_generator_that_moved_stops_the_server(lab: Any) -> None:
    from pd_connector.shell import stream

    async def other(self: Any, outputs: Any) -> AsyncIterator[str]:
        yield DONE

    def plain(self: Any, result_generator: Any) -> None: ...

    for attributes in ({}, {"relay": other}, {"relay": plain}):
        module = ModuleType("pd_case_server")
        module.Server = type("Server", (), dict(attributes))  # type: ignore[attr-defined]
        refusal = ""
        try:
            stream.apply(module, _target())
        except stream.StreamPatchRefused as error:
            refusal = str(error)
        assert "not as expected" in refusal, attributes


def case_arming_patches_modules_when_they_are_imported(lab: Any) -> None:
    from pd_connector import compat
    from pd_connector.shell import stream

    version = compat.parse_version(lab.version)
    code = "class Server:\n    async def relay(self, result_generator):\n        yield 'data: [DONE]\\n\\n'\n"
    real_targets, real_finders, real_path = compat.STREAM_TARGETS, list(sys.meta_path), list(sys.path)
    compat.STREAM_TARGETS = (_target(),)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "pd_case_server.py").write_text(code)
            sys.path.insert(0, folder)
            stream.arm(version)
            stream.arm(version)
            # Looking for the module, as the self-test does, is no import of it.
            assert importlib.util.find_spec("pd_case_server") is not None
            module = __import__("pd_case_server")
            patched = hasattr(module.Server.relay, "_pd_connector_adds_handle")
            assert patched is not compat.handle_in_stream(version)
            # What makes messages of chats is patched in every version, also where it is loaded before.
            compat.STREAM_TARGETS = (dataclasses.replace(_target(), converts_chat=True),)
            stream.arm(version)
            assert hasattr(module.Server.relay, "_pd_connector_adds_handle")
    finally:
        compat.STREAM_TARGETS, sys.meta_path[:], sys.path[:] = real_targets, real_finders, real_path
        sys.modules.pop("pd_case_server", None)


def _target() -> Any:
    from pd_connector.compat import StreamTarget

    return StreamTarget("pd_case_server", "Server", "relay", "result_generator")


def _server() -> Any:
    """A module like the API server's, patched."""
    from pd_connector.shell import stream

    class Server:
        async def relay(self, request: object, result_generator: Any, *, name: str) -> AsyncIterator[str]:
            assert name == "tiny"
            async for item in result_generator:
                output = item[1] if isinstance(item, tuple) else item
                yield FINISH if output is last_of(request) else TEXT
            yield USAGE
            yield DONE

    module = ModuleType("pd_case_server")
    module.Server = Server  # type: ignore[attr-defined]
    stream.apply(module, _target())
    return module


def last_of(request: Any) -> Any:
    """The output with which the made-up request ends."""
    item = request[-1]
    return item[1] if isinstance(item, tuple) else item


def _relay(module: Any, outputs: list[Any]) -> list[str]:
    async def source() -> AsyncIterator[Any]:
        for output in outputs:
            yield output

    async def collect() -> list[str]:
        return [chunk async for chunk in module.Server().relay(outputs, source(), name="tiny")]

    return asyncio.run(collect())


class _Server:
    """What the generators ask of the server object besides the method itself: every option is off."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def _raise_if_error(self, *args: Any) -> None: ...

    def _extract_prompt_text(self, *args: Any) -> str:
        return "prompt"

    def get_chat_request_role(self, request: Any) -> str:
        return "assistant"

    def create_streaming_error_response(self, error: Exception) -> str:
        raise error


def _completion_chunks(*, patched: bool) -> list[dict[str, Any]]:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    import pd_connector.connector

    assert pd_connector.connector
    relay = OpenAIServingCompletion.completion_stream_generator
    if not patched:
        relay = getattr(relay, "__wrapped__", relay)
    options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    request = CompletionRequest(model="tiny", prompt="p", **options)
    source = _engine_outputs(lambda output: (0, output))
    metadata = SimpleNamespace()
    return _parsed(relay(_Server(), request, [None], source, "id", 1, "tiny", 1, None, metadata))


def _chat_chunks() -> list[dict[str, Any]]:
    return _parsed(_real_chat_stream())


def _real_chat_stream() -> AsyncIterator[str]:
    """What the installed generator makes of three engine outputs, below 0.33."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    import pd_connector.connector

    assert pd_connector.connector
    relay = OpenAIServingChat.chat_completion_stream_generator
    options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    request = ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "p"}], **options)
    source = _engine_outputs(lambda output: output)
    made: AsyncIterator[str] = relay(_Server(), request, source, "id", "tiny", [], None, SimpleNamespace())
    return made


TURN = [
    {"index": 0, "delta": {"content": "a"}},
    {"index": 0, "delta": {"content": "日"}},
    {"index": 0, "delta": {"content": "b"}, "finish_reason": "length"},
]


def _chat_stream(
    lab: Any, deltas: list[dict[str, Any]], reason: str, handle: dict[str, Any] | None = HANDLE
) -> AsyncIterator[Any]:
    """A chat as the message converter of this release gets it: chunks as text, or from 0.33 on as objects."""
    from pd_connector import compat

    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in deltas]
    choices.append({"index": 0, "delta": {"content": ""}, "finish_reason": reason})
    if compat.handle_in_stream(compat.parse_version(lab.version)):
        return _chat_objects(choices, handle)
    return _chat_text(choices, handle)


def _chat_chunks_of(choices: list[dict[str, Any]], handle: dict[str, Any] | None) -> list[dict[str, Any]]:
    head = {"id": "id", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    count = {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}
    chunks = [{**head, "choices": [choice], "usage": count} for choice in (first, *choices)]
    if handle is not None:
        chunks[-1]["kv_transfer_params"] = handle
    end = {**count, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 6}}
    return [*chunks, {**head, "choices": [], "usage": end}]


async def _chat_objects(choices: list[dict[str, Any]], handle: dict[str, Any] | None = HANDLE) -> AsyncIterator[Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

    for chunk in _chat_chunks_of(choices, handle):
        yield ChatCompletionStreamResponse.model_validate(chunk)


async def _chat_text(choices: list[dict[str, Any]], handle: dict[str, Any] | None) -> AsyncIterator[str]:
    for chunk in _chat_chunks_of(choices, handle):
        yield f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"
    yield DONE


def _message_events(chunks: AsyncIterator[Any], *, patched: bool = True) -> list[dict[str, Any]]:
    """What the real converter makes of a chat."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    import pd_connector.connector

    assert pd_connector.connector
    convert = AnthropicServingMessages.message_stream_converter
    if not patched:
        convert = convert.__wrapped__
    server = _Server(stop_reason_map={"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"})

    async def collect() -> list[str]:
        return [event async for event in convert(server, chunks)]

    found = []
    for event in asyncio.run(collect()):
        name, data = event.removesuffix("\n\n").split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def _engine_outputs(pack: Any) -> AsyncIterator[Any]:
    from vllm.outputs import CompletionOutput, RequestOutput

    for text, reason, handle in (("a", None, None), ("日", None, None), ("b", "length", HANDLE)):
        piece = CompletionOutput(0, text, [5], None, None, finish_reason=reason, stop_reason=None)
        ended = reason is not None
        yield pack(RequestOutput("id", "p", [1, 2, 3], None, [piece], ended, kv_transfer_params=handle))


def _parsed(stream: AsyncIterator[str]) -> list[dict[str, Any]]:
    async def collect() -> list[str]:
        return [event async for event in stream]

    events = asyncio.run(collect())
    assert events[-1] == DONE
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
