"""The patch that puts the handle into streamed answers: where it applies, and that it is loud where it can't."""

from __future__ import annotations

import asyncio
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
