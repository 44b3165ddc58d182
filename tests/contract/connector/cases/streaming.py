"""The patch that puts the handle into streamed answers: where it applies, and that it is loud where it can't."""

from __future__ import annotations

import asyncio
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
            module = __import__("pd_case_server")
            patched = hasattr(module.Server.relay, "_pd_connector_adds_handle")
            assert patched is not compat.handle_in_stream(version)
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
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    import pd_connector.connector

    assert pd_connector.connector
    relay = OpenAIServingChat.chat_completion_stream_generator
    options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    request = ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "p"}], **options)
    source = _engine_outputs(lambda output: output)
    return _parsed(relay(_Server(), request, source, "id", "tiny", [], None, SimpleNamespace()))


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
