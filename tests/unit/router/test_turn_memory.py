"""A turn's memory is free when it ends: nothing of it waits for the garbage collector, whose garbage pushes what the
next turn needs out of the processor's caches."""

from __future__ import annotations

import gc

import pytest

from perf.router_turn import Bench


@pytest.mark.parametrize("burst", [False, True], ids=["token by token", "burst"])
async def test_a_turn_leaves_no_cycles(burst: bool) -> None:
    bench = Bench(burst)
    await bench.turns(3)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await bench.turns(5)
        gc.collect()
        left = sorted({type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("pd_router")})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
