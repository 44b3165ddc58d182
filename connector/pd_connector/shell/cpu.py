"""How an engine on a CPU leaves its neighbours room: it rests where vLLM spins, and computes on its own cores.

Several engines and their routers share the cores of such a machine, and what one of them burns while it waits is taken
from the others. Nothing here is called on an accelerator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.platforms import current_platform

TRANSFER_THREAD_DELAY_US: Final = 500
MESSAGE_POLL_SECONDS: Final = 0.0003


def rest_between_polls() -> None:
    """Let NIXL's progress thread sleep between two polls. Call before an agent is made.

    The thread is pinned to the core that the engine computes on and spins there: NIXL's Python API sets its delay to 0
    and offers no other. A transfer then takes up to this delay longer to be noticed.
    """
    from nixl._api import nixl_agent

    bindings: Any = sys.modules[nixl_agent.__module__].nixlBind
    native: Any = bindings.nixlAgentConfig
    if getattr(native, "pd_rests", False):
        return

    class Resting(native):  # type: ignore[misc]
        pd_rests = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, TRANSFER_THREAD_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Resting


def rest_between_steps() -> None:
    """Let this process sleep, where it would yield and look again, while it waits for its next message.

    vLLM's processes spin on shared memory until a second has passed without a message. With KV blocks kept after a turn
    a message comes every few milliseconds, so an idle engine takes whole cores from its neighbours, prefill from decode
    and both from the router. Changes nothing where this vLLM does not spin.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(MESSAGE_POLL_SECONDS)


@contextmanager
def on_own_cores() -> Iterator[None]:
    """Leave the thread that computes on the cores that this engine was given. Make vLLM's connector inside.

    vLLM's NIXL worker asks its platform for the last core of each NUMA node and moves the thread that makes it there,
    to keep transfers off the cores that compute. But that thread computes too: all engines of a machine would share
    that one core, whatever `VLLM_CPU_OMP_THREADS_BIND` says.
    """
    platform: Any = type(current_platform)
    asked = vars(platform).get("discover_numa_topology")
    if asked is None:
        yield
        return
    platform.discover_numa_topology = classmethod(_no_cores)
    try:
        yield
    finally:
        platform.discover_numa_topology = asked


def _no_cores(_: type) -> list[list[int]]:
    return []
