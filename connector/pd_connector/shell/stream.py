"""The handle in streamed answers where vLLM's API server drops it: in all below 0.33, and in messages of every version.

The API server is another process than the engine core that makes the connector. vLLM imports the connector's module in
both: in the API server while it creates the engine's configuration, before it serves. So importing that module arms a
patch of the stream generators, at once when their modules are loaded and on their import otherwise. Nothing on disk
changes. A streamed message is made from a chat's chunks, in which the handle is by then; it is carried over from there.

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
from pd_connector.core.chunk import handle_of, message_with_handle, with_handle
from pd_connector.core.startup import HandleInStream
from pd_wire import names

logger = init_logger("vllm.pd_connector")

ARMED_PIDS: Final = "PD_CONNECTOR_ARMED_PIDS"
_MARK: Final = "_pd_connector_adds_handle"
_Read = Callable[[Any, Any], Any]
"""Takes an item and the handle so far, gives the handle."""


class StreamPatchRefused(ImportError):
    """The API server's stream generators are not as expected; it must not start, or every streamed turn is a miss."""


def arm(version: tuple[int, int]) -> None:
    """Make this process's API server, if it has one, send the handle in streams. Repeating it changes nothing.

    Raises:
        StreamPatchRefused: when a module that is already loaded does not have the expected generator.
    """
    for target in compat.stream_targets(version):
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
    native = compat.handle_in_stream(version)
    if multiprocessing.parent_process() is None:
        # The API server, if any, lives in this very process, which is armed: this module is loaded.
        return HandleInStream.NATIVE if native else HandleInStream.PATCHED
    if started_elsewhere:
        return HandleInStream.NATIVE if native else HandleInStream.UNKNOWN
    armed = str(os.getppid()) in environ.get(ARMED_PIDS, "").split(",")
    if native:
        return HandleInStream.NATIVE if armed else HandleInStream.NOT_IN_MESSAGES
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
    setattr(owner, target.method, _wrapped(method, signature, target))
    logger.info("%s.%s now sends the KV handle in streams", target.owner, target.method)


class _Tap:
    """Passes a generator's items through and remembers the handle that they brought."""

    def __init__(self, items: AsyncIterator[Any], read: _Read) -> None:
        self._items = items
        self._read = read
        self.handle: Mapping[str, Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._pass()

    async def _pass(self) -> AsyncIterator[Any]:
        async for item in self._items:
            self.handle = self._read(item, self.handle)
            yield item


def _newest(item: Any, _before: Any) -> Any:
    """Of the engine's newest output."""
    # Completions yield (prompt number, output), chats yield the output.
    output = item[1] if isinstance(item, tuple) else item
    return getattr(output, names.KV_PARAMS, None)


def _carried(item: Any, before: Any) -> Any:
    """Of a chat's chunks: only one has it, and others follow. They are text up to 0.32 and objects from there on."""
    found = handle_of(item) if isinstance(item, str) else getattr(item, names.KV_PARAMS, None)
    return found or before


def _wrapped(
    method: Callable[..., Any], signature: inspect.Signature, target: compat.StreamTarget
) -> Callable[..., Any]:
    read, edit = (_carried, message_with_handle) if target.converts_chat else (_newest, with_handle)

    @functools.wraps(method)
    async def with_handles(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        bound = signature.bind(*args, **kwargs)
        tap = _Tap(bound.arguments[target.source], read)
        bound.arguments[target.source] = tap
        seen, sent = False, False
        async for chunk in method(*bound.args, **bound.kwargs):
            if tap.handle:
                seen = True
                edited = edit(chunk, tap.handle)
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
        # Out while the other finders are asked, or they would come back here; in again, since a look is no import.
        wanted = self._waiting.pop(name, None)
        if wanted is None:
            return None
        try:
            spec: ModuleSpec | None = importlib.util.find_spec(name)
        finally:
            self._waiting[name] = wanted
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_patch(module: ModuleType) -> None:
            execute(module)
            apply(module, wanted)
            self._waiting.pop(name, None)

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
