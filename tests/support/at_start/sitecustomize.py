"""Changes real engines for tests, in each of their processes: how they wait, and how a race between them goes.

Python imports a module of this name at start when its folder is on PYTHONPATH. Which connector runs and what it does is
not touched but for what the environment asks for:

* `PD_TEST_REST`: a stock CPU engine rests where ours does, by the same functions, so that tests of vLLM's own connector
  end in minutes;
* `PD_TEST_RACE`: a folder whose files a test writes while the engines run. `delay`: seconds; a read of unpinned blocks
  begins after a random part of it, so that the holder can overwrite them after the first check. `unchecked`: no check
  after the read, the control without which a race test proves nothing. `pinned`: a turn that ends is retained in vLLM's
  own way.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

RACE = Path(os.environ.get("PD_TEST_RACE", ""))


def _is_set(name: str) -> bool:
    return (RACE / name).exists()


def _rest(_: ModuleType) -> None:
    from pd_connector.shell import cpu

    cpu.rest_between_steps()
    cpu.rest_between_polls()


def _delay_reads(module: ModuleType) -> None:
    worker = module.PDPullWorker
    read = worker._read_blocks_for_req

    def delayed(self: Any, req_id: str, meta: Any) -> None:
        races = getattr(meta, "pd_check", None) is not None or getattr(meta, "pd_race", False)
        if not races or getattr(meta, "pd_delayed", False) or not _is_set("delay"):
            read(self, req_id, meta)
            return
        meta.pd_delayed = True
        wait = random.random() * float((RACE / "delay").read_text())
        threading.Timer(wait, lambda: self._ready_requests.put((req_id, meta))).start()

    worker._read_blocks_for_req = delayed


def _leave_out_the_check(module: ModuleType) -> None:
    attach = module.UnpinnedReading.attach

    def maybe(self: Any, reads: dict[str, Any], ledger: Any) -> None:
        if not _is_set("unchecked"):
            attach(self, reads, ledger)
            return
        for meta in reads.values():
            meta.pd_race = True

    module.UnpinnedReading.attach = maybe


def _retain_as_vllm_does(module: ModuleType) -> None:
    finished = module.PDPullScheduler.request_finished

    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        kept = self._retention
        if _is_set("pinned"):
            self._retention = None
        try:
            return finished(self, request, block_ids)
        finally:
            self._retention = kept

    module.PDPullScheduler.request_finished = request_finished


class _AfterImport:
    """Import hook: changes a module right after it was loaded."""

    waiting: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self.waiting.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if "PD_TEST_REST" in os.environ:
    _AfterImport.waiting["vllm.distributed.device_communicators.shm_broadcast"] = _rest
if "PD_TEST_RACE" in os.environ:
    _AfterImport.waiting |= {
        "pd_connector.shell.worker": _delay_reads,
        "pd_connector.shell.reading": _leave_out_the_check,
        "pd_connector.shell.scheduler": _retain_as_vllm_does,
    }
sys.meta_path.insert(0, _AfterImport())
