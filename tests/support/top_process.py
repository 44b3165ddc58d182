"""`pdctl top` as a program: arguments in; exit status, output and errors out."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("operator", "router", "connector", "tools")),
    "COLUMNS": "170",
    "LINES": "50",
    "TERM": "xterm",
}


async def start(*arguments: str, out: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    words = ("-m", "pdctl", "top", *arguments)
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )  # fmt: skip


async def run(*arguments: str) -> tuple[int, str, str]:
    process = await start(*arguments)
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()
