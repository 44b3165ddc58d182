"""The network between fake engines, and the judge: who can be reached, which handles were issued, what went wrong.

Separate because a violation belongs to no single engine: whether a handle was issued at all, was altered on its way, or
was sent twice can only be seen from above. Engines of one process share one fabric; for pods there is a fabric between
processes (`support.cluster_serving_fabric`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_wire import names

if TYPE_CHECKING:
    from support.fake_engine.connector import Connector

ROUTER_KEYS = frozenset({names.RETAIN_KEY, names.REPORT_KEY})
"""Keys that the router may add to or take from a handle on its way; everything else must arrive as it was issued."""


class Clock:
    """Monotonic seconds that can also be moved forward by hand; never backward."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._skew = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return self._source() + self._skew

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once."""
        if seconds < 0:
            raise ValueError(f"time does not run backward: {seconds}")
        self._skew += seconds


def stopped_clock(start: float = 1000.0) -> Clock:
    """A clock that moves only by `Clock.advance`."""
    return Clock(lambda: start)


@dataclass(slots=True)
class Issued:
    """A handle that an engine gave out, and how often it came back."""

    engine_id: str
    value: dict[str, Any]
    sent_to: list[str] = field(default_factory=list)


class Fabric:
    """Address book of connectors, register of handles, list of violations."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.violations: list[str] = []
        self.tokens: set[str] = set()
        """Of all leases that engines gave; secrets as those of `secrets` are."""
        self._connectors: dict[tuple[str, int], Connector] = {}
        self._issued: dict[str, Issued] = {}
        self._engine_ids: set[str] = set()
        self._hosts: set[str] = set()

    def violate(self, who: str, what: str) -> None:
        """Record something that would crash, poison or mislead a real engine; the test must fail on it."""
        self.violations.append(f"{who}: {what}")

    def take_violations(self) -> list[str]:
        """The violations so far, forgotten afterwards: for tests that provoke them on purpose."""
        taken, self.violations = self.violations, []
        return taken

    def join(self, connector: Connector) -> None:
        """Make an engine reachable under its side-channel address."""
        self._connectors[connector.host, connector.port] = connector
        self._engine_ids.add(connector.engine_id)
        self._hosts.add(connector.host)

    def leave(self, connector: Connector) -> None:
        """The engine's process is gone; whoever took its address since stays."""
        if self._connectors.get((connector.host, connector.port)) is connector:
            del self._connectors[connector.host, connector.port]

    def reach(self, host: str, port: int) -> Connector | None:
        """The engine that listens at a side-channel address now."""
        return self._connectors.get((host, port))

    def issue(self, request_id: str, engine_id: str, value: dict[str, Any]) -> None:
        """Remember a handle as it left its engine."""
        self._issued[request_id] = Issued(engine_id, json.loads(json.dumps(value)))

    def issued(self, request_id: Any) -> Issued | None:
        """The handle that names ``request_id``, if any engine ever gave one out."""
        return self._issued.get(request_id) if isinstance(request_id, str) else None

    def sent(self, request_id: str, engine: str) -> list[str]:
        """Count an issued handle as sent to ``engine``; everybody whom it was sent to so far."""
        sent_to = self._issued[request_id].sent_to
        sent_to.append(engine)
        return list(sent_to)

    async def visit(self, params: Mapping[str, Any]) -> Connector | None:
        """The engine that a handle names, to read its blocks. Asynchronous for a fabric between processes."""
        return self.reach(params["remote_host"], params["remote_port"])

    def notify(self, params: Mapping[str, Any], reader: Connector) -> None:
        """Tell a handle's owner that ``reader`` does not need its blocks."""
        remote = self.reach(params["remote_host"], params["remote_port"])
        if remote is None or remote.engine_id != params["remote_engine_id"]:
            reader.counters["failed_notifications"] += 1
            return
        remote.notified(params["remote_request_id"], reader.name, read=False)

    def handle_fault(self, value: Mapping[str, Any]) -> str | None:
        """Why ``value`` is not exactly what an engine issued, or ``None``."""
        issued = self.issued(value.get("remote_request_id"))
        if issued is None:
            return "names a request that no engine gave a handle for"
        got = {key: item for key, item in value.items() if key not in ROUTER_KEYS}
        want = {key: item for key, item in issued.value.items() if key not in ROUTER_KEYS}
        if got != want:
            keys = sorted(key for key in got.keys() | want.keys() if got.get(key, got) != want.get(key, want))
            return f"was altered on its way: {', '.join(keys)}"
        return None

    def secrets(self) -> set[str]:
        """Strings of which none may ever reach a client or a log: engine ids, side-channel hosts, request ids."""
        return {*self._engine_ids, *self._hosts, *self._issued}


SECRET = re.compile(rb"(?:prefill|decode)-\d+-[0-9a-f]{16}|10\.91\.\d{1,3}\.\d{1,3}|cmpl-[0-9a-f]{16}-\d+-[0-9a-f]{8}")
"""What every one of `Fabric.secrets` looks like: one search instead of one per secret."""
