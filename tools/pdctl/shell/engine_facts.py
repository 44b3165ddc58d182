"""The size and use of a running engine's KV pool, and what it keeps of finished turns, from its own metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import aiohttp

from pdctl.core.exposition import first_labels, sum_samples
from pdctl.core.plan_report import Retained

SECONDS: Final = 5.0
INFO: Final = "vllm:cache_config_info"
USAGE: Final = "vllm:kv_cache_usage_perc"
LEASED: Final = "vllm:pd_leased_blocks"
PINNED: Final = "vllm:pd_pinned_blocks"
READABLE: Final = "vllm:pd_readable_blocks"


class EngineFactsError(Exception):
    """An engine that can't be asked, in one sentence that names its URL."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``usage`` is a share; None: not said."""

    blocks: int
    block_tokens: int
    usage: float | None
    retained: Retained | None = None
    """Of finished turns; an engine without our connector doesn't say."""


async def ask_engine(url: str) -> EngineFacts:
    """Read `/metrics` of a vLLM engine.

    Raises:
        EngineFactsError: no answer, or not from vLLM, or without the pool's size.
    """
    page_url = f"{url.rstrip('/')}/metrics"
    try:
        async with (
            asyncio.timeout(SECONDS),
            aiohttp.ClientSession() as session,
            session.get(page_url) as response,
        ):
            if response.status != 200:
                raise EngineFactsError(f"{page_url} answers with status {response.status}")
            page = await response.text()
    except TimeoutError:
        raise EngineFactsError(f"{page_url} has not answered within {SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineFactsError(f"no engine answers at {page_url}: {error}") from None
    labels = first_labels(page, INFO)
    blocks, block = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    if not blocks.isdecimal() or not block.isdecimal() or not int(blocks) or not int(block):
        raise EngineFactsError(f"{page_url} does not say the pool's size ({INFO} with num_gpu_blocks and block_size)")
    kept = [sum_samples(page, name) for name in (LEASED, PINNED, READABLE)]
    retained = None if kept[2] is None else Retained(*(int(count or 0) for count in kept))
    return EngineFacts(int(blocks), int(block), sum_samples(page, USAGE), retained)
