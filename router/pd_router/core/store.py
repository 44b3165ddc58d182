"""Where handles wait between two turns: one take per handle, bounded in bytes, entries and time.

Separate from policy: the store knows nothing of proofs or engines, it keeps and hands out. `HandleStore` is the port;
`MemoryStore` keeps everything in this process and is synchronous, so a take cannot be interleaved. An external store
(atomic take by script) implements the same verbs behind an asynchronous port of the shell.

Time is the router's monotonic clock, in seconds. Entries arrive in order of time and all live equally long, so the
oldest is also the next to expire: one ordered dict serves as expiry queue and as eviction order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from pd_router.core.cutting import Handle
from pd_router.core.jsontext import RawJson, decode_exactly, encode
from pd_router.core.linking import is_id_key
from pd_router.core.pinned import Pinned
from pd_wire.handle import data_parallel_rank
from pd_wire.names import PROOF_KEY

ENTRY_OVERHEAD: Final = 1024
"""Bytes that one entry costs besides its handle: the objects and dict slots of an entry with two keys, rounded up."""
_TURNS_PER_ENTRY: Final = 2
"""Conversations whose turn numbers are remembered, per entry that the store may hold."""


class PutResult(StrEnum):
    """What became of a new handle."""

    STORED = "stored"
    PARTLY_LATE = "partly_late"
    """Stored by history only: a newer turn of the same id has begun."""
    LATE = "late"
    TOO_LARGE = "too_large"
    NO_KEY = "no_key"


class Fate(StrEnum):
    """How a handle left the store."""

    TAKEN = "taken"
    EXPIRED = "expired"
    EVICTED = "evicted"
    OVERWRITTEN = "overwritten"
    PURGED = "purged"
    FORGOTTEN = "forgotten"
    LATE = "late"
    TOO_LARGE = "too_large"


@dataclass(slots=True, eq=False)
class Entry:
    """One handle. It is kept as JSON text: a fraction of the size of the objects, and sent as it came."""

    raw: bytes
    holder: str
    """Key of the engine whose memory it names."""
    incarnation: str
    generation: str
    arrived: float
    proven: bool
    """It carries a proof; whether the proof fits is the reader's finding."""
    inexact: str | None
    """Why a match by history does not prove that the prompt extends the stored tokens, or None."""
    turn: int
    remote_host: str
    remote_tokens: int
    groups: int
    rank: int | None = None
    """Data-parallel rank of the holder that has the blocks; None where it has one rank (HL-25)."""
    behind: int = 0
    """Estimated tokens of the turns since D kept the blocks, which left no handle of their own."""
    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        handle: Mapping[str, Any],
        *,
        holder: str,
        incarnation: str,
        generation: str,
        arrived: float,
        turn: int,
        inexact: str | None,
    ) -> Entry:
        """An entry for a handle that passed `policy.judge_handle`."""
        return cls(
            raw=handle.raw if isinstance(handle, Handle) else encode(handle),
            holder=holder,
            incarnation=incarnation,
            generation=generation,
            arrived=arrived,
            proven=handle.get(PROOF_KEY) is not None,
            inexact=inexact,
            turn=turn,
            remote_host=handle["remote_host"],
            remote_tokens=handle["remote_num_tokens"],
            groups=len(handle["remote_block_ids"]),
            rank=data_parallel_rank(handle),
        )

    @property
    def handle(self) -> RawJson:
        """The handle as it goes into a request body: the very text that the engine returned."""
        return RawJson(self.raw)

    def parsed(self) -> dict[str, Any]:
        """The handle as a value."""
        value: dict[str, Any] = decode_exactly(self.raw)
        return value

    @property
    def size(self) -> int:
        """Bytes that this entry counts for."""
        return len(self.raw) + ENTRY_OVERHEAD


class Found(NamedTuple):
    """A taken entry and the key that led to it."""

    entry: Entry
    key: bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures for metrics. Pinned figures are an estimate: nothing tells the router when D really frees."""

    entries: int
    bytes: int
    fates: Mapping[str, int]
    stored: int
    pinned_handles: Mapping[str, int]
    pinned_tokens: Mapping[str, int]


class HandleStore(Protocol):
    """The port. Every implementation passes `tests/unit/router/store_behaviour.py`."""

    def begin(self, keys: Sequence[bytes], now: float) -> int:
        """A turn starts: give it a number, higher than every earlier one."""

    def take(self, keys: Sequence[bytes], now: float) -> Found | None:
        """Remove the first live entry that one of `keys` leads to, with all its keys. At most one caller gets it."""

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult:
        """Keep a handle under those of `keys` that no newer turn holds."""

    def spent(self, entry: Entry) -> None:
        """A taken handle was sent: its blocks are given back by the read, so they no longer count as pinned."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop what `keys` lead to: the conversation went on without a handle."""

    def purge_holder(self, holder: str, now: float, incarnation: str | None = None) -> int:
        """Drop all handles of an engine whose process is gone, or of one incarnation of it; how many there were."""

    def expire(self, now: float) -> int:
        """Drop what is too old; how many there were."""

    def stats(self, now: float) -> Stats:
        """Figures as of now."""


@dataclass(slots=True)
class MemoryStore:
    """The store of one router process.

    Args:
        cap_bytes: of handles and their bookkeeping.
        cap_entries: handles.
        router_ttl: seconds after its arrival for which a handle is handed out; below the engine's.
        engine_ttl: seconds for which D keeps the blocks, whether or not the handle is still here.
    """

    cap_bytes: int
    cap_entries: int
    router_ttl: float
    engine_ttl: float
    _index: dict[bytes, Entry] = field(default_factory=dict)
    _entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    """By `id`, in order of arrival. Not a plain dict: taking from its front walks over all the holes left there."""
    _latest: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Id key → its newest turn, least recently begun first."""
    _bytes: int = 0
    _turn: int = 0
    _stored: int = 0
    _fates: Counter[str] = field(default_factory=Counter)
    _pinned: Pinned = field(init=False)

    def __post_init__(self) -> None:
        self._pinned = Pinned(self.engine_ttl)

    def begin(self, keys: Sequence[bytes], now: float) -> int:
        """See `HandleStore`."""
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
        """See `HandleStore`."""
        for key in keys:
            entry = self._index.get(key)
            if entry is None:
                continue
            if now - entry.arrived >= self.router_ttl:
                self._remove(entry, Fate.EXPIRED)
                continue
            self._remove(entry, Fate.TAKEN)
            return Found(entry, key)
        return None

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult:
        """See `HandleStore`."""
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
        self._claim(free)
        self.expire(now)
        self._make_room(entry.size)
        entry.keys = free
        self._entries[id(entry)] = entry
        for key in free:
            self._index[key] = entry
        self._bytes += entry.size
        self._stored += 1
        return PutResult.STORED if len(free) == len(keys) else PutResult.PARTLY_LATE

    def spent(self, entry: Entry) -> None:
        """See `HandleStore`."""
        self._pinned.release(entry.holder, entry.arrived, entry.remote_tokens)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `HandleStore`."""
        for key in keys:
            entry = self._index.get(key)
            if entry is not None:
                self._remove(entry, Fate.FORGOTTEN)

    def purge_holder(self, holder: str, now: float, incarnation: str | None = None) -> int:
        """See `HandleStore`. Walks all entries; called when a process died, not per turn."""
        gone = [
            entry
            for entry in self._entries.values()
            if entry.holder == holder and (incarnation is None or entry.incarnation == incarnation)
        ]
        for entry in gone:
            self._remove(entry, Fate.PURGED)
        self._pinned.forget(holder)
        return len(gone)

    def expire(self, now: float) -> int:
        """See `HandleStore`."""
        count = 0
        oldest_allowed = now - self.router_ttl
        while self._entries:
            entry = next(iter(self._entries.values()))
            if entry.arrived > oldest_allowed:
                break
            self._remove(entry, Fate.EXPIRED)
            count += 1
        return count

    def stats(self, now: float) -> Stats:
        """See `HandleStore`."""
        handles, tokens = self._pinned.totals(now)
        return Stats(len(self._entries), self._bytes, dict(self._fates), self._stored, handles, tokens)

    def _held_by_newer(self, key: bytes, turn: int) -> bool:
        if self._latest.get(key, 0) > turn:
            return True
        there = self._index.get(key)
        return there is not None and there.turn > turn

    def _claim(self, keys: Sequence[bytes]) -> None:
        """Take keys away from older entries; an entry that loses its last one is out of reach and goes."""
        for key in keys:
            old = self._index.get(key)
            if old is None:
                continue
            old.keys = tuple([other for other in old.keys if other != key])
            del self._index[key]
            if not old.keys:
                self._remove(old, Fate.OVERWRITTEN)

    def _make_room(self, size: int) -> None:
        while self._entries and (len(self._entries) >= self.cap_entries or self._bytes + size > self.cap_bytes):
            self._remove(next(iter(self._entries.values())), Fate.EVICTED)

    def _remove(self, entry: Entry, fate: Fate) -> None:
        del self._entries[id(entry)]
        for key in entry.keys:
            del self._index[key]
        self._bytes -= entry.size
        self._fates[fate] += 1
