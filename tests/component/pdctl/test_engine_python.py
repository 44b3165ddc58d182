"""What is found in real interpreters, and `pdctl up` with one that lacks what the engines need."""

import asyncio
import os
import sys

import pytest

from pdctl.shell.engine_python import EnginePythonError, observe_engine_python

BARE = os.path.realpath(sys.executable)
"""The interpreter below this virtual environment: it has neither vLLM nor our plugin."""


async def test_this_environment_has_everything():
    found = await observe_engine_python(sys.executable, dict(os.environ))
    assert found.vllm is not None
    assert found.vllm.startswith("0.32.")
    assert found.nixl is not None
    assert found.connector


async def test_a_bare_interpreter_has_nothing():
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = await observe_engine_python(BARE, env)
    assert (found.vllm, found.nixl, found.connector) == (None, None, False)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("#!/bin/sh\necho broken >&2; exit 3\n", "not a working Python: broken")],
)
async def test_what_is_no_python_is_named(tmp_path, content, words):
    path = tmp_path / "python"
    if content is not None:
        path.write_text(content)
        path.chmod(0o755)
    with pytest.raises(EnginePythonError, match=words):
        await observe_engine_python(str(path), dict(os.environ))


async def test_up_says_what_to_change_and_starts_nothing(world):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pdctl", "up", "-f", str(world.spec), "--engine-python", BARE, "--log-dir", str(world.folder / "logs")),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out = (await process.communicate())[0].decode()
    assert process.returncode == 2
    assert "vLLM is not installed for" in out
    assert "--engine-python" in out
    assert list((world.folder / "logs").glob("*.log")) == []
