"""Runs the connector's contract cases against one vLLM release, in a process of its own.

Two releases can't live in one interpreter. `Worker` is the test's side; the file run as a program is the other side:
it imports the release once and then runs one case per line of standard input, answering with one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

TESTS = Path(__file__).parent.parent
CONNECTOR = TESTS.parent / "connector"


class CaseFailed(AssertionError):
    """A case failed in the other process; the message is its traceback."""


class Worker:
    """One release, imported and ready."""

    def __init__(self, sources: Path | None) -> None:
        """Start the process; ``sources`` is the folder of an uninstalled release, or ``None`` for the installed one."""
        paths = [str(path) for path in (sources, CONNECTOR, TESTS) if path is not None]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            # The sources alone don't tell for which device they were built.
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Started now, read when first needed: several releases then load side by side.
        self._hello: dict[str, Any] | None = None

    @property
    def version(self) -> str:
        """The release that the process has imported."""
        if self._hello is None:
            self._hello = self._read()
        return str(self._hello["version"])

    def run(self, case_file: Path, name: str) -> None:
        """Run one case.

        Raises:
            CaseFailed: with the traceback of the other side.
        """
        assert self.version
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"file": str(case_file), "case": name}) + "\n")
        self._process.stdin.flush()
        failure = self._read()["failure"]
        if failure:
            raise CaseFailed(f"on vLLM {self.version}:\n{failure}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if self._hello is None:
            # Nobody asked for this release: it may still be loading and would not see the end of its input for long.
            self._process.kill()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CaseFailed(f"the worker ended with code {self._process.wait()}; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def load_cases(file: Path) -> ModuleType:
    """A module of cases; none of them imports vLLM on its own, so this works on both sides."""
    spec = importlib.util.spec_from_file_location(f"connector_cases_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_names(file: Path) -> list[str]:
    """The cases of a module, in the order of the file."""
    return [name for name in vars(load_cases(file)) if name.startswith("case_")]


def _serve(requests: TextIO, answers: TextIO) -> None:
    from support.vllm_lab import Lab

    lab = Lab()
    modules: dict[str, ModuleType] = {}
    print(json.dumps({"version": lab.version}), file=answers, flush=True)
    for line in requests:
        wanted = json.loads(line)
        failure = ""
        try:
            module = modules.setdefault(wanted["file"], load_cases(Path(wanted["file"])))
            getattr(module, wanted["case"])(lab)
        except BaseException:  # noqa: BLE001 - the other side raises it
            failure = traceback.format_exc()
        print(json.dumps({"failure": failure}), file=answers, flush=True)


if __name__ == "__main__":
    # vLLM logs to standard output: the answers get a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        _serve(sys.stdin, channel)
    # Taking torch apart politely takes seconds.
    os._exit(0)
