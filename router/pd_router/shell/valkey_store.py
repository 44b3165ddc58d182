"""The handle store that several routers share, in Valkey or Redis.

Behind the same port as the store in memory; what one step does is in `core/store_scripts`, what is written in
`core/store_value`, what a network can do in `valkey_client`. Here is the rule for failures: whatever happens, the turn
goes on without a handle, and never with one that may be spent or too old (HL-28):

* A turn has a place in the order of turns only if it could be opened; what it leaves is put only on the server process
  on which it was opened. So nothing is put late by a server that was away or has changed.
* The age of a handle is counted on the server's clock, from its arrival at the router that puts it: that moment is told
  to the server as the earliest it can have been, and the way there counts as age.
* The reader takes the oldest age that fits, and asks its own fleet whether the holder's process is the one that the
  handle is of; other routers' handles of a dead process need no purge.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from pd_router.core import store_scripts
from pd_router.core.pinned import Pinned
from pd_router.core.store import Entry, Fate, Found, OnDrop, Opened, PutResult, Stats, Ticket, tell_nobody
from pd_router.core.store_settings import FailureKind, Valkey
from pd_router.core.store_value import DamagedEntry, Seal, key_name, prefix, read_entry, read_lease, write_entry
from pd_router.shell.store_metrics import SharedStoreMetrics
from pd_router.shell.valkey_client import Script, StoreFailed, ValkeyClient

log = logging.getLogger("pd_router.store")

NEWEST_TURN_MS: Final = 3_600_000
"""How long an id's newest turn is remembered: longer than nearly every turn runs."""
_OPEN: Final = Script(store_scripts.OPEN)
_PUT: Final = Script(store_scripts.PUT)
_FORGET: Final = Script(store_scripts.FORGET)
_END: Final = Script(store_scripts.END)

IncarnationOf = Callable[[str, str, float], str]


class ValkeyStore:
    """See `HandleStore`.

    Args:
        realm: names the deployment; stores of two never meet.
        router_ttl: seconds after its arrival for which a handle is handed out.
        engine_ttl: seconds for which D keeps the blocks.
        shared_ttl: seconds after its arrival for which a shared handle is handed out.
        incarnation_of: `Fleet.incarnation_of`.
        seal: `Keyring.seal` of the key that the routers share.
        now: this router's monotonic clock.
    """

    def __init__(
        self,
        settings: Valkey,
        metrics: SharedStoreMetrics,
        realm: str,
        router_ttl: float,
        engine_ttl: float,
        incarnation_of: IncarnationOf,
        seal: Seal,
        now: Callable[[], float] = time.monotonic,
        shared_ttl: float = 3600.0,
    ) -> None:
        self._on_drop: OnDrop = tell_nobody
        self._client = ValkeyClient(settings, metrics)
        self._metrics = metrics
        self._realm = realm
        self._ttl_ms = int(router_ttl * 1000)
        self._shared_ttl_ms = int(shared_ttl * 1000)
        self._max_bytes = settings.max_entry_bytes
        self._incarnation_of = incarnation_of
        self._seal = seal
        self._now = now
        self._pinned = Pinned(engine_ttl)
        self._fates: Counter[str] = Counter()
        self._stored = 0
        self._writer = secrets.token_hex(8)
        self._prefixes: dict[str, bytes] = {}

    def report_to(self, on_drop: OnDrop) -> None:
        """See `HandleStore`."""
        self._on_drop = on_drop

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def stop(self) -> None:
        """Close all connections."""
        await self._client.stop()

    @property
    def up(self) -> bool:
        """Whether the server answered last."""
        return self._client.up

    # -- the port ------------------------------------------------------------------------------------
    def open(self, keys: Sequence[bytes], now: float) -> Opened | Awaitable[Opened]:
        """See `HandleStore`. Without a server the turn has number 0 and no ticket."""
        if not self._client.up:
            self._metrics.skipped["open"].inc()
            return _WITHOUT
        return self._open(keys)

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult | Awaitable[PutResult]:
        """See `HandleStore`."""
        if not entry.shared:
            self._pinned.add(entry.holder, entry.arrived, entry.remote_tokens)
        if not keys:
            return PutResult.NO_KEY
        if not self._client.up or entry.ticket is None:
            self._metrics.skipped["put"].inc()
            return PutResult.UNAVAILABLE
        if len(entry.raw) > self._max_bytes:
            self._fates[Fate.TOO_LARGE] += 1
            return PutResult.TOO_LARGE
        return self._put(entry, entry.ticket, keys)

    def forget(self, keys: Sequence[bytes]) -> Awaitable[None] | None:
        """See `HandleStore`."""
        if not self._client.up or not keys:
            return None
        return self._forget(keys)

    def end(self, keys: Sequence[bytes], conversations: Sequence[str], now: float) -> bool | Awaitable[bool]:
        """See `HandleStore`."""
        if not self._client.up:
            self._metrics.skipped["end"].inc()
            return False
        return self._end(keys, conversations)

    def spent(self, entry: Entry) -> None:
        """See `HandleStore`. What another router put stays counted there, until the engine's TTL."""
        if entry.own and not entry.shared:
            self._pinned.release(entry.holder, entry.arrived, entry.remote_tokens)

    def purge_holder(self, holder: str, now: float) -> int:
        """See `HandleStore`. Readers refuse what is of another process; nothing has to be looked for."""
        self._pinned.forget(holder)
        return 0

    def expire(self, now: float) -> int:
        """See `HandleStore`. The server does it."""
        return 0

    def stats(self, now: float) -> Stats:
        """See `HandleStore`. Fates and pinned tokens are those of this router's handles."""
        handles, tokens = self._pinned.totals(now)
        return Stats(None, None, dict(self._fates), self._stored, handles, tokens)

    # -- over the network ----------------------------------------------------------------------------
    async def _open(self, keys: Sequence[bytes]) -> Opened:
        began = self._now()
        try:
            async with self._client.lend("open") as link:
                start = self._prefix(link.run)
                names = [start + b"k" + key_name(key) for key in keys]
                limits = (self._ttl_ms, NEWEST_TURN_MS, self._max_bytes + _HEAD_BYTES, self._shared_ttl_ms)
                answer = await link.call(_OPEN, names, (start, *limits))
                turn, era, server_ms, place, age, sent_age, value, expired, damaged = answer
                ticket = Ticket(link.run, int(era), int(server_ms), self._now()) if turn else None
                key, written = (keys[place - 1], bytes(value)) if place else (b"", b"")
        except StoreFailed:
            return _WITHOUT
        self._fates[Fate.EXPIRED] += expired
        if damaged:
            self._damaged(damaged)
        if not turn:
            self._client.failed("open", StoreFailed(FailureKind.OUT_OF_MEMORY, "no memory for a turn's number"))
        if not place:
            return Opened(turn, None, ticket)
        # The earliest moments that fit: the ages were counted after the question left, in ms that were cut off.
        entry = self._read(written, key, turn, began - (age + 1) / 1000, began - (sent_age + 1) / 1000)
        return Opened(turn, None if entry is None else Found(entry, key), ticket)

    def _read(self, value: bytes, key: bytes, turn: int, arrived: float, sent: float) -> Entry | None:
        try:
            stored = read_entry(value, key_name(key), self._seal)
        except DamagedEntry:
            self._damaged(1)
            return None
        entry = Entry.of(
            stored.handle,
            holder=stored.holder,
            incarnation=self._incarnation_of(stored.holder, stored.identity, sent),
            generation=stored.generation,
            arrived=arrived,
            turn=turn,
            inexact=stored.inexact,
            sent=sent,
            identity=stored.identity,
        )
        entry.behind, entry.lease = stored.behind, stored.lease
        entry.own = stored.writer == self._writer
        if not entry.shared:
            self._fates[Fate.TAKEN] += 1
        return entry

    async def _put(self, entry: Entry, ticket: Ticket, keys: Sequence[bytes]) -> PutResult:
        arrived_ms = ticket.server_ms + math.floor((entry.arrived - ticket.at) * 1000)
        sent_ms = ticket.server_ms + math.floor((entry.sent - ticket.at) * 1000)
        names = [key_name(key) for key in keys]
        value = write_entry(entry, names, ticket.era, arrived_ms, sent_ms, self._writer, self._seal)
        try:
            async with self._client.lend("put") as link:
                if link.run != ticket.run:
                    return self._late()
                start = self._prefix(link.run)
                ttl = self._shared_ttl_ms if entry.shared else self._ttl_ms
                result, overwritten, heads = await link.call(
                    _PUT,
                    [start + b"k" + name for name in names],
                    (start, ttl, entry.turn, ticket.era, arrived_ms, value, *entry.conversations),
                )
                outcome = PutResult(result.decode())
        except StoreFailed:
            return PutResult.UNAVAILABLE
        self._fates[Fate.OVERWRITTEN] += overwritten
        self._dropped(heads, Fate.OVERWRITTEN, entry.lease)
        if outcome is PutResult.LATE:
            return self._late()
        if outcome is PutResult.EXPIRED:
            self._fates[Fate.EXPIRED] += 1
        else:
            self._stored += 1
        return outcome

    async def _forget(self, keys: Sequence[bytes]) -> None:
        try:
            async with self._client.lend("forget") as link:
                start = self._prefix(link.run)
                self._fates[Fate.FORGOTTEN] += await link.call(
                    _FORGET, [start + b"k" + key_name(key) for key in keys], (start,)
                )
        except StoreFailed:
            return

    async def _end(self, keys: Sequence[bytes], conversations: Sequence[str]) -> bool:
        try:
            async with self._client.lend("end") as link:
                start = self._prefix(link.run)
                heads = await link.call(_END, [start + b"k" + key_name(key) for key in keys], (start, *conversations))
        except StoreFailed:
            return False
        self._fates[Fate.ENDED] += len(heads)
        self._dropped(heads, Fate.ENDED)
        return True

    def _dropped(self, heads: Iterable[bytes], fate: Fate, kept: str = "") -> None:
        """Tell of the leases of entries that are gone. `kept`: one that lives on under other keys."""
        for head in heads:
            found = read_lease(bytes(head))
            if found is not None and found[1] != kept:
                self._on_drop(*found, fate)

    def _late(self) -> PutResult:
        self._fates[Fate.LATE] += 1
        return PutResult.LATE

    def _damaged(self, count: int) -> None:
        self._metrics.failures["open", FailureKind.DAMAGED.value].inc(count)
        log.warning("%d values in the handle store could not be read and were removed", count)

    def _prefix(self, run: str) -> bytes:
        found = self._prefixes.get(run)
        if found is None:
            self._prefixes = {run: prefix(self._realm, run)}
            found = self._prefixes[run]
        return found


_HEAD_BYTES: Final = 4096
"""What an entry has besides its handle, at most."""
_WITHOUT: Final = Opened(0, None)
