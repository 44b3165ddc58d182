"""Where the engines come from, and the probe that each of them gets.

A discovery adds engines to the fleet and takes them away; the rest of the router does not know which one it is. The
static one is here: the engines are those on the command line. What every discovery needs is here too: one probe per
engine, whose word counts only for as long as that very engine is in the fleet.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from pd_router.core.addresses import parse_engine_url
from pd_router.core.settings import Settings, Timeouts
from pd_router.shell.exchange import Address
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.probe import EngineProbe, ProbeSettings
from pd_router.shell.tls import EngineTls
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

log = logging.getLogger("pd_router.discovery")


class Discovery(Protocol):
    """What the router asks of a discovery."""

    async def start(self) -> None:
        """Begin; engines come and go from here on. Raises DiscoveryError when it can never work."""

    async def stop(self) -> None:
        """End everything that was started."""

    def nudge(self, key: str) -> None:
        """Probe this engine now; harmless when it has left."""

    def why_not_ready(self) -> str | None:
        """Why the engines are not known yet, or None."""

    def describe(self) -> dict[str, Any] | None:
        """For `/status`; None when there is nothing to tell."""


class DiscoveryError(RuntimeError):
    """Discovery cannot work as the router was started; the message names the flag and what to do."""


class EngineProbes:
    """One probe task per engine."""

    def __init__(self, timeouts: Timeouts, fleet: Fleet, tls: EngineTls) -> None:
        self._tls = tls
        self._settings = ProbeSettings(timeouts.probe_interval, timeouts.probe_late, connect_timeout=timeouts.connect)
        self._fleet = fleet
        self._probes: dict[str, tuple[EngineProbe, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def watch(self, member: Member) -> None:
        """Begin probing an engine of the fleet. Needs a running loop."""
        fleet, key = self._fleet, member.key

        def current() -> bool:
            # A probe that was told to end still sees its connection close: that is no news of the engine, and the key
            # may be another engine's already.
            return key in self._probes and fleet.member(key) is member

        probe = EngineProbe(
            member.address,
            self._settings,
            on_ready=lambda ready: fleet.set_ready(key, ready) if current() else None,
            on_broken=lambda: fleet.broken(key) if current() else None,
            on_peer=lambda peer: fleet.seen_from(key, peer) if current() else None,
            tls=self._tls,
        )
        task = asyncio.create_task(probe.run(), name=f"probe {key}")
        task.add_done_callback(self._ended)
        self._probes[key] = (probe, task)

    def forget(self, key: str) -> None:
        """Stop probing an engine."""
        _, task = self._probes.pop(key)
        self._ending.add(task)
        task.cancel()

    def nudge(self, key: str) -> None:
        """Probe this engine now; harmless when it has left."""
        if key in self._probes:
            self._probes[key][0].nudge()

    async def stop(self) -> None:
        """Stop probing."""
        for key in list(self._probes):
            self.forget(key)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)


class StaticDiscovery:
    """The engines on the command line."""

    def __init__(self, settings: Settings, fleet: Fleet, tls: EngineTls) -> None:
        self._probes = EngineProbes(settings.timeouts, fleet, tls)
        self._members: list[Member] = []
        for role, urls in ((ROLE_PREFILL, settings.prefill), (ROLE_DECODE, settings.decode)):
            for url in urls:
                endpoint = parse_engine_url(url, f"--{role}")
                address = Address(endpoint.host, endpoint.port, endpoint.tls)
                member = Member(key=url, role=role, address=address, generation=settings.generation)
                fleet.add(member)
                self._members.append(member)

    async def start(self) -> None:
        """Begin probing."""
        for member in self._members:
            self._probes.watch(member)

    async def stop(self) -> None:
        """Stop probing."""
        await self._probes.stop()

    def nudge(self, key: str) -> None:
        """Probe this engine now."""
        self._probes.nudge(key)

    def why_not_ready(self) -> str | None:
        """The engines are known from the start."""
        return None

    def describe(self) -> dict[str, Any] | None:
        """Nothing that the fleet does not say."""
        return None
