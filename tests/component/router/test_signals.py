"""Signals: those that ask for an end drain, all others cut nobody off, with one process and with several."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from support.chat import Talk
from support.deployment import Deployment, Spec
from support.fake_engine import Behaviour, Gate
from support.waiting import until

ONE = Spec()
TWO = Spec(flags=(("--workers", "2"),))
STRAY = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def processes(pid: int) -> list[int]:
    """A router's process and those of its workers."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [pid, *map(int, file.read().split())]


async def begin(deployment: Deployment) -> tuple[Gate, asyncio.Task[Any]]:
    """A stream that waits in its middle."""
    gate = Gate(2)
    deployment.decode.next(Behaviour(gate=gate))
    running = asyncio.create_task(Talk(deployment, stream=True).say())
    await gate.reached.wait()
    return gate, running


@pytest.mark.parametrize("spec", [ONE, TWO], ids=["one", "workers"])
async def test_stray_signals_cut_nothing(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec, fresh=True)
    gate, running = await begin(deployment)
    before = processes(deployment.router.pid)
    for number in STRAY:
        for pid in before:
            os.kill(pid, number)
    for _ in range(4):
        await Talk(deployment).say()
    assert processes(deployment.router.pid) == before
    gate.open()
    assert (await running).events[-1] == "[DONE]"


@pytest.mark.parametrize("spec", [ONE, TWO], ids=["one", "workers"])
async def test_sigquit_drains(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec, fresh=True)
    gate, running = await begin(deployment)
    os.kill(deployment.router.pid, signal.SIGQUIT)

    async def draining() -> bool:
        return "draining" in deployment.router.log

    await until(draining)
    gate.open()
    assert (await running).events[-1] == "[DONE]"
    assert await deployment.router.wait() == 0
    deployment.ended = True
