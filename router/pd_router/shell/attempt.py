"""The attempts of one turn: engines chosen, prefill run, decode run, and what may be stopped when its client leaves.

Separate from the turn, which decides whether there is another attempt, because here is all that knows of engines and
sockets. Each attempt decides everything on one look at the engines. What one learns of engines that fail counts for the
next.
"""

from __future__ import annotations

import functools

from pd_router.core import errors
from pd_router.core.dialect import DIALECTS
from pd_router.core.fields import Api
from pd_router.core.pairs import Direction, Pair
from pd_router.core.placement import NO_PAIRS, Engine, rank_key
from pd_router.core.plan import Plan, View, plan, to_compute
from pd_router.core.policy import Decision
from pd_router.core.pulls import Pull, pull_of
from pd_router.core.request import Prepared
from pd_router.core.usage import TOLD_TO_DECODE, Correct, corrector, reused_tokens
from pd_router.shell.context import Context
from pd_router.shell.exchange import Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.health import LegWatch, watch
from pd_router.shell.keeper import Dispatch, Keeper
from pd_router.shell.legs import (
    RETRY_AFTER_SECONDS,
    LegFailed,
    Prefilled,
    network_failure,
    prefill,
    refused,
    request_head,
)
from pd_router.shell.record import TurnRecord
from pd_router.shell.relay import Headers, StreamRelay, send_whole
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

_UNREACHED = frozenset(
    {Failure.CONNECT.value, Failure.CONNECT_TIMEOUT.value, Failure.CLOSED.value, Failure.TIMEOUT.value}
)


class Attempts:
    """Of one turn. `look`, then `plan`, then `run`, for each of them.

    Args:
        own_headers: of the answer, besides those that are the engine's.
    """

    def __init__(
        self,
        context: Context,
        api: Api,
        request: Request,
        responder: Responder,
        record: TurnRecord,
        keeper: Keeper,
        request_id: str,
        own_headers: Headers,
    ) -> None:
        self._context = context
        self._api = api
        self._dialect = DIALECTS[api]
        self._request = request
        self._responder = responder
        self._record = record
        self._keeper = keeper
        self._request_id = request_id
        self._own_headers = own_headers
        self._tenant = request.tenant
        self.decodes: tuple[Engine, ...] = ()
        """The decode engines at the last look."""
        self._prefills: tuple[Engine, ...] = ()
        self._avoid: set[str] = set()
        self._avoid_pairs: frozenset[tuple[str, str]] = frozenset()
        self._exchange: Exchange | None = None
        self._leg = ""
        self._watched: tuple[LegWatch, ...] = ()
        """The legs of the attempt that runs."""
        self._reading = False
        """The engine of the leg that runs was given the other's handle and may be reading its KV."""
        self._prefilled_at = 0.0

    def look(self, *, two_legs: bool) -> None:
        """The engines as they are now; one attempt decides everything on this view, and awaits nothing meanwhile."""
        now = self._context.now()
        self.decodes = self._context.fleet.snapshot(ROLE_DECODE, now)
        self._prefills = self._context.fleet.snapshot(ROLE_PREFILL, now) if two_legs else ()

    def plan(self, prepared: Prepared, decision: Decision) -> Plan:
        """Who serves this attempt. Nothing is awaited between the look at the engines and the leases on them."""
        context = self._context
        now, pairs = context.now(), context.fleet.pairs
        view = View(
            self.decodes,
            self._prefills,
            context.loads,
            no_handoff=pairs.blocked(Direction.HANDOFF, now) if pairs else NO_PAIRS,
            no_pull=pairs.blocked(Direction.PULL, now) if pairs else NO_PAIRS,
            avoid=self._avoid,
            avoid_pairs=self._avoid_pairs,
            ranks=context.fleet.ranks(),
        )
        settings = context.settings
        planned = plan(prepared, decision, view, overload=settings.limits.decode_overload, bypass=settings.bypass)
        self._record.planned(planned, decision)
        return planned

    async def run(self, prepared: Prepared, planned: Plan) -> int:
        """Run the legs. Returns the answer's status. Raises LegFailed before, never after, the client has a byte."""
        context = self._context
        if planned.decode.engine is None:
            any_decode = any(engine.takes_work for engine in self.decodes)
            raise self._no_engine(ROLE_PREFILL if any_decode else ROLE_DECODE)
        if planned.prefill is not None and planned.prefill.engine is None:
            raise self._no_engine(ROLE_PREFILL)
        decode = context.member(planned.decode.engine.key)
        by = context.member(planned.prefill.engine.key) if planned.prefill and planned.prefill.engine else None
        # Watched from here: while P works, all that comes would find a half-open D free, and be its trial as well.
        pair = Pair(by.key, decode.key, Direction.HANDOFF) if by is not None else None
        leg = watch(decode, pair, self._prefills, context.fleet.pairs, context.now)
        self._watched = (leg,)
        # D's place is taken before P begins: a finished prefill must not wait for one while its lease runs (HL-16).
        places = [context.loads.open(decode.key)]
        if planned.rank is not None:
            places.append(context.loads.open(rank_key(decode.key, planned.rank)))
        try:
            prefilled = await self._prefill(prepared, planned.decision, by) if by is not None else None
            return await self._decode(prepared, planned, prefilled, decode, leg)
        finally:
            leg.abandoned()
            self._watched = ()
            for place in places:
                place.close()

    async def _prefill(self, prepared: Prepared, decision: Decision, member: Member) -> Prefilled:
        context = self._context
        timeouts = context.settings.timeouts
        entry = decision.entry if decision.attach else None
        body = prepared.prefill_body(entry.handle if entry is not None else None)
        headers = self._record.began(ROLE_PREFILL, member, self._request.headers)
        head = request_head(self._request.path, member, headers, self._request_id, len(body))
        if entry is not None:
            self._record.attached(decision.linked_by)
            context.store.spent(entry)
            if self._tenant is not None and not entry.shared:
                context.guard.retained.release(self._tenant, entry.holder, entry.remote_tokens)
        started = context.now()
        work = context.loads.open(member.key, to_compute(prepared, entry))
        pair = Pair(member.key, entry.holder, Direction.PULL) if entry is not None else None
        leg = watch(member, pair, self._prefills, context.fleet.pairs, context.now)
        self._watched = (*self._watched, leg)
        self._leg, self._reading = ROLE_PREFILL, entry is not None
        within = timeouts.pull if entry is not None else timeouts.prefill
        try:
            hosts = context.fleet.hosts(ROLE_PREFILL)
            result = await prefill(context.pool, member, head, body, within, self._api, hosts, self._prefill_sent)
        except LegFailed as failure:
            self._blame(leg, failure)
            raise
        except BaseException:
            leg.abandoned()
            raise
        finally:
            work.close()
            self._leg, self._exchange = "", None
        pull = pull_of(result.report)
        leg.succeeded(moved=pull is not Pull.FAILED)
        if entry is not None:
            member.pulls[pull] += 1
        self._prefilled_at = context.now()
        self._record.prefilled(result, self._prefilled_at - started, entry is not None)
        return result

    async def _decode(
        self, prepared: Prepared, planned: Plan, prefilled: Prefilled | None, decode: Member, leg: LegWatch
    ) -> int:
        context, responder = self._context, self._responder
        timeouts = context.settings.timeouts
        params = prefilled.params if prefilled is not None else None
        status = 200
        if responder.gone and params is None:
            return status
        retain = params is not None and await self._keeper.may_retain(prepared, prefilled)
        body = prepared.decode_body(params, retain=retain)
        headers = self._record.began(ROLE_DECODE, decode, self._request.headers)
        head = request_head(self._request.path, decode, headers, self._request_id, len(body), planned.rank)
        wait = timeouts.first_byte if prepared.stream else timeouts.answer
        if responder.gone:
            # The client left between the legs. Decode still has to read P's blocks, or they are stranded until the
            # lease ends; no exchange existed for `_client_left` to bound, so the bound is set here.
            wait = timeouts.handoff
        sent = Dispatch(decode, decode.incarnation, decode.witness.identity, context.now())
        keep = functools.partial(self._keeper.keep, prepared, planned, sent)
        if params is None:
            leg.moves_nothing()
        self._leg, self._reading = ROLE_DECODE, params is not None
        try:
            exchange = self._exchange = await context.pool.request(decode.address, head, body, wait)
            if responder.gone:  # while the connection was being made
                self._bound_or_stop(exchange)
            if await exchange.head() != 200:
                raise refused("decode", exchange.status, exchange, await exchange.body(), body)
            self._record.accepted()
            if prepared.stream:
                relay = StreamRelay(
                    context,
                    self._record,
                    responder,
                    exchange,
                    self._own_headers,
                    self._prefilled_at,
                    self._dialect,
                    self._corrector(prefilled),
                )
                status = await relay.run(keep)
            else:
                exchange.limit_silence(timeouts.idle, context.now())
                raw = await exchange.body()
                await send_whole(
                    self._record,
                    responder,
                    exchange,
                    raw,
                    self._own_headers,
                    self._prefilled_at,
                    keep,
                    self._dialect,
                    self._corrector(prefilled),
                )
        except LegError as error:
            failure = network_failure("decode", error, wait)
            self._blame(leg, failure)
            raise failure from error
        except LegFailed as failure:
            self._blame(leg, failure)
            raise
        except BaseException:
            leg.abandoned()
            raise
        finally:
            if self._exchange is not None:
                self._exchange.abort()
                self._exchange = None
        if status == 502:
            leg.broke_off()
        else:
            leg.succeeded()
        return status

    def _corrector(self, prefilled: Prefilled | None) -> Correct | None:
        """What puts P's count of reused tokens in the place of D's; None where D knows it or computed the prompt."""
        if prefilled is None or prefilled.params is None or TOLD_TO_DECODE in prefilled.params:
            return None
        report = prefilled.report
        local, pulled = (report.local_tokens, report.pulled_tokens) if report is not None else (None, None)
        return corrector(self._api, reused_tokens(prefilled.cached_tokens, local, pulled))

    # -- when things go wrong ------------------------------------------------------------------------
    def client_left(self) -> None:
        """The socket is gone: stop what still may be stopped (RP-06).

        Prefill without a handle holds nothing of anybody's and is stopped at once. With a handle it may be reading, and
        decode before its first content may be too: blocks that are given up during a read are lost for a lease or, on
        some engines, end the process (EL-03, EL-13). So these may go on, within a bound.
        """
        for leg in self._watched:
            leg.let_go()  # it may be bound for long, and who comes next is the better trial
        if self._exchange is not None:
            self._bound_or_stop(self._exchange)

    @property
    def leg(self) -> str:
        """The leg that runs, "" when none does."""
        return self._leg

    def abort(self) -> None:
        """Nothing of it is wanted any more."""
        if self._exchange is not None:
            self._exchange.abort()

    def _prefill_sent(self, exchange: Exchange) -> None:
        self._exchange = exchange
        if self._responder.gone:  # while the connection was being made
            self._bound_or_stop(exchange)

    def _bound_or_stop(self, exchange: Exchange) -> None:
        if self._reading and not self._responder.started:
            exchange.bound(self._context.now() + self._context.settings.timeouts.handoff)
        else:
            exchange.abort()

    def has_untried(self, role: str) -> bool:
        """Whether an engine of the role takes work that has not failed this turn."""
        engines = self._prefills if role == ROLE_PREFILL else self.decodes
        return any(engine.takes_work and engine.key not in self._avoid for engine in engines)

    def _blame(self, leg: LegWatch, failure: LegFailed) -> None:
        """Count a failed leg, and look at the engine at once when it could not be reached."""
        member = leg.member
        self._avoid.add(member.key)
        if self._responder.gone and failure.reason == Failure.TIMEOUT.value:
            leg.abandoned()  # the bound of a client that left, and no engine's fault
            return
        if leg.failed(failure) and leg.pair is not None:
            if leg.pair.direction is Direction.PULL:
                member.pulls[Pull.FAILED] += 1
            else:
                self._avoid_pairs |= {(leg.pair.prefill, leg.pair.decode)}
        if failure.reason in _UNREACHED:
            self._context.suspect(member, gone=failure.reason == Failure.CONNECT.value)

    def _no_engine(self, role: str) -> LegFailed:
        """No engine of a role can take the turn; trying again now would find none either."""
        members = self._context.fleet.of_role(role)
        starting = any(not member.ready and member.incarnation == 0 for member in members)
        make = errors.engine_not_ready if starting else errors.no_engine
        return LegFailed(role, "no_engine", make(role, RETRY_AFTER_SECONDS), retryable=False, engine_fault=False)
