"""What a worker has in place of its own store, meter and responses: those of the supervisor, one question away.

The ports are the same as those of the parts in memory, so a turn does not know. The rule for failures is that of a
store in Valkey: no answer in time is a miss, nothing more is asked until the answers come again, and a turn that could
not be opened leaves nothing. Tenants' limits then don't hold, since a stalled supervisor must not stop traffic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from pd_router.core.errors import ApiError
from pd_router.core.jsontext import decode_exactly, encode, lost_integers
from pd_router.core.settings import Settings
from pd_router.core.store import Entry, Fate, Found, OnDrop, Opened, PutResult, Stats, tell_nobody
from pd_router.core.store_settings import FailureKind
from pd_router.core.worker_wire import Message, plain, read_entry, read_keys, write_entry, write_keys
from pd_router.shell.channel import Channel, ChannelError
from pd_router.shell.store_metrics import SharedStoreMetrics

log = logging.getLogger("pd_router.workers")

WAIT_SECONDS: Final = 1.0
"""For an answer. They come in less than a millisecond; a machine that is out of breath may take longer."""
LOOK_SECONDS: Final = 0.25
_WITHOUT: Final = Opened(0, None)


class Line:
    """The channel to the supervisor, with a bound on waiting and on what is told later. `watch` has to run."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.up = True
        """Whether the last question was answered."""
        self.on_change: Callable[[bool], None] = lambda _up: None
        channel.on_late = lambda: self._set(True)

    async def ask(self, verb: str, *words: Any, raw: bytes = b"") -> Message | None:
        """The answer, or None."""
        if not self.up:
            return None
        try:
            return await self._channel.ask(verb, *words, raw=raw)
        except ChannelError:
            return None

    def tell(self, verb: str, *words: Any) -> None:
        """News that may be lost."""
        if self.up:
            self._channel.tell(verb, *words)

    def tell_later(self, verb: str, *words: Any) -> None:
        """News that may be lost, and may come a little later."""
        if self.up:
            self._channel.tell_later(verb, *words)

    async def watch(self) -> None:
        """Give up questions that are not answered, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._channel.flush()
            if self._channel.give_up(loop.time() - WAIT_SECONDS):
                self._set(False)

    def _set(self, up: bool) -> None:
        if up != self.up:
            self.up = up
            self.on_change(up)
            log.warning("the supervisor %s", "answers again" if up else "does not answer; turns go on without a store")


class WorkerStore:
    """See `HandleStore`.

    Args:
        incarnation_of: `Fleet.incarnation_of`.
    """

    def __init__(
        self, line: Line, metrics: SharedStoreMetrics, incarnation_of: Callable[[str, str, float], str]
    ) -> None:
        self._on_drop: OnDrop = tell_nobody
        self._line = line
        self._metrics = metrics
        self._incarnation_of = incarnation_of
        metrics.up.set(1)
        line.on_change = metrics.up.set

    def report_to(self, on_drop: OnDrop) -> None:
        """See `HandleStore`."""
        self._on_drop = on_drop

    def start(self) -> None:
        """The channel is open."""

    async def stop(self) -> None:
        """The channel ends with the process."""

    def open(self, keys: Sequence[bytes], now: float) -> Opened | Awaitable[Opened]:
        """See `HandleStore`. Without an answer the turn has number 0."""
        if not self._line.up:
            self._metrics.skipped["open"].inc()
            return _WITHOUT
        return self._open(keys)

    def put(self, entry: Entry, keys: Sequence[bytes], now: float) -> PutResult | Awaitable[PutResult]:
        """See `HandleStore`."""
        if not self._line.up or not entry.turn:
            self._metrics.skipped["put"].inc()
            return PutResult.UNAVAILABLE
        return self._put(entry, keys)

    def forget(self, keys: Sequence[bytes]) -> Awaitable[None] | None:
        """See `HandleStore`."""
        if not self._line.up or not keys:
            return None
        return self._forget(keys)

    def end(self, keys: Sequence[bytes], conversations: Sequence[str], now: float) -> bool | Awaitable[bool]:
        """See `HandleStore`."""
        if not self._line.up:
            self._metrics.skipped["end"].inc()
            return False
        return self._end(keys, conversations)

    def spent(self, entry: Entry) -> None:
        """See `HandleStore`."""
        self._line.tell_later("spent", write_entry(entry))

    def purge_holder(self, holder: str, now: float) -> int:
        """See `HandleStore`. The supervisor counts them."""
        self._line.tell("purge", holder)
        return 0

    def expire(self, now: float) -> int:
        """See `HandleStore`. The supervisor does it."""
        return 0

    def stats(self, now: float) -> Stats:
        """See `HandleStore`. The figures are the supervisor's."""
        return Stats(None, None, {}, 0, {}, {})

    async def _open(self, keys: Sequence[bytes]) -> Opened:
        answer = await self._ask("open", write_keys(keys))
        if answer is None:
            return _WITHOUT
        turn, *found = answer.words
        if not found:
            return Opened(turn, None)
        key, words = found
        entry = read_entry(words, answer.raw)
        # One machine, one clock: the moments that another worker wrote down are this one's, too.
        entry.incarnation = self._incarnation_of(entry.holder, entry.identity, entry.sent)
        entry.own = False
        return Opened(turn, Found(entry, read_keys([key])[0]))

    async def _put(self, entry: Entry, keys: Sequence[bytes]) -> PutResult:
        answer = await self._ask("put", write_entry(entry), write_keys(keys), raw=entry.raw)
        self._dropped(answer)
        return PutResult.UNAVAILABLE if answer is None else PutResult(answer.words[0])

    async def _forget(self, keys: Sequence[bytes]) -> None:
        self._dropped(await self._ask("forget", write_keys(keys)))

    async def _end(self, keys: Sequence[bytes], conversations: Sequence[str]) -> bool:
        answer = await self._ask("end", write_keys(keys), list(conversations))
        self._dropped(answer)
        return answer is not None

    def _dropped(self, answer: Message | None) -> None:
        """The supervisor talks to no engine; whoever asks it something next ends the leases of what it dropped."""
        for holder, lease, fate in () if answer is None else answer.words[1]:
            self._on_drop(holder, lease, Fate(fate))

    async def _ask(self, verb: str, *words: Any, raw: bytes = b"") -> Message | None:
        begun = time.monotonic()
        answer = await self._line.ask(verb, *words, raw=raw)
        self._metrics.seconds[verb].observe(time.monotonic() - begun)
        if answer is None:
            self._metrics.failures[verb, FailureKind.TIMEOUT.value].inc()
        return answer


class WorkerMeter:
    """See `Meter`."""

    def __init__(self, line: Line, counts: bool) -> None:
        """``counts``: whether there is a limit; if not, nothing is asked."""
        self._line = line
        self._counts = counts

    def enter(self, tenant: str | None, now: float) -> str | Awaitable[str | None] | None:
        """See `Meter`."""
        return self._enter(tenant) if self._counts else None

    def leave(self, key: str | None) -> None:
        """See `Meter`."""
        if key is not None:
            self._line.tell("leave", key)

    async def _enter(self, tenant: str | None) -> str | None:
        answer = await self._line.ask("enter", None if tenant is None else plain(tenant))
        if answer is None:
            return None
        key, *refusal = answer.words
        if refusal:
            status, message, kind, code, retry_after = refusal
            raise ApiError(status, message, kind, code, retry_after=retry_after)
        found: str | None = key
        return found


class WorkerRetained:
    """See `RetainedTokens`."""

    def __init__(self, line: Line, limit: int) -> None:
        self._line = line
        self._limit = limit

    def has_room(self, tenant: str, tokens: int, now: float) -> bool | Awaitable[bool]:
        """See `RetainedTokens`."""
        return self._has_room(tenant, tokens) if self._limit else True

    def add(self, tenant: str, holder: str, tokens: int, now: float) -> None:
        """See `RetainedTokens`."""
        if self._limit:
            self._line.tell("retain", plain(tenant), holder, tokens)

    def release(self, tenant: str, holder: str, tokens: int) -> None:
        """See `RetainedTokens`."""
        if self._limit:
            self._line.tell("release", plain(tenant), holder, tokens)

    def prolong(
        self, tenant: str, holder: str, token: str, tokens: int, seconds: float, now: float
    ) -> bool | Awaitable[bool]:
        """See `RetainedTokens`."""
        return self._prolong(tenant, holder, token, tokens, seconds) if self._limit else True

    def let_go(self, token: str) -> None:
        """See `RetainedTokens`."""
        if self._limit:
            self._line.tell("let_go", token)

    def forget_holder(self, holder: str) -> None:
        """A second word where the store's purge says it; with a store of routers nobody else does."""
        if self._limit:
            self._line.tell("purge", holder)

    def expire(self, now: float) -> None:
        """The supervisor does it."""

    async def _has_room(self, tenant: str, tokens: int) -> bool:
        answer = await self._line.ask("has_room", plain(tenant), tokens)
        return True if answer is None else bool(answer.words[0])

    async def _prolong(self, tenant: str, *words: Any) -> bool:
        answer = await self._line.ask("prolong", plain(tenant), *words)
        return True if answer is None else bool(answer.words[0])


class WorkerLeases:
    """See `Others`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def ended(self, token: str) -> None:
        """See `Others`."""
        self._line.tell("ended", token)

    def taken(self, token: str) -> None:
        """See `Others`."""
        self._line.tell("taken", token)

    async def elsewhere(self, tokens: Sequence[str]) -> Sequence[str]:
        """See `Others`."""
        answer = await self._line.ask("elsewhere", list(tokens))
        return () if answer is None else answer.words[0]


class WorkerResponses:
    """See `Responses`."""

    def __init__(self, line: Line, cap_bytes: int) -> None:
        self._line = line
        self._cap = cap_bytes

    def put(self, tenant: str, answer_id: str, before: str | None, items: Sequence[Any]) -> bool | Awaitable[bool]:
        """See `Responses`."""
        try:
            raw = encode(list(items))
        except ValueError:
            return False
        if not answer_id or len(raw) > self._cap:
            return False
        return self._put(tenant, answer_id, before, raw)

    def recall(self, tenant: str, answer_id: str) -> list[Any] | Awaitable[list[Any] | None] | None:
        """See `Responses`."""
        return self._recall(tenant, answer_id) if self._cap else None

    async def _put(self, tenant: str, answer_id: str, before: str | None, raw: bytes) -> bool:
        words = (plain(tenant), plain(answer_id), None if before is None else plain(before))
        answer = await self._line.ask("keep", *words, raw=raw)
        return answer is not None and bool(answer.words[0])

    async def _recall(self, tenant: str, answer_id: str) -> list[Any] | None:
        answer = await self._line.ask("recall", plain(tenant), plain(answer_id))
        if answer is None or not answer.words[0]:
            return None
        chain: list[list[Any]] = decode_exactly(answer.raw) if lost_integers(answer.raw) else orjson.loads(answer.raw)
        return [item for items in chain for item in items]


class Shared:
    """What a worker's router is made with in place of parts of its own."""

    def __init__(self, line: Line, secret: bytes, settings: Settings) -> None:
        """``secret``: of the keyring. ``settings``: the worker's share of the router's."""
        limits = settings.tenant_limits
        self.line = line
        self.secret = secret
        self.meter = WorkerMeter(line, limits.counts)
        self.retained = WorkerRetained(line, limits.retained_tokens)
        self.leases = WorkerLeases(line)
        self.responses = WorkerResponses(line, settings.limits.response_bytes)
