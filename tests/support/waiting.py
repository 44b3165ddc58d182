"""Waiting for something that another process does, bounded, and failing with what was waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Found = TypeVar("Found")


async def until(look: Callable[[], Awaitable[Found]], seconds: float = 10.0, pause: float = 0.02) -> Found:
    """Call ``look`` every ``pause`` seconds until what it returns is true, and return that.

    Raises:
        TimeoutError: after ``seconds``, naming ``look``.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        found = await look()
        if found:
            return found
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{look.__qualname__} was still false after {seconds} s")
        await asyncio.sleep(pause)
