"""The handle store of one router process, bounded in bytes, entries and time.

Synchronous, so that a take cannot be interleaved. Entries arrive in order of time and all of a kind live equally long,
so the oldest is also the next to expire: one ordered dict per kind serves as expiry queue and as eviction order. Shared
entries that were used go before all others when room is needed: the turn that used one leaves a longer one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pd_router.core.linking import is_id_key
from pd_router.core.pinned import Pinned
from pd_router.core.store import Entry, Fate, Found, OnDrop, Opened, PutResult, Stats, tell_nobody

_TURNS_PER_ENTRY: Final = 2
"""Conversations whose turn numbers are remembered, per entry that the store may hold."""


@dataclass(slots=True)
class MemoryStore:
    """The store of one router process.

    Args:
        cap_bytes: of handles and their bookkeeping.
        cap_entries: handles.
        router_ttl: seconds after its arrival for which a handle is handed out; below the engine's.
        engine_ttl: seconds for which D keeps the blocks, whether or not the handle is still here.
        shared_ttl: seconds after its arrival for which a shared handle is handed out.
    """

    cap_bytes: int
    cap_entries: int
    router_ttl: float
    engine_ttl: float
    shared_ttl: float = 3600.0
    _on_drop: OnDrop = field(default=tell_nobody)
    _index: dict[bytes, Entry] = field(default_factory=dict)
    _single: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """By `id`, in order of arrival. Not a plain dict: taking from its front walks over all the holes left there."""
    _shared: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    _conversations: dict[str, dict[int, Entry]] = field(default_factory=dict)
    _used: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """Shared entries that a turn has used, least recently used first."""
    _leased: dict[str, Entry] = field(default_factory=dict)
    """Lease → the newest entry that has it, which alone answers for it: a turn may have carried it on."""
    _latest: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Id key → its newest turn, least recently begun first."""
    _bytes: int = 0
    _turn: int = 0
    _stored: int = 0
    _fates: Counter[str] = field(default_factory=Counter)
    _pinned: Pinned = field(init=False)

    def __post_init__(self) -> None:
        self._pinned = Pinned(self.engine_ttl)

    def report_to(self, on_drop: OnDrop) -> None:
        """See `HandleStore`."""
        self._on_drop = on_drop

    def start(self) -> None:
        """See `HandleStore`."""

    async def stop(self) -> None:
        """See `HandleStore`."""

    def open(self, keys: Sequence[bytes], now: float) -> Opened:
        """See `HandleStore`."""
        return Opened(self.begin(keys, now), self.take(keys, now))

    def begin(self, keys: Sequence[bytes], now: float) -> int:
        """Give a turn its number."""
        self._turn += 1
        latest = self._latest
        for key in keys:
            if is_id_key(key):
                latest[key] = self._turn
                latest.move_to_end(key)
        while len(latest) > self.cap_entries * _TURNS_PER_ENTRY:
            latest.popitem(last=False)
        return self._turn

    def take(self, keys: Sequence[bytes], now: float) -> Found | None:
        """Take the first live entry that one of `keys` leads to."""
        for key in keys:
            entry = self._index.get(key)
            if entry is None:
                continue
            if now - entry.arrived >= self._ttl(entry):
                self._remove(entry, Fate.EXPIRED)
                continue
            if entry.shared:
                self._used[id(entry)] = entry
                self._used.move_to_end(id(entry))
            else:
                self._remove(entry, Fate.TAKEN)
            return Found(entry, key)
        return None

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult:
        """See `HandleStore`."""
        if not entry.shared:
            self._pinned.add(entry.holder, entry.arrived, entry.remote_tokens)
        if not keys:
            return PutResult.NO_KEY
        free = tuple([key for key in keys if not self._held_by_newer(key, entry.turn)])
        if not free:
            self._fates[Fate.LATE] += 1
            return PutResult.LATE
        if entry.size > self.cap_bytes or self.cap_entries < 1:
            self._fates[Fate.TOO_LARGE] += 1
            return PutResult.TOO_LARGE
        if entry.lease:
            self._leased[entry.lease] = entry
        self._claim(free)
        self.expire(now)
        self._make_room(entry.size)
        entry.keys = free
        self._queue(entry)[id(entry)] = entry
        for key in free:
            self._index[key] = entry
        for conversation in entry.conversations:
            self._conversations.setdefault(conversation, {})[id(entry)] = entry
        self._bytes += entry.size
        self._stored += 1
        return PutResult.STORED if len(free) == len(keys) else PutResult.PARTLY_LATE

    def spent(self, entry: Entry) -> None:
        """See `HandleStore`."""
        if not entry.shared:
            self._pinned.release(entry.holder, entry.arrived, entry.remote_tokens)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `HandleStore`."""
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and not entry.shared:
                self._remove(entry, Fate.FORGOTTEN)

    def end(self, keys: Sequence[bytes], conversations: Sequence[str], now: float) -> bool:
        """See `HandleStore`."""
        gone = {id(entry): entry for key in keys if (entry := self._index.get(key)) is not None}
        for conversation in conversations:
            gone |= self._conversations.get(conversation, {})
        for entry in gone.values():
            self._remove(entry, Fate.ENDED)
        return True

    def purge_holder(self, holder: str, now: float) -> int:
        """See `HandleStore`. Walks all entries; called when a process died, not per turn."""
        gone = [entry for queue in self._queues for entry in queue.values() if entry.holder == holder]
        for entry in gone:
            self._remove(entry, Fate.PURGED)
        self._pinned.forget(holder)
        return len(gone)

    def expire(self, now: float) -> int:
        """See `HandleStore`."""
        count = 0
        for queue, ttl in ((self._single, self.router_ttl), (self._shared, self.shared_ttl)):
            while queue:
                entry = next(iter(queue.values()))
                if now - entry.arrived < ttl:
                    break
                self._remove(entry, Fate.EXPIRED)
                count += 1
        return count

    def stats(self, now: float) -> Stats:
        """See `HandleStore`."""
        handles, tokens = self._pinned.totals(now)
        return Stats(self._count, self._bytes, dict(self._fates), self._stored, handles, tokens)

    @property
    def _count(self) -> int:
        return len(self._single) + len(self._shared)

    @property
    def _queues(self) -> tuple[OrderedDict[int, Entry], OrderedDict[int, Entry]]:
        return self._single, self._shared

    def _queue(self, entry: Entry) -> OrderedDict[int, Entry]:
        return self._shared if entry.shared else self._single

    def _ttl(self, entry: Entry) -> float:
        return self.shared_ttl if entry.shared else self.router_ttl

    def _held_by_newer(self, key: bytes, turn: int) -> bool:
        if self._latest.get(key, 0) > turn:
            return True
        there = self._index.get(key)
        return there is not None and there.turn > turn

    def _claim(self, keys: Sequence[bytes]) -> None:
        """Take keys away from older entries; an entry that loses its last one is out of reach and goes. One that loses
        an id was left by an earlier turn of the conversation, and needs no lease any more."""
        for key in keys:
            old = self._index.get(key)
            if old is None:
                continue
            old.keys = tuple([other for other in old.keys if other != key])
            del self._index[key]
            if not old.keys:
                self._remove(old, Fate.OVERWRITTEN)
            elif is_id_key(key):
                self._give_up_lease(old, Fate.OVERWRITTEN)

    def _make_room(self, size: int) -> None:
        while (count := self._count) and (count >= self.cap_entries or self._bytes + size > self.cap_bytes):
            self._remove(self._first_to_go(), Fate.EVICTED)

    def _first_to_go(self) -> Entry:
        if self._used:
            return next(iter(self._used.values()))
        fronts = [next(iter(queue.values())) for queue in self._queues if queue]
        return min(fronts, key=lambda entry: entry.arrived)

    def _remove(self, entry: Entry, fate: Fate) -> None:
        del self._queue(entry)[id(entry)]
        self._used.pop(id(entry), None)
        for key in entry.keys:
            del self._index[key]
        for conversation in entry.conversations:
            there = self._conversations[conversation]
            del there[id(entry)]
            if not there:
                del self._conversations[conversation]
        self._bytes -= entry.size
        self._fates[fate] += 1
        self._give_up_lease(entry, fate)

    def _give_up_lease(self, entry: Entry, fate: Fate) -> None:
        if self._leased.get(entry.lease) is not entry:
            return
        given_up, entry.lease = entry.lease, ""
        del self._leased[given_up]
        if fate is not Fate.PURGED:
            self._on_drop(entry.holder, given_up, fate)
