"""Shared handle stores over one real server, with time that a test lets pass.

The server's clock is the machine's. To let time pass, everything in the store is made older instead: arrivals, times to
live, the clock that the scripts remember. For the store the two are the same, since it compares and never asks what
time it is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pd_router.core.linking import Keyring
from pd_router.core.store import Opened, Ticket
from pd_router.core.store_settings import Valkey
from pd_router.core.store_value import prefix
from pd_router.shell.metrics import Metrics
from pd_router.shell.store_metrics import SharedStoreMetrics
from pd_router.shell.valkey_store import ValkeyStore
from support.redis_server import RedisServer
from support.waiting import until

_AGE = """
local start, ms = ARGV[1], tonumber(ARGV[2])
for _, key in ipairs(redis.call('KEYS', start .. '*')) do
  local left = redis.call('PTTL', key) - ms
  local kind = string.sub(key, #start + 1, #start + 1)
  if kind == 's' then
    local clock = tonumber(redis.call('HGET', key, 'clock'))
    redis.call('HSET', key, 'clock', string.format('%.0f', clock - ms))
  elseif left <= 0 then
    redis.call('DEL', key)
  else
    redis.call('PEXPIRE', key, left)
  end
end
"""


class ValkeyBench:
    """One router's store. Benches of one realm over one server share it."""

    def __init__(
        self,
        server: RedisServer,
        realm: str,
        *,
        ttl: float = 450.0,
        engine_ttl: float = 480.0,
        shared_ttl: float = 900.0,
        incarnation: str = "1",
        **settings: Any,
    ) -> None:
        self.server = server
        self.realm = realm
        self.incarnation = incarnation
        self.asked: list[tuple[str, str, float]] = []
        """What the fleet was asked: holder, identity, when the turn was sent."""
        self._shifts: list[tuple[float, float]] = [(0.0, 0.0)]
        self.seal = Keyring(b"the routers' key of 32 characters").seal
        metrics = Metrics()
        self.registry: CollectorRegistry = metrics.registry
        values = {"timeout": 2.0, "max_entry_bytes": 1 << 20, **settings}
        valkey = Valkey(url=values.pop("url", server.url), key_file="", **values)
        self.store = ValkeyStore(
            valkey,
            SharedStoreMetrics(metrics),
            realm,
            ttl,
            engine_ttl,
            self._incarnation_of,
            self.seal,
            lambda: self.now,
            shared_ttl,
        )

    def _incarnation_of(self, holder: str, identity: str, sent: float) -> str:
        self.asked.append((holder, identity, sent))
        return self.incarnation

    async def start(self, *, up: bool = True) -> ValkeyBench:
        """Start, and wait until the server is there."""
        self.store.start()
        if up:
            await self.wait_up()
        return self

    async def wait_up(self, up: bool = True) -> None:
        """Wait until the store says that it can be used, or that it cannot. Raises TimeoutError."""

        async def reached() -> bool:
            return self.store.up is up

        await until(reached, 30.0)

    @property
    def now(self) -> float:
        """This router's clock."""
        return time.monotonic() + self._shifts[-1][1]

    async def wait(self, seconds: float) -> None:
        """Let time pass, here and there."""
        if seconds:
            ms = round(seconds * 1000)
            with self.server.client() as client:
                for name in self.names(b"e"):
                    value = client.get(name)
                    assert isinstance(value, bytes)
                    client.set(name, self._older(value, ms), keepttl=True)
                client.eval(_AGE, 0, self.prefix, ms)
            self._shifts.append((self.now, self._shifts[-1][1] + seconds))

    def _older(self, value: bytes, ms: int) -> bytes:
        head, _, rest = value.partition(b"\n")
        form, era, arrived, sent, names = head.split(b"|")
        older = b"|".join((form, era, b"%d" % (int(arrived) - ms), b"%d" % (int(sent) - ms), names))
        body = rest.partition(b"\n")[2]
        return b"\n".join((older, self.seal(older + body), body))

    def ticket(self, opened: Opened) -> Ticket | None:
        """The ticket, made older by all that has passed since."""
        ticket = opened.ticket
        if ticket is None:
            return None
        then = next(total for since, total in reversed(self._shifts) if ticket.at >= since)
        return ticket._replace(server_ms=ticket.server_ms - round((self._shifts[-1][1] - then) * 1000))

    @property
    def prefix(self) -> bytes:
        """What the keys of this realm begin with, on the server as it runs now."""
        with self.server.client() as client:
            return prefix(self.realm, client.info("server")["run_id"])

    def names(self, kind: bytes = b"") -> list[bytes]:
        """All keys of this realm, or those of a kind."""
        with self.server.client() as client:
            return sorted(client.keys(self.prefix + kind + b"*"))

    def count(self, metric: str, **labels: str) -> float:
        """A sample of this router's metrics; 0 where it does not exist yet."""
        return self.registry.get_sample_value(f"pd_router_handle_store_{metric}", labels) or 0.0


def written(folder: Path, name: str, text: str) -> str:
    """Path of a file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
