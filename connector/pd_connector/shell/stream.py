"""The handle in streamed answers, for vLLM versions whose API server drops it there.

The API server is another process than the engine core that makes the connector. vLLM imports the connector's module in
both: in the API server while it creates the engine's configuration, before it serves. So importing that module arms a
patch of the two stream generators, at once when their modules are loaded and on their import otherwise. Nothing on disk
changes.

Because a missing patch would only show as "no reuse", the processes that are armed leave their id in the environment,
which the engine core inherits: `observe` finds there whether its parent is one of them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from vllm.logger import init_logger

from pd_connector import compat
from pd_connector.core.chunk import with_handle
from pd_connector.core.startup import HandleInStream

logger = init_logger("vllm.pd_connector")

ARMED_PIDS: Final = "PD_CONNECTOR_ARMED_PIDS"
_MARK: Final = "_pd_connector_adds_handle"


class StreamPatchRefused(ImportError):
    """The API server's stream generators are not as expected; it must not start, or every streamed turn is a miss."""


def arm(version: tuple[int, int]) -> None:
    """Make this process's API server, if it has one, send the handle in streams. Repeating it changes nothing.

    Raises:
        StreamPatchRefused: when a module that is already loaded does not have the expected generator.
    """
    if compat.handle_in_stream(version):
        return
    for target in compat.STREAM_TARGETS:
        module = sys.modules.get(target.module)
        if module is not None:
            apply(module, target)
        else:
            _import_hook().wait_for(target)
    pids = {pid for pid in os.environ.get(ARMED_PIDS, "").split(",") if pid}
    os.environ[ARMED_PIDS] = ",".join(sorted(pids | {str(os.getpid())}))


def observe(version: tuple[int, int], environ: Mapping[str, str], *, started_elsewhere: bool) -> HandleInStream:
    """What streamed answers of this engine carry, seen from the engine core's process.

    Args:
        version: the installed vLLM.
        environ: this process's environment.
        started_elsewhere: another machine's process started this engine core, so its parent tells nothing.
    """
    if compat.handle_in_stream(version):
        return HandleInStream.NATIVE
    if multiprocessing.parent_process() is None:
        # The API server, if any, lives in this very process, which is armed: this module is loaded.
        return HandleInStream.PATCHED
    if started_elsewhere:
        return HandleInStream.UNKNOWN
    armed = str(os.getppid()) in environ.get(ARMED_PIDS, "").split(",")
    return HandleInStream.PATCHED if armed else HandleInStream.MISSING


def apply(module: ModuleType, target: compat.StreamTarget) -> None:
    """Wrap one generator of a loaded module.

    Raises:
        StreamPatchRefused: when it is not there or does not take the expected argument.
    """
    owner = getattr(module, target.owner, None)
    method = getattr(owner, target.method, None)
    if method is None:
        raise StreamPatchRefused(f"{target.module} has no {target.owner}.{target.method}: this vLLM is not as expected")
    if getattr(method, _MARK, False):
        return
    signature = inspect.signature(method)
    if target.source not in signature.parameters or not inspect.isasyncgenfunction(method):
        raise StreamPatchRefused(
            f"{target.owner}.{target.method} takes no {target.source}: this vLLM is not as expected"
        )
    setattr(owner, target.method, _wrapped(method, signature, target.source))
    logger.info("%s.%s now sends the KV handle in streams", target.owner, target.method)


class _Tap:
    """Passes the engine's outputs through and remembers the newest one's handle."""

    def __init__(self, outputs: AsyncIterator[Any]) -> None:
        self._outputs = outputs
        self.handle: Mapping[str, Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._pass()

    async def _pass(self) -> AsyncIterator[Any]:
        async for item in self._outputs:
            # Completions yield (prompt number, output), chats yield the output.
            output = item[1] if isinstance(item, tuple) else item
            self.handle = getattr(output, "kv_transfer_params", None)
            yield item


def _wrapped(method: Callable[..., Any], signature: inspect.Signature, source: str) -> Callable[..., Any]:
    @functools.wraps(method)
    async def with_handles(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        bound = signature.bind(*args, **kwargs)
        tap = _Tap(bound.arguments[source])
        bound.arguments[source] = tap
        seen, sent = False, False
        async for chunk in method(*bound.args, **bound.kwargs):
            if tap.handle:
                seen = True
                edited = with_handle(chunk, tap.handle)
                if edited is not None:
                    sent = True
                    yield edited
                    continue
            yield chunk
        if seen and not sent:
            logger.error("A streamed answer ended without the KV handle that the engine gave: no chunk took it")

    setattr(with_handles, _MARK, True)
    return with_handles


class _PatchOnImport:
    """Import hook that patches the modules it waits for right after they are loaded."""

    def __init__(self) -> None:
        self._waiting: dict[str, compat.StreamTarget] = {}

    def wait_for(self, target: compat.StreamTarget) -> None:
        self._waiting[target.module] = target

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        wanted = self._waiting.pop(name, None)
        if wanted is None:
            return None
        spec: ModuleSpec | None = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_patch(module: ModuleType) -> None:
            execute(module)
            apply(module, wanted)

        spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]
        return spec


def _import_hook() -> _PatchOnImport:
    """This process's hook, installed on first use."""
    for finder in sys.meta_path:
        if isinstance(finder, _PatchOnImport):
            return finder
    hook = _PatchOnImport()
    sys.meta_path.insert(0, hook)
    return hook
