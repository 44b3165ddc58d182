"""What the workers of one router share, kept by the supervisor: handles, responses, what tenants use, whose leases are.

Separate from the supervisor because nothing here starts or watches a process. Each question is answered before the next
message of any worker is read, so a take is as atomic as in one process. The caps and limits are those of the whole
router. With a store in Valkey each worker talks to that itself, and only the rest is kept here.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

from pd_router.core.errors import ApiError
from pd_router.core.response_store import ResponseStore
from pd_router.core.settings import Settings
from pd_router.core.store import Fate
from pd_router.core.store_memory import MemoryStore
from pd_router.core.tenant_limits import Retained, TenantMeter
from pd_router.core.worker_wire import read_entry, read_keys, write_entry, write_keys
from pd_router.shell.channel import Answer

_MAX_DROPPED: Final = 4096
"""Leases of dropped handles that wait for a worker to end them; of more the oldest run out."""
_DROPS_AT_ONCE: Final = 256
_MAX_LEASES: Final = 16_384
"""Leases that were ended or taken and are remembered: whoever still prolongs one hears of it within a heartbeat."""


class StoreServer:
    """What is shared. `desk` gives each worker's messages a place to go."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        reuse, limits = settings.reuse, settings.tenant_limits
        self.now = now
        self.secret = secrets.token_bytes(32)
        """Of the keyring, so that all workers make the same keys."""
        self.store = MemoryStore(
            reuse.cap_bytes, reuse.cap_entries, reuse.handle_ttl, reuse.engine_ttl, reuse.shared_ttl
        )
        self.store.report_to(self._dropped)
        self._drops: deque[tuple[str, str, str]] = deque(maxlen=_MAX_DROPPED)
        self.leases: OrderedDict[str, Desk | None] = OrderedDict()
        """Token to the one worker that may prolong it; None: it was ended."""
        self.meter = TenantMeter(limits)
        self.retained = Retained(limits.retained_tokens, reuse.engine_ttl)
        self.responses = ResponseStore(settings.limits.response_bytes)

    def desk(self) -> Desk:
        """For one worker."""
        return Desk(self)

    def _dropped(self, holder: str, lease: str, fate: Fate) -> None:
        self._drops.append((holder, lease, fate.value))

    def drops(self) -> list[tuple[str, str, str]]:
        """Holder, lease and fate of dropped handles, each told once: to the worker that is answered next."""
        return [self._drops.popleft() for _ in range(min(len(self._drops), _DROPS_AT_ONCE))]

    def sweep(self) -> None:
        """Drop what is too old."""
        now = self.now()
        self.store.expire(now)
        self.retained.expire(now)


class Desk:
    """Answers one worker, and knows what to give back when it ends."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._places: Counter[str] = Counter()
        self._verbs: dict[str, Callable[[list[Any], bytes], Answer | None]] = {
            "secret": lambda _words, _raw: ((), server.secret),
            "open": self._open,
            "put": self._put,
            "spent": self._spent,
            "forget": self._forget,
            "end": self._end,
            "purge": self._purge,
            "enter": self._enter,
            "leave": self._leave,
            "has_room": self._has_room,
            "retain": self._retain,
            "release": self._release,
            "prolong": self._prolong,
            "let_go": lambda words, _raw: server.retained.let_go(words[0]),
            "ended": self._ended,
            "taken": self._taken,
            "elsewhere": self._elsewhere,
            "recall": self._recall,
            "keep": self._keep,
        }

    def handle(self, verb: str, words: list[Any], raw: bytes) -> Answer | None:
        """One message. Raises KeyError for a verb that is not one of these."""
        return self._verbs[verb](words, raw)

    def close(self) -> None:
        """The worker is gone, and the requests that it served with it."""
        for key, count in self._places.items():
            for _ in range(count):
                self._server.meter.leave(key)
        self._places.clear()

    # -- handles -----------------------------------------------------------------------------------
    def _open(self, words: list[Any], _raw: bytes) -> Answer:
        keys = read_keys(words[0])
        opened = self._server.store.open(keys, self._server.now())
        if opened.found is None:
            return (opened.turn,), b""
        entry, key = opened.found
        return (opened.turn, write_keys([key])[0], write_entry(entry)), entry.raw

    def _put(self, words: list[Any], raw: bytes) -> Answer:
        entry = read_entry(words[0], raw)
        result = self._server.store.put(entry, read_keys(words[1]), self._server.now())
        return (result.value, self._server.drops()), b""

    def _spent(self, words: list[Any], _raw: bytes) -> None:
        self._server.store.spent(read_entry(words[0], b""))

    def _forget(self, words: list[Any], _raw: bytes) -> Answer:
        self._server.store.forget(read_keys(words[0]))
        return (True, self._server.drops()), b""

    def _end(self, words: list[Any], _raw: bytes) -> Answer:
        self._server.store.end(read_keys(words[0]), words[1], self._server.now())
        return (True, self._server.drops()), b""

    def _purge(self, words: list[Any], _raw: bytes) -> None:
        """One worker's connection to an engine broke. The others' will, too; until then they refuse what is of it."""
        self._server.store.purge_holder(words[0], self._server.now())
        self._server.retained.forget_holder(words[0])

    # -- tenants -----------------------------------------------------------------------------------
    def _enter(self, words: list[Any], _raw: bytes) -> Answer:
        try:
            key = self._server.meter.enter(words[0], self._server.now())
        except ApiError as error:
            return (None, error.status, error.message, error.type, error.code, error.retry_after), b""
        if key is not None:
            self._places[key] += 1
        return (key,), b""

    def _leave(self, words: list[Any], _raw: bytes) -> None:
        key = words[0]
        if self._places[key]:
            self._places[key] -= 1
            self._server.meter.leave(key)

    def _has_room(self, words: list[Any], _raw: bytes) -> Answer:
        tenant, tokens = words
        return (self._server.retained.has_room(tenant, tokens, self._server.now()),), b""

    def _retain(self, words: list[Any], _raw: bytes) -> None:
        tenant, holder, tokens = words
        self._server.retained.add(tenant, holder, tokens, self._server.now())

    def _release(self, words: list[Any], _raw: bytes) -> None:
        self._server.retained.release(*words)

    # -- leases ------------------------------------------------------------------------------------
    def _prolong(self, words: list[Any], _raw: bytes) -> Answer:
        tenant, holder, token, tokens, seconds = words
        if self._server.leases.get(token, self) is None:
            return (True,), b""  # nobody will prolong it, as its worker hears before it tries
        return (self._server.retained.prolong(tenant, holder, token, tokens, seconds, self._server.now()),), b""

    def _ended(self, words: list[Any], _raw: bytes) -> None:
        self._say(words[0], None)
        self._server.retained.let_go(words[0])

    def _taken(self, words: list[Any], _raw: bytes) -> None:
        if self._server.leases.get(words[0], self) is not None:
            self._say(words[0], self)

    def _say(self, token: str, whose: Desk | None) -> None:
        leases = self._server.leases
        leases[token] = whose
        leases.move_to_end(token)
        if len(leases) > _MAX_LEASES:
            leases.popitem(last=False)

    def _elsewhere(self, words: list[Any], _raw: bytes) -> Answer:
        leases = self._server.leases
        return ([token for token in words[0] if leases.get(token, self) is not self],), b""

    # -- responses ---------------------------------------------------------------------------------
    def _recall(self, words: list[Any], _raw: bytes) -> Answer:
        chain = self._server.responses.recall_encoded(*words)
        return ((False,), b"") if chain is None else ((True,), b"[" + b",".join(chain) + b"]")

    def _keep(self, words: list[Any], raw: bytes) -> Answer:
        tenant, answer_id, before = words
        return (self._server.responses.put_encoded(tenant, answer_id, before, raw),), b""
