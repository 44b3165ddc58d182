"""Static discovery: the engines are those on the command line, watched one probe each.

Separate from the fleet so that a cluster's API can take its place without the rest noticing.
"""

from __future__ import annotations

import asyncio

from pd_router.core.settings import Settings, parse_engine_url
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.probe import EngineProbe, ProbeSettings
from pd_router.shell.upstream import Address
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL


class StaticDiscovery:
    """Owns one probe task per engine."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._probes: dict[str, EngineProbe] = {}
        self._tasks: list[asyncio.Task[None]] = []
        probe_settings = ProbeSettings(
            settings.timeouts.probe_interval, settings.timeouts.probe_timeout, connect_timeout=settings.timeouts.connect
        )
        for role, urls in ((ROLE_PREFILL, settings.prefill), (ROLE_DECODE, settings.decode)):
            for url in urls:
                endpoint = parse_engine_url(url, f"--{role}")
                address = Address(endpoint.host, endpoint.port)
                fleet.add(Member(key=url, role=role, address=address, generation=settings.generation))
                self._probes[url] = EngineProbe(
                    address,
                    probe_settings,
                    on_ready=lambda ready, key=url: fleet.set_ready(key, ready),  # type: ignore[misc]
                    on_broken=lambda key=url: fleet.broken(key),  # type: ignore[misc]
                    on_peer=lambda peer, key=url: fleet.seen_from(key, peer),  # type: ignore[misc]
                )

    def start(self) -> None:
        """Begin probing. Needs a running loop."""
        self._tasks = [asyncio.create_task(probe.run(), name=f"probe {key}") for key, probe in self._probes.items()]

    def nudge(self, key: str) -> None:
        """Probe this engine now."""
        self._probes[key].nudge()

    async def stop(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
