"""Tells decode engines which of their promises to prolong and which to end; `core.leases` says which.

Separate from the turn because nothing here may delay one: a turn says what it began, kept or gave up, and goes on. One
timer runs while there is something to be done, and none otherwise. All is best effort: what an engine is not told, or
does not answer, runs out there by itself. A token is in no log line, page or answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson
from prometheus_client import Gauge

from pd_router.core.leases import Batch, Leases, Why
from pd_router.core.store import Entry, Fate
from pd_router.shell.counts import Counter
from pd_router.shell.exchange import Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.legs import begin_head
from pd_router.shell.metrics import Bound, Metrics
from pd_router.shell.upstream import EnginePool
from pd_wire.lease import Lease, parse
from pd_wire.names import LEASES_PATH

log = logging.getLogger("pd_router.leases")

WAIT_SECONDS: Final = 5.0
"""For a whole answer. Engines answer within two."""
MAX_ANSWER: Final = 256 * 1024
"""Bytes; the longest batch's answer has a quarter of it."""
MALFORMED: Final = "malformed_answer"
REFUSED: Final = "refused"
BROKEN: Final = "status_5xx"
FAILURES: Final = tuple(dict.fromkeys((*(failure.value for failure in Failure), MALFORMED, REFUSED, BROKEN)))
_WHY: Final = {
    Fate.OVERWRITTEN: Why.SUPERSEDED,
    Fate.ENDED: Why.ENDED,
    Fate.EVICTED: Why.EVICTED,
    Fate.EXPIRED: Why.EXPIRED,
}


class Refused(Exception):
    """An answer that is none. `reason`: of `FAILURES`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Used(NamedTuple):
    """A promise that a turn runs on."""

    holder: str
    lease: Lease


class Others(Protocol):
    """What the workers of one router tell each other of leases."""

    def ended(self, token: str) -> None:
        """Nobody is to prolong it any more, but for a turn that runs."""

    def taken(self, token: str) -> None:
        """This worker has a right to it that takes the place of any other one's."""

    async def elsewhere(self, tokens: Sequence[str]) -> Sequence[str]:
        """Those of them that a worker has ended, or another one has taken."""


class LeaseMetrics:
    """What is counted; all of it stays 0 where no engine makes promises."""

    def __init__(self, metrics: Metrics, kept: Callable[[], int]) -> None:
        registry = metrics.registry
        whys = tuple(why.value for why in Why)
        self.renewed = Counter("pd_router_leases_renewed", "Leases that an engine prolonged", (), registry).labels()
        self.released = Bound(
            Counter("pd_router_leases_released", "Leases that an engine was told to end, by why", ["reason"], registry),
            whys,
        )
        self.lost = Counter(
            "pd_router_leases_lost",
            "Leases that should have held and did not: the engine took the blocks back, or another router ended them",
            (),
            registry,
        ).labels()
        self.failures = Bound(
            Counter(
                "pd_router_lease_failures", "Requests about leases that an engine did not answer", ["reason"], registry
            ),
            FAILURES,
        )
        Gauge("pd_router_leases_kept", "Leases that are being prolonged", registry=registry).set_function(kept)
        metrics.closed["pd_router_leases_released.reason"] = whys
        metrics.closed["pd_router_lease_failures.reason"] = FAILURES


class LeaseKeeper:
    """The promises that this process has to do something for.

    Args:
        member_of: an engine by its key.
        authorization: of the router itself at engines, or "".
        heartbeat: see `Leases`.
        let_go: told the token of what is not prolonged any more.
        others: all workers; None where this process is the router.
    """

    def __init__(
        self,
        pool: EnginePool,
        member_of: Callable[[str], Member | None],
        metrics: Metrics,
        now: Callable[[], float],
        authorization: Callable[[], str],
        heartbeat: float,
        let_go: Callable[[str], None] = lambda _token: None,
        others: Others | None = None,
    ) -> None:
        self._pool = pool
        self._member_of = member_of
        self._now = now
        self._authorization = authorization
        self._let_go = let_go
        self._others = others
        self._leases = Leases(heartbeat)
        self.metrics = LeaseMetrics(metrics, lambda: len(self._leases))
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._running: set[asyncio.Task[None]] = set()
        self._told: set[tuple[str, str]] = set()
        """Engines and reasons that the log has; forgotten when the engine answers."""
        self._stopped = False

    # -- what turns say ------------------------------------------------------------------------------
    def begin(self, entry: Entry) -> Used | None:
        """A turn found it and runs. Returns what `end` is to be given, or None where nothing is promised any more. What
        another process left may have been prolonged there, so that it is ended in any case when it is superseded."""
        lease = parse(entry.lease) if entry.lease else None
        if lease is None or not self._is_there(entry):
            return None
        runs = self._leases.begin(entry.holder, lease, entry.arrived + lease.seconds, self._now(), sure=entry.own)
        self._plan()
        return Used(entry.holder, lease) if runs or not entry.own else None

    def end(self, used: Used) -> None:
        """A turn that `begin` was called for is over."""
        self._leases.end(used.holder, used.lease.token, self._now())
        self._plan()

    def hold(self, entry: Entry, seconds: float, *, exact: bool) -> bool:
        """A turn left it, or went on from it, and has a right to it for so long; with `exact` it is to end then.
        Returns whether it is still promised."""
        lease = parse(entry.lease)
        if lease is None or not self._is_there(entry):
            return False
        now = self._now()
        ends = entry.arrived + lease.seconds
        held = self._leases.hold(entry.holder, lease, now + seconds, ends, now, exact=exact, sure=entry.own)
        if held and not entry.own and self._others is not None:
            self._others.taken(lease.token)
        self._plan()
        return held

    def release(self, holder: str, lease: Lease | None, why: Why) -> None:
        """No next turn wants it."""
        if lease is not None:
            self._let_go(lease.token)
            if self._others is not None:
                self._others.ended(lease.token)  # before the engine hears it, which another may tell otherwise
        if lease is not None and self._member_of(holder) is not None:
            self._leases.release(holder, lease, why, self._now())
            self._plan()

    # -- what the store and the fleet say ------------------------------------------------------------
    def dropped(self, holder: str, lease: str, fate: Fate) -> None:
        """See `OnDrop`."""
        why = _WHY.get(fate)
        if why is not None:
            self.release(holder, parse(lease), why)

    def forget(self, holder: str) -> None:
        """The engine's process is gone."""
        self._leases.forget(holder)
        self._told = {(engine, reason) for engine, reason in self._told if engine != holder}

    def stop(self) -> None:
        """Tell nobody anything any more; what is held runs out."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._running:
            task.cancel()

    def describe(self) -> dict[str, int]:
        """For `/status`."""
        return {
            "kept": len(self._leases),
            "renewed": self.metrics.renewed.value,
            "released": sum(count.value for count in self.metrics.released.values()),
            "lost": self.metrics.lost.value,
            "failures": sum(count.value for count in self.metrics.failures.values()),
        }

    # -- inside --------------------------------------------------------------------------------------
    def _is_there(self, entry: Entry) -> bool:
        """Whether the process that promised it still runs."""
        member = self._member_of(entry.holder)
        return member is not None and str(member.incarnation) == entry.incarnation

    def _plan(self) -> None:
        """See to it that the timer rings in time. It may ring early, never late."""
        at = self._leases.next_at()
        if at >= self._timer_at or self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._now()), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._now()
        for holder in self._leases.due(now):
            member = self._member_of(holder)
            if member is None:
                for token in self._leases.forget(holder):
                    self._let_go(token)
                continue
            batch = self._leases.batch(holder, now)
            if batch is not None:
                task = asyncio.get_running_loop().create_task(self._tell(member, batch), name="leases")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        self._plan()

    async def _tell(self, member: Member, batch: Batch) -> None:
        left: list[int] | None = None
        reason = ""
        try:
            batch = await self._without_others(member, batch)
            left = await self._ask(member, batch) if batch.items else []
        except LegError as error:
            reason = error.reason.value
        except Refused as refusal:
            reason = refusal.reason
        except Exception:
            # The top of a task: a fault of ours costs one batch.
            log.exception("leases on %s", member.key)
            reason = MALFORMED
        outcome = self._leases.answered(member.key, batch, left, self._now())
        self.metrics.renewed.inc(outcome.renewed)
        for why in outcome.released:
            self.metrics.released[why.value].inc()
        if reason:
            self.metrics.failures[reason].inc()
            if (member.key, reason) not in self._told:
                self._told.add((member.key, reason))
                log.warning("engine %s does not prolong leases: %s; they run out there", member.key, reason)
        elif self._told:
            self._told = {(engine, reason) for engine, reason in self._told if engine != member.key}
        self._plan()
        for token in outcome.gone:
            self._let_go(token)
        if outcome.lost:
            elsewhere = () if self._others is None else await self._others.elsewhere(outcome.lost)
            self.metrics.lost.inc(len(outcome.lost) - len(elsewhere))

    async def _without_others(self, member: Member, batch: Batch) -> Batch:
        """What of a batch this worker still has a right to. Where others ended or took a lease it must not prolong it,
        even if the engine has not heard of that yet."""
        renewals = [token for token, seconds in batch.items if seconds]
        if self._others is None or not renewals:
            return batch
        elsewhere = await self._others.elsewhere(renewals)
        gone = {token for token in elsewhere if not self._leases.give_up(member.key, token, self._now())}
        return batch._replace(items=tuple(item for item in batch.items if item[0] not in gone))

    async def _ask(self, member: Member, batch: Batch) -> list[int]:
        """Seconds left of each. Raises LegError and Refused."""
        body = orjson.dumps({"leases": [{"token": token, "seconds": seconds} for token, seconds in batch.items]})
        head = f"{begin_head(LEASES_PATH, member.address.authority)}{len(body)}\r\n"
        if own := self._authorization():
            head += f"authorization: {own}\r\n"
        sent = f"{head}\r\n".encode("latin-1", "replace")
        exchange = await self._pool.request(member.address, sent, body, WAIT_SECONDS)
        try:
            status = await exchange.head()
            raw = await exchange.body()
        finally:
            exchange.abort()
        if status != 200:
            raise Refused(BROKEN if status >= 500 else REFUSED)
        return read_answer(raw, batch)


def read_answer(raw: bytes, batch: Batch) -> list[int]:
    """Seconds left of each promise of a batch. Raises Refused for what is not an answer to it."""
    try:
        answer: Any = orjson.loads(raw) if len(raw) <= MAX_ANSWER else None
    except orjson.JSONDecodeError:
        answer = None
    found = answer.get("leases") if isinstance(answer, dict) else None
    if not isinstance(found, list) or len(found) != len(batch.items):
        raise Refused(MALFORMED)
    left: list[int] = []
    for one, (token, _) in zip(found, batch.items, strict=True):
        seconds = one.get("seconds") if isinstance(one, dict) and one.get("token") == token else None
        if type(seconds) is not int or seconds < 0:
            raise Refused(MALFORMED)
        left.append(seconds)
    return left
