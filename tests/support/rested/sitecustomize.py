"""Makes a stock CPU engine rest where ours does, so that tests of vLLM's own connector end in minutes.

Python imports a module of this name at start when its folder is on PYTHONPATH. Only waiting is touched, by the same two
functions that our connector calls; which connector runs and what it does is not.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _RestAfterImport:
    """Import hook: calls two functions of `pd_connector.shell.cpu` once vLLM's shared memory module has been loaded."""

    waiting = {"vllm.distributed.device_communicators.shm_broadcast"}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.waiting.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_rest(module: ModuleType) -> None:
            load(module)
            from pd_connector.shell import cpu

            cpu.rest_between_steps()
            cpu.rest_between_polls()

        spec.loader.exec_module = load_and_rest  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _RestAfterImport())
