"""Where handles wait between two turns, bounded in bytes and time: a handle that is good for one send is taken once.

Separate from policy: a store knows nothing of proofs or engines, it keeps and hands out. Two implement the port: one in
this process (`store_memory`), one that several routers share (`shell/valkey_store`). A verb that has to wait returns an
awaitable in place of its result, so that a turn over a store in memory never gives up its place in the loop.

Time is the router's monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from pd_router.core.cutting import Handle
from pd_router.core.jsontext import RawJson, decode_exactly, encode
from pd_wire import lease
from pd_wire.handle import data_parallel_rank, is_unpinned
from pd_wire.names import LEASE_KEY, PROOF_KEY

ENTRY_OVERHEAD: Final = 1024
"""Bytes that one entry costs besides its handle: the objects and dict slots of an entry with two keys, rounded up."""


class PutResult(StrEnum):
    """What became of a new handle."""

    STORED = "stored"
    PARTLY_LATE = "partly_late"
    """Stored by history only: a newer turn of the same id has begun."""
    LATE = "late"
    TOO_LARGE = "too_large"
    NO_KEY = "no_key"
    EXPIRED = "expired"
    """It is too old by now: the way to the store took so long."""
    UNAVAILABLE = "store_unavailable"


class Fate(StrEnum):
    """How a handle left the store."""

    TAKEN = "taken"
    EXPIRED = "expired"
    EVICTED = "evicted"
    OVERWRITTEN = "overwritten"
    PURGED = "purged"
    FORGOTTEN = "forgotten"
    ENDED = "ended"
    """Its client ended the conversation."""
    LATE = "late"
    TOO_LARGE = "too_large"


OnDrop = Callable[[str, str, Fate], None]
"""Told of the holder, the lease and the fate of a handle that no next turn will find, where it has a lease."""


def tell_nobody(_holder: str, _lease: str, _fate: Fate) -> None:
    """For a store whose leases are to run out by themselves."""


class Ticket(NamedTuple):
    """A turn's place in a shared store, for its own put: where its number counts and what the time is there."""

    run: str
    """The server process; a number of one says nothing about another's."""
    era: int
    """Changes when the server's clock is set back or its data is dropped."""
    server_ms: int
    """The server's clock at `at` or before."""
    at: float


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
    shared: bool = False
    """It is not spent by a send, so that any number of turns may use it: a take leaves it where it is."""
    lease: str = ""
    """The holder's promise to keep the blocks, as in `pd_wire.lease`; "" where there is none, or it was ended."""
    behind: int = 0
    """Estimated tokens of the turns since D kept the blocks, which left no handle of their own."""
    keys: tuple[bytes, ...] = ()
    sent: float = 0.0
    """When the turn that left it was sent to the holder."""
    identity: str = ""
    """What other routers know the holder's process by; "" when it is not the one that the turn was sent to."""
    ticket: Ticket | None = None
    own: bool = True
    """It was put by this process."""
    conversations: Sequence[str] = ()
    """What its client may name to end the conversation: `Keyring.conversation` of each id."""

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
        sent: float = 0.0,
        identity: str = "",
        ticket: Ticket | None = None,
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
            shared=is_unpinned(handle),
            lease=str(lease.parse(handle[LEASE_KEY]) or "") if LEASE_KEY in handle else "",
            sent=sent,
            identity=identity,
            ticket=ticket,
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


class Opened(NamedTuple):
    """A turn that began: its number, what it took, and its place in a shared store."""

    turn: int
    found: Found | None
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures for metrics. Pinned figures are an estimate: nothing tells the router when D really frees.

    `entries` and `bytes` are None where the store is not this router's own.
    """

    entries: int | None
    bytes: int | None
    fates: Mapping[str, int]
    stored: int
    pinned_handles: Mapping[str, int]
    pinned_tokens: Mapping[str, int]


class HandleStore(Protocol):
    """The port. Every implementation passes `tests/unit/router/store_behaviour.py`."""

    def report_to(self, on_drop: OnDrop) -> None:
        """Call it from here on. Before that, leases of what is dropped run out by themselves."""

    def start(self) -> None:
        """Begin to work. Nothing waits for a store: until it is there, turns find nothing."""

    async def stop(self) -> None:
        """Let go of everything."""

    def open(self, keys: Sequence[bytes], now: float) -> Opened | Awaitable[Opened]:
        """A turn starts. Give it a number, higher than every earlier one, and take the first live entry that one of
        `keys` leads to: with all its keys, so that at most one turn gets it, unless it is shared."""

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult | Awaitable[PutResult]:
        """Keep a handle under those of `keys` that no newer turn holds."""

    def spent(self, entry: Entry) -> None:
        """A taken handle was sent: its blocks are given back by the read, so they no longer count as pinned. Nothing to
        do for a shared one."""

    def forget(self, keys: Sequence[bytes]) -> Awaitable[None] | None:
        """Drop what `keys` lead to: the conversation went on without a handle. A shared one stays: it is of the
        conversation's beginning."""

    def end(self, keys: Sequence[bytes], conversations: Sequence[str], now: float) -> bool | Awaitable[bool]:
        """Drop what `keys` lead to and all that was put for `conversations`, shared or not: no turn follows. Returns
        whether it is gone for sure."""

    def purge_holder(self, holder: str, now: float) -> int:
        """Hand out no handle any more of an engine whose process is gone; how many were dropped for it."""

    def expire(self, now: float) -> int:
        """Drop what is too old; how many there were."""

    def stats(self, now: float) -> Stats:
        """Figures as of now."""
