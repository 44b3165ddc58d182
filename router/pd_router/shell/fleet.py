"""The engines as they are now: ready or not, how loaded, which incarnation, and from which hosts handles may come.

Separate from the turn and from discovery: discovery reports changes here, the turn reads a snapshot and reports
outcomes here. When an engine's process may have changed, its handles are purged before the change becomes visible, so
that no turn can attach a handle of the old memory to traffic for the new (EL-01, EN-06).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pd_router.core.breaker import Breaker
from pd_router.core.pairs import Pair, Pairs
from pd_router.core.placement import Engine, Loads, rank_key
from pd_router.core.pulls import Pull
from pd_router.core.witness import Witness
from pd_router.shell.exchange import Address
from pd_router.shell.metrics import Metrics
from pd_wire.names import ROLE_DECODE

log = logging.getLogger("pd_router.fleet")


@dataclass(slots=True)
class Member:
    """One engine. `key` is stable for as long as the address is; `incarnation` counts its processes.

    `answers`: it could be reached the last time that somebody tried. `admitted`: discovery says that it may have work.
    `ready`: both, or it answers while it drains. `draining`: it ends what it has and takes no new turn.
    """

    key: str
    role: str
    address: Address
    generation: str
    ready: bool = False
    draining: bool = False
    answers: bool = False
    admitted: bool = True
    incarnation: int = 0
    peers: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    """Data-parallel ranks that handles of this process named; empty when it has one rank."""
    breaker: Breaker = field(default_factory=Breaker)
    pulls: dict[Pull, int] = field(default_factory=lambda: dict.fromkeys(Pull, 0))
    """Of a prefill engine: what became of the handles that it was sent."""
    witness: Witness = field(default_factory=Witness)


class Fleet:
    """All engines that this router may use."""

    def __init__(
        self,
        metrics: Metrics,
        allowed_hosts: frozenset[str],
        purge: Callable[[str], int],
        on_gone: Callable[[Member], None],
        quarantine: float = 30.0,
    ) -> None:
        self._metrics = metrics
        self._purge = purge
        self._on_gone = on_gone
        self._allowed = allowed_hosts
        self._members: dict[str, Member] = {}
        self.pairs = Pairs(quarantine)
        """Health of the pairs that these engines make."""
        self._hosts: dict[str, frozenset[str]] = {}
        """By role; dropped when an engine comes, goes or answers from elsewhere."""
        self._views: dict[str, tuple[tuple[Member, Engine], ...]] = {}
        """By role: the engines as values, their breakers closed. Dropped when a member changes."""
        self._next_incarnation = 0

    def add(self, member: Member) -> None:
        """A new engine, not ready until it answers. Its key must be new, or have been removed."""
        # A key may come back as another process: nothing that names the one before may match it.
        member.incarnation = self._next_incarnation
        self._members[member.key] = member
        self._hosts.clear()
        self._views.clear()
        self._metrics.add_engine(member.role, member.key)

    def remove(self, key: str) -> None:
        """The engine is gone for good: its handles are purged, and what waits for its first byte fails."""
        member = self._members.pop(key)
        purged = self._purge(key) if member.role == ROLE_DECODE else 0
        self.pairs.forget(key)
        self._next_incarnation = max(self._next_incarnation, member.incarnation + 1)
        member.ready = member.answers = False
        self._hosts.clear()
        self._views.clear()
        self._metrics.forget_engine(member.role, key)
        log.info("%s engine %s is gone; %d of its handles purged", member.role, key, purged)
        self._on_gone(member)

    def member(self, key: str) -> Member | None:
        """The engine of that key."""
        return self._members.get(key)

    def of_role(self, role: str) -> list[Member]:
        """All engines of a role."""
        return [member for member in self._members.values() if member.role == role]

    def snapshot(self, role: str, now: float) -> tuple[Engine, ...]:
        """The engines of a role as plain values."""
        view = self._views.get(role)
        if view is None:
            view = self._views[role] = tuple((member, _engine(member, False)) for member in self.of_role(role))
        # Between two changes the values are the same, but for the breakers of engines that fail.
        return tuple(
            [
                _engine(member, True) if member.breaker.failures and not member.breaker.allows(now) else engine
                for member, engine in view
            ]
        )

    def ranks(self) -> dict[str, set[int]]:
        """Data-parallel ranks by engine, of those that have several."""
        return {member.key: member.ranks for member in self._members.values() if member.ranks}

    def hosts(self, role: str = ROLE_DECODE) -> frozenset[str]:
        """Hosts that handles of a role's engines may name: those in their URLs and those that they answered from."""
        found = self._hosts.get(role)
        if found is None:
            found = self._hosts[role] = self._find_hosts(role)
        return found

    def _find_hosts(self, role: str) -> frozenset[str]:
        found = set(self._allowed)
        for member in self.of_role(role):
            found.add(member.address.host)
            found |= member.peers
        return frozenset(found)

    # -- what discovery reports ------------------------------------------------------------------
    def set_ready(self, key: str, ready: bool) -> None:
        """The engine answers, or no longer does: then what waits for its first byte fails. Unknown keys are ignored."""
        member = self._members.get(key)
        if member is None or member.answers == ready:
            return
        member.answers = ready
        self._settle(member)
        if ready:
            member.breaker = Breaker()
        elif not member.draining:
            # One that drains may refuse its health check while it ends what it has; its sockets tell when it is gone.
            self._on_gone(member)

    def admit(self, key: str, admitted: bool, draining: bool) -> None:
        """What discovery says about an engine, whether it answers or not. What runs on it goes on."""
        member = self._members[key]
        if draining != member.draining:
            member.draining = draining
            log.info("%s engine %s is %s", member.role, key, "draining" if draining else "no longer draining")
        member.admitted = admitted
        self._settle(member)

    def _settle(self, member: Member) -> None:
        # A pod that is being deleted stops being Ready; it takes no turn for another reason, and that one is told.
        self._views.clear()
        ready = member.answers and (member.admitted or member.draining)
        if ready != member.ready:
            member.ready = ready
            self._metrics.engine_ready.labels(member.role, member.key).set(1 if ready else 0)
            log.info("%s engine %s is %s", member.role, member.key, "ready" if ready else "not ready")

    def broken(self, key: str) -> None:
        """The process behind the engine may be another one from here on."""
        member = self._members[key]
        purged = self._purge(key) if member.role == ROLE_DECODE else 0
        member.incarnation += 1
        self._views.clear()
        member.ranks.clear()
        self.pairs.forget(key)
        member.witness.broken()
        self._metrics.engine_breaks.labels(member.role, key).inc()
        log.warning("%s engine %s lost its process; %d of its handles purged", member.role, key, purged)

    def seen_from(self, key: str, peer: str) -> None:
        """A connection to the engine stands; it answers from this address."""
        self._members[key].witness.connected(peer, time.monotonic())
        if peer:
            self._members[key].peers.add(peer)
            self._hosts.clear()

    def identify(self, key: str, uid: str, process: str) -> None:
        """What the kubelet calls the engine's process. Unknown keys are ignored."""
        member = self._members.get(key)
        if member is not None:
            member.witness.identify(uid, process)

    def incarnation_of(self, key: str, identity: str, sent: float) -> str:
        """Which incarnation here left a handle that came by way of another router; "" when none is known to have.

        Args:
            identity: what that router calls the process.
            sent: when its turn was sent there, by this router's clock.
        """
        member = self._members.get(key)
        if member is None or not member.witness.knows(identity, sent):
            return ""
        return str(member.incarnation)

    def summary(self) -> list[dict[str, Any]]:
        """For `/status`; `ready` means that it takes new turns."""
        return [
            {
                "engine": member.key,
                "role": member.role,
                "generation": member.generation,
                "ready": member.ready and not member.draining,
                "draining": member.draining,
            }
            for member in self._members.values()
        ]

    def describe(self, loads: Loads, now: float) -> list[dict[str, Any]]:
        """For `/debug/fleet`."""
        quarantined = [self._quarantine(pair, breaker, now) for pair, breaker in self.pairs.tripped()]
        return [
            {
                "engine": member.key,
                "role": member.role,
                "address": member.address.authority,
                "ready": member.ready,
                "draining": member.draining,
                "incarnation": member.incarnation,
                "generation": member.generation,
                "turns": loads.turns(member.key),
                "prefill_tokens": loads.tokens(member.key),
                "ranks": {str(rank): loads.turns(rank_key(member.key, rank)) for rank in sorted(member.ranks)},
                "pulls": {pull.value: count for pull, count in member.pulls.items() if count},
                "failures": member.breaker.failures,
                "breaker": member.breaker.state(now),
                "quarantined_with": [one for key, one in quarantined if key == member.key],
            }
            for member in self._members.values()
        ]

    @staticmethod
    def _quarantine(pair: Pair, breaker: Breaker, now: float) -> tuple[str, dict[str, Any]]:
        """A pair, shown with its prefill engine."""
        shown = {"decode": pair.decode, "direction": pair.direction.value, "failures": breaker.failures}
        return pair.prefill, {**shown, "state": breaker.state(now), "seconds_left": max(0.0, breaker.until - now)}


def _engine(member: Member, failing: bool) -> Engine:
    return Engine(
        key=member.key,
        url=member.address.url,
        role=member.role,
        generation=member.generation,
        incarnation=str(member.incarnation),
        ready=member.ready,
        draining=member.draining,
        failing=failing,
    )
