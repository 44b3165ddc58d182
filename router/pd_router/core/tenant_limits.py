"""What one tenant may use of what all share: requests per second, turns at one time, decode memory that it retains.

Separate from admission, which bounds the sum and knows no tenants. Tenants are kept track of in a bounded table; when
it is full of tenants that are in use, further ones share one place, so that invented tenants can't make it grow and
can't escape a limit either. All limits are per router and off by default.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, NamedTuple, Protocol

from pd_router.core.errors import ApiError, tenant_limit
from pd_router.core.linking import ANONYMOUS

RETRY_AFTER_SECONDS: Final = 1
_OTHERS: Final = "\0others"
_LOOKED_AT: Final = 8
_PURGE_EVERY: Final = 256


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Per tenant and per router; 0 is no limit."""

    rate: float = 0.0
    """Requests per second, in the long run."""
    burst: int = 0
    """Requests that may come at once after a pause; 0 is what one second allows, and at least one."""
    max_inflight: int = 0
    """Requests in the router at one time, waiting ones included."""
    queue_share: float = 1.0
    """Share of the queue that one tenant's waiting turns may fill, above 0 and at most 1."""
    retained_tokens: int = 0
    """Tokens that decode engines hold for the tenant's next turns: Pinned handles, and leases that are prolonged."""
    tracked: int = 10_000
    """Tenants that are told apart at one time."""

    @property
    def counts(self) -> bool:
        """Whether requests have to be counted at all."""
        return self.rate > 0 or self.max_inflight > 0

    @property
    def bucket(self) -> float:
        """Requests that a full bucket holds."""
        return float(self.burst) if self.burst else max(1.0, self.rate)


class Meter(Protocol):
    """Requests per tenant. Where it has to wait, as for one that counts for several processes, `enter` is awaitable."""

    def enter(self, tenant: str | None, now: float) -> str | Awaitable[str | None] | None:
        """A request comes in. Returns what to give to `leave`. Raises ApiError 429 at a limit."""

    def leave(self, key: str | None) -> None:
        """The request is over."""


class RetainedTokens(Protocol):
    """Tokens that decode engines hold per tenant; the same holds for `has_room` and `prolong`."""

    def has_room(self, tenant: str, tokens: int, now: float) -> bool | Awaitable[bool]:
        """Whether the tenant may retain so many tokens more."""

    def add(self, tenant: str, holder: str, tokens: int, now: float) -> None:
        """A handle was kept."""

    def release(self, tenant: str, holder: str, tokens: int) -> None:
        """A handle was sent to a reader."""

    def prolong(
        self, tenant: str, holder: str, token: str, tokens: int, seconds: float, now: float
    ) -> bool | Awaitable[bool]:
        """Whether the tenant may have a lease prolonged for so long; if so it is counted until then."""

    def let_go(self, token: str) -> None:
        """A lease is not prolonged any more."""

    def forget_holder(self, holder: str) -> None:
        """The engine's process is gone."""

    def expire(self, now: float) -> None:
        """Forget what engines have given up."""


@dataclass(slots=True)
class _Use:
    """One tenant's bucket and places."""

    tokens: float
    filled: float
    inflight: int = 0


class TenantMeter:
    """Counts each tenant's requests. `enter` before one, `leave` after it, exactly once each."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def enter(self, tenant: str | None, now: float) -> str | None:
        """Count one request. Returns what to give to `leave`; None when nothing is counted.

        Raises:
            ApiError: 429 with the time to wait, when the tenant is at a limit.
        """
        limits = self._limits
        if not limits.counts:
            return None
        key, use = self._find(tenant or ANONYMOUS, now)
        if limits.max_inflight and use.inflight >= limits.max_inflight:
            raise tenant_limit(
                "tenant_concurrency_limit", f"{limits.max_inflight} requests at one time", RETRY_AFTER_SECONDS
            )
        if limits.rate > 0:
            self._refill(use, now)
            if use.tokens < 1.0:
                wait = max(1, math.ceil((1.0 - use.tokens) / limits.rate))
                raise tenant_limit("tenant_rate_limit", f"{limits.rate:g} requests per second", wait)
            use.tokens -= 1.0
        use.inflight += 1
        return key

    def leave(self, key: str | None) -> None:
        """The request is over."""
        if key is not None:
            self._uses[key].inflight -= 1

    def _find(self, tenant: str, now: float) -> tuple[str, _Use]:
        uses = self._uses
        use = uses.get(tenant)
        if use is not None:
            uses.move_to_end(tenant)
            return tenant, use
        if len(uses) >= self._limits.tracked and not self._forget_one(now):
            tenant = _OTHERS
            if (use := uses.get(tenant)) is not None:
                return tenant, use
        use = uses[tenant] = _Use(self._limits.bucket, now)
        return tenant, use

    def _forget_one(self, now: float) -> bool:
        """Make room by forgetting a tenant of whom nothing would be known that a new one hasn't: whose bucket is full
        and who has no request. Only the ones that are unused the longest are looked at."""
        for tenant in list(islice(self._uses, _LOOKED_AT)):
            use = self._uses[tenant]
            self._refill(use, now)
            if use.inflight == 0 and use.tokens >= self._limits.bucket and tenant != _OTHERS:
                del self._uses[tenant]
                return True
        return False

    def _refill(self, use: _Use, now: float) -> None:
        limits = self._limits
        use.tokens = min(limits.bucket, use.tokens + max(0.0, now - use.filled) * limits.rate)
        use.filled = now


@dataclass(slots=True)
class _Held:
    tokens: int = 0
    entries: deque[tuple[float, str, int]] = field(default_factory=deque)
    """(arrival, holder, tokens) in order of arrival."""
    leased: int = 0
    """Tokens of leases that are prolonged."""


class _Leased(NamedTuple):
    tenant: str
    holder: str
    tokens: int
    until: float


class Retained:
    """Tokens that decode engines hold for each tenant: what was kept and neither read back nor given up by its engine.

    A tenant at its limit gets no further handle, and decode is told to retain nothing, rather than that its oldest
    handle goes: decode holds the blocks of a handle that nobody will use all the same, until its own timer ends, so
    dropping handles here would free nothing there.

    Of leases those count that are prolonged for a client's hold or its tools. Beyond the limit none is: the turn leaves
    its handle and the lease runs out by itself, the first to be given up where its engine has too little room. What
    every turn's lease has by itself doesn't count, nor what a running turn goes on from, since that turn holds it.

    Args:
        limit: tokens per tenant; 0 is no limit, and then nothing is counted.
        ttl: seconds for which an engine holds what nobody reads.
    """

    def __init__(self, limit: int, ttl: float) -> None:
        self.limit = limit
        self._ttl = ttl
        self._held: dict[str, _Held] = {}
        self._added = 0
        self._leases: dict[str, _Leased] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of when leases stop to count; those that stopped before, or count longer by now, are still in it."""

    def has_room(self, tenant: str, tokens: int, now: float) -> bool:
        """Whether the tenant may retain so many tokens more."""
        if not self.limit:
            return True
        held = self._held.get(tenant)
        if held is None:
            return tokens <= self.limit
        self._expire(held, now)
        return held.tokens + tokens <= self.limit

    def add(self, tenant: str, holder: str, tokens: int, now: float) -> None:
        """A handle was kept."""
        if not self.limit:
            return
        held = self._held.setdefault(tenant, _Held())
        held.entries.append((now, holder, tokens))
        held.tokens += tokens
        self._added += 1
        if self._added % _PURGE_EVERY == 0:
            self.expire(now)

    def release(self, tenant: str, holder: str, tokens: int) -> None:
        """A handle was sent to a reader, which gives the blocks back. Harmless for one that is not counted here, such
        as one that another router kept."""
        held = self._held.get(tenant)
        if held is None:
            return
        for entry in held.entries:
            if entry[1:] == (holder, tokens):
                held.entries.remove(entry)
                held.tokens -= tokens
                return

    def prolong(self, tenant: str, holder: str, token: str, tokens: int, seconds: float, now: float) -> bool:
        """Whether the tenant may have a lease prolonged for so long; if so it is counted until then."""
        if not self.limit:
            return True
        self._expire_leases(now)
        held = self._held.setdefault(tenant, _Held())
        self._expire(held, now)
        before = self._leases.get(token)
        counted = before.tokens if before is not None and before.tenant == tenant else 0
        if held.tokens + held.leased - counted + tokens > self.limit:
            return False  # what it was prolonged for before still counts
        self.let_go(token)
        held.leased += tokens
        self._leases[token] = _Leased(tenant, holder, tokens, now + seconds)
        heappush(self._ends, (now + seconds, token))
        if len(self._ends) > 2 * len(self._leases) + _PURGE_EVERY:
            self._ends = [(lease.until, token) for token, lease in self._leases.items()]
            heapify(self._ends)
        return True

    def let_go(self, token: str) -> None:
        """A lease is not prolonged any more. Harmless for one that is not counted here."""
        lease = self._leases.pop(token, None)
        held = None if lease is None else self._held.get(lease.tenant)
        if lease is not None and held is not None:
            held.leased -= lease.tokens

    def forget_holder(self, holder: str) -> None:
        """The engine's process is gone, and its memory with it."""
        for token in [token for token, lease in self._leases.items() if lease.holder == holder]:
            self.let_go(token)
        for held in self._held.values():
            held.entries = deque(entry for entry in held.entries if entry[1] != holder)
            held.tokens = sum(entry[2] for entry in held.entries)

    def expire(self, now: float) -> None:
        """Forget what engines have given up, and tenants that hold nothing."""
        self._expire_leases(now)
        for tenant in list(self._held):
            held = self._held[tenant]
            self._expire(held, now)
            if not held.entries and not held.leased:
                del self._held[tenant]

    def of(self, tenant: str, now: float) -> int:
        """Tokens held for a tenant."""
        held = self._held.get(tenant)
        if held is None:
            return 0
        self._expire_leases(now)
        self._expire(held, now)
        return held.tokens + held.leased

    def _expire_leases(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, token = heappop(self._ends)
            if token in self._leases and self._leases[token].until <= now:
                self.let_go(token)

    def _expire(self, held: _Held, now: float) -> None:
        while held.entries and held.entries[0][0] <= now - self._ttl:
            held.tokens -= held.entries.popleft()[2]


def queue_refusal(places: int) -> ApiError:
    """429: a tenant's waiting turns fill its share of the queue."""
    return tenant_limit("tenant_queue_limit", f"{places} waiting requests", RETRY_AFTER_SECONDS)
