"""Where `pdctl top` reads: the admin pages of routers, and the engines' own metrics where they can be reached."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from pdctl.core.exposition import sum_samples
from pdctl.core.top_window import Labels, Look

ROUTER_SECONDS: Final = 5.0
ENGINE_SECONDS: Final = 1.0
"""Of an engine one figure is wanted, and a router elsewhere may name engines that can't be reached from here."""
SIGN: Final = "pd_router_build_info"
KV_USAGE: Final = "vllm:kv_cache_usage_perc"


class SourceError(Exception):
    """A router that can't be read, in one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look: of each router by name its samples and its list of engines; of each engine its KV usage."""

    looks: Mapping[str, Look]
    fleets: Sequence[Sequence[Mapping[str, Any]]]
    kv_usage: Mapping[str, float | None]


class Source(Protocol):
    """Where readings come from."""

    async def read(self) -> Reading:
        """Look once. Raises SourceError."""


class AdminSource:
    """Routers by the URL of their admin port. ``ask_engines``: also look at the engines that they name."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], *, ask_engines: bool) -> None:
        self._session = session
        self._urls = [url.rstrip("/") for url in urls]
        self._ask_engines = ask_engines

    async def read(self) -> Reading:
        """Look once. Raises SourceError, naming the URL."""
        pages = await asyncio.gather(*(self._router(url) for url in self._urls))
        looks = {url: look for url, (look, _) in zip(self._urls, pages, strict=True)}
        fleets = [fleet for _, fleet in pages]
        addresses = {str(one["engine"]): str(one["address"]) for fleet in fleets for one in fleet}
        usage: dict[str, float | None] = {}
        if self._ask_engines:
            found = await asyncio.gather(*(self._engine(address) for address in addresses.values()))
            usage = dict(zip(addresses, found, strict=True))
        return Reading(looks, fleets, usage)

    async def _router(self, url: str) -> tuple[Look, list[dict[str, Any]]]:
        page = await self._text(f"{url}/metrics")
        look = parse_look(page, url)
        return look, parse_fleet(await self._text(f"{url}/debug/fleet"), url)

    async def _text(self, url: str) -> str:
        try:
            async with asyncio.timeout(ROUTER_SECONDS), self._session.get(url) as response:
                if response.status != 200:
                    raise SourceError(f"{url} answers with status {response.status}: is it a router's admin port?")
                return await response.text()
        except TimeoutError:
            raise SourceError(f"{url} has not answered within {ROUTER_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise SourceError(f"no router answers at {url}: {_reason(error)}") from error

    async def _engine(self, address: str) -> float | None:
        try:
            async with asyncio.timeout(ENGINE_SECONDS), self._session.get(f"http://{address}/metrics") as response:
                return sum_samples(await response.text(), KV_USAGE) if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
            return None


def parse_look(page: str, where: str) -> Look:
    """A router's metrics page. Raises SourceError when it is none."""
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    except ValueError:
        samples.clear()
    if SIGN not in samples:
        raise SourceError(f"{where}/metrics is not a router's: no {SIGN} in it. Is it the admin port?")
    return Look(time.monotonic(), samples)


def parse_fleet(page: str, where: str) -> list[dict[str, Any]]:
    """A router's list of engines. Raises SourceError when it is none."""
    try:
        found = json.loads(page)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise SourceError(f"{where}/debug/fleet is not a router's list of engines. Is it the admin port?")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio's own text of it names the address once more.
        return os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
    return str(error) or type(error).__name__
